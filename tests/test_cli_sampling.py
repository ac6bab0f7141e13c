import json

import pytest
from click.testing import CliRunner
from small_artifacts import build_tiny

from runtime.cli import main
from runtime.cli_sampling import sampling_of
from runtime.errors import RequestError
from runtime.sampling import SamplingOptions


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp("cli") / "tiny")


def run(folder, *args):
    args = ["generate", folder, "--ids", "5,6", "--max-new-tokens", 12, *args]
    return CliRunner().invoke(main, [str(arg) for arg in args])


def ids(result):
    assert result.exit_code == 0, result.stderr
    return [int(word) for word in result.stdout.split()]


DRAWN = ("--temperature", 1.5, "--top-k", 20, "--top-p", 0.95, "--min-p", 0.01, "--seed", 7)


def test_a_seed_gives_the_same_text_however_it_is_drafted(folder):
    texts = [
        ids(run(folder, *DRAWN, *how))
        for how in ((), ("--k", 3), ("--k", 0), ("--no-mtp",), ("--k", "auto", "--lookup"))
    ]
    assert texts[1:] == texts[:1] * 4
    assert texts[0] != ids(run(folder))
    assert texts[0] != ids(run(folder, *DRAWN[:-1], 8))


def test_how_it_was_drawn_is_told_with_the_seed(folder):
    lines = run(folder, "--temperature", 0.5, "--presence-penalty", 1).stderr.splitlines()
    told = next(line for line in lines if line.startswith("sampling: "))
    assert told.startswith("sampling: temperature 0.5, presence penalty 1, seed ")
    again = ids(run(folder, "--temperature", 0.5, "--presence-penalty", 1,
                    "--seed", told.rpartition(" ")[2]))  # fmt: skip
    assert len(again) == 12


def test_penalties_need_no_temperature(folder):
    plain = ids(run(folder))
    penalised = ids(run(folder, "--frequency-penalty", 50, "--k", 2))
    assert len(set(penalised)) == 12
    assert penalised[0] == plain[0]
    assert ids(run(folder, "--repetition-penalty", 1)) == plain


def test_json_has_options_logprobs_and_what_drafting_cost(folder):
    result = run(
        folder, "--temperature", 1, "--seed", 3, "--json", "--logprobs", 2, "--lookup"
    )
    values = json.loads(result.stdout)
    assert values["sampling"] == SamplingOptions(seed=3).to_json()
    assert [entry["token"] for entry in values["logprobs"]] == values["ids"]
    assert all(len(entry["top"]) == 2 for entry in values["logprobs"])
    assert all(entry["logprob"] <= 0 for entry in values["logprobs"])
    assert values["drafting"]["seconds"].keys() == {"decode", "verify", "draft"}
    assert set(values["stats"]["proposers"]) <= {"head", "lookup"}
    fixed = json.loads(run(folder, "--k", 3, "--json").stdout)
    assert fixed["drafting"] is fixed["sampling"] is None
    assert "logprobs" not in fixed


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--top-p", 0.9), "--top-p draws nothing at temperature 0. Give a --temperature"),
        (("--seed", 0), "--seed draws nothing at temperature 0"),
        (("--temperature", 1, "--top-k", 257), "top_k is 257; it must be 0 (no limit) to 256"),
        (("--temperature", -1), "temperature is -1.0; it must be from 0 to 100"),
        (("--temperature", "nan"), "temperature is nan"),
        (("--temperature", 1, "--seed", -1), "seed is -1"),
        (("--logprobs", 2), "Give --json with it"),
        (("--json", "--logprobs", 257), "257 is not in the range"),
        (("--json", "--logprobs", 200), "logprobs is 200; an artifact gives 0 to 128"),
        (("--no-mtp", "--lookup"), "--no-mtp and --lookup contradict each other"),
        (("--k", "many"), "'many' is neither a number of drafts nor auto"),
    ],
)
def test_misuse_is_told_in_one_sentence(folder, args, message):
    result = run(folder, *args)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert result.stdout == ""


def test_no_option_is_greedy():
    assert sampling_of({"temperature": 0.0, "seed": None}) is None
    with pytest.raises(RequestError, match="--min-p draws nothing"):
        sampling_of({"temperature": 0.0, "min_p": 0.1})
