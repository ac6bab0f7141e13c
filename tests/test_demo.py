"""The demo: real figures, said truly, whatever is asked of it."""

import dataclasses
import tempfile

import pytest
from canonical import greedy_cases
from tiny_builds import loads, names
from tokenizers import Tokenizer

from export.demo import CHECKPOINT, DemoReport, DemoRun, render, show
from export.errors import ExportError
from runtime.errors import RunError

RUN = DemoRun(
    prompt="a\nlast line ",
    text="first\nsecond",
    same_tokens=True,
    tokens=9,
    greedy_forwards=8,
    mtp_forwards=4,
    greedy_seconds=0.5,
    mtp_seconds=0.25,
    positions=((4, 3), (3, 1), (0, 0)),
)


def demo(**asked):
    told = []
    asked = {"k": 3, "prompts": None, "max_new_tokens": 8, "keep": None} | asked
    report = show(progress=lambda *what: told.append(what), **asked)
    return report, told


def test_the_demo_writes_what_the_reference_wrote():
    """greedy.json was computed by transformers."""
    case = greedy_cases()[0]
    report, _ = demo(prompts=(case["prompt"],), max_new_tokens=len(case["output_ids"]))
    (run,) = report.runs
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    assert run.text == tokenizer.decode(case["output_ids"], skip_special_tokens=False)
    assert run.same_tokens
    assert run.greedy_forwards == len(case["output_ids"]) - 1
    assert run.mtp_forwards < run.greedy_forwards / 2
    tried, stood = zip(*run.positions, strict=True)
    assert tried[0] == run.mtp_forwards
    assert list(stood[:2]) == list(tried[1:])
    assert run.tokens - 1 <= run.mtp_forwards + sum(stood)


@pytest.mark.parametrize("k", [1, 8])
def test_any_k_gives_the_same_texts(k):
    assert [r.text for r in demo(k=k)[0].runs] == [r.text for r in demo(k=2)[0].runs]


def test_progress_is_told_of_building_and_decoding():
    told = [what for what, _, _ in demo()[1]]
    assert "write weights" in told
    assert told.count("decode") == 3


def test_the_artifact_is_kept_where_that_is_asked_and_nowhere_else(tmp_path, monkeypatch):
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    demo(max_new_tokens=1)
    assert names(tmp_path / "scratch") == []
    report, _ = demo(max_new_tokens=1, keep=tmp_path / "kept")
    assert loads(tmp_path / "kept")
    assert names(tmp_path / "scratch") == []
    assert render(report).endswith(f"mtp-run generate {tmp_path / 'kept'}")
    with pytest.raises(ExportError, match="holds an artifact already"):
        demo(keep=tmp_path / "kept")


@pytest.mark.parametrize("prompt", ["", "\udcff"])
def test_a_prompt_that_gives_no_tokens_is_refused(prompt):
    with pytest.raises(RunError):
        demo(prompts=(prompt,))


@pytest.mark.parametrize("prompt", ["\n", " ", "x" * 500])
def test_odd_prompts_are_shown_in_short_lines(prompt):
    text = render(demo(prompts=(prompt,))[0])
    assert max(map(len, text.splitlines())) < 110


def test_one_token_takes_no_forward_after_the_prompt():
    report, _ = demo(max_new_tokens=1)
    assert {run.mtp_forwards for run in report.runs} == {0}
    assert render(report).endswith(
        "Every token agrees: 0 target forwards without MTP, 0 with it."
    )


def test_a_report_says_what_was_measured():
    assert render(DemoReport(3, (RUN, RUN), None)).splitlines() == [
        *2
        * (
            "prompt  'last line'",
            "wrote   'first' .. (9 tokens)",
            "        without MTP 8 target forwards in 0.50 s; with MTP (k = 3) 4 in 0.25 s",
            "        drafts accepted by position: 75 %, 33 %",
            "        tokens agree",
        ),
        "Every token agrees: 16 target forwards without MTP, 8 with it, 2.00 times fewer.",
    ]


def test_a_difference_is_not_hidden():
    wrong = dataclasses.replace(RUN, same_tokens=False)
    report = DemoReport(3, (RUN, wrong), None)
    assert not report.same_tokens
    lines = render(report).splitlines()
    assert lines[4].strip() == "tokens agree"
    assert lines[9].strip() == "tokens DIFFER"
    assert lines[-1].startswith("TOKENS DIFFER: 16")
    assert report.to_json()["same_tokens"] is False
    assert report.to_json()["runs"][1]["positions"] == ((4, 3), (3, 1), (0, 0))
