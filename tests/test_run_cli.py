import hashlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from counting_artifact import Counting
from test_tokenizer import INNER, TOKENIZER

from runtime.cli import main
from runtime.session import Session

C = Counting()
IDS = [3, 1, 4]
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    return C.write(tmp_path_factory.mktemp("bare"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With a tokenizer of one token a byte; the model's vocabulary is larger."""
    path = C.write(tmp_path_factory.mktemp("text"))
    (path / "tokenizer.json").write_text(INNER.to_str())
    manifest = json.loads((path / "manifest.json").read_text())
    digest = hashlib.sha256((path / "tokenizer.json").read_bytes()).hexdigest()
    manifest["files"] = {"tokenizer.json": digest}
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


def run(*args: object, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args], input=stdin)


def numbers(result: Result) -> list[int]:
    assert result.exit_code == 0, result.stderr
    return [int(word) for word in result.stdout.split()]


@pytest.mark.parametrize("options", [(), ("--k", 1), ("--k", 0), ("--no-mtp",)])
def test_ids_in_and_ids_out_where_there_is_no_tokenizer(bare, options):
    result = run("generate", bare, "--ids", "3,1,4", "--max-new-tokens", 20, *options)
    assert numbers(result) == C.greedy(IDS, 20)


def test_text_is_continued_from_an_option_a_file_or_standard_input(folder, tmp_path):
    text = "na\N{LATIN SMALL LETTER I WITH DIAERESIS}ve "
    want = TOKENIZER.decode(C.greedy(TOKENIZER.encode(text), 20)) + "\n"
    (tmp_path / "prompt.txt").write_bytes(text.encode())
    ways = (
        run("generate", folder, "--max-new-tokens", 20, "--prompt", text),
        run(
            "generate",
            folder,
            "--max-new-tokens",
            20,
            "--prompt-file",
            tmp_path / "prompt.txt",
        ),
        run("generate", folder, "--max-new-tokens", 20, stdin=text.encode()),
    )
    for result in ways:
        assert result.exit_code == 0, result.stderr
        assert result.stdout == want


def test_json_is_one_object_and_nothing_else(folder):
    args = ("--ids", "3 1 4", "--max-new-tokens", 20, "--k", 3, "--json")
    result = run("generate", folder, *args)
    assert (result.exit_code, result.stderr) == (0, "")
    values = json.loads(result.stdout)
    keys = {"artifact", "k", "ids", "text", "finish", "stats", "slots", "sampling", "drafting"}
    assert values.keys() == keys | {"kernels"}
    assert values["kernels"] == {"in_use": "stock", "built_for": "stock", "reason": ""}
    assert values["ids"] == C.greedy(IDS, 20)
    assert values["text"] == TOKENIZER.decode(values["ids"])
    assert (values["finish"], values["k"]) == ("length", 3)
    stats = values["stats"]
    assert stats["tokens"] == 20
    assert stats["prompt_tokens"] == 3
    assert stats["accepted"] == sum(p["accepted"] for p in stats["positions"])
    assert stats["tokens_per_step"] == pytest.approx(19 / stats["steps"])
    assert stats["seconds"].keys() == {"prefill", "draft", "verify", "decode", "host"}
    verify = values["slots"]["verify"]
    assert verify["captures"] == 0
    assert verify["runs"] + values["slots"]["decode"]["runs"] == stats["steps"]


def test_figures_go_to_standard_error(bare):
    result = run("generate", bare, "--ids", "3,1,4", "--max-new-tokens", 20, "--k", 3)
    lines = dict(line.split(": ", 1) for line in result.stderr.splitlines())
    assert lines["ended"] == "at --max-new-tokens"
    assert lines["output"].startswith("20 tokens, ")
    assert "tokens each" in lines["target forwards"]
    assert lines["drafts accepted"].startswith("1: ")
    assert lines["graphs"].endswith("nothing captured on this provider")
    assert lines["kernels"] == "stock"


def test_a_full_cache_is_said_and_is_no_failure(bare):
    result = run("generate", bare, "--ids", "3,1,4", "--max-new-tokens", 999)
    assert numbers(result) == C.greedy(IDS, C.capacity - len(IDS) + 1)
    assert "the caches are full" in result.stderr


def test_end_of_text_ends_it_unless_ignored(tmp_path):
    want = C.greedy(IDS, 9)
    path = Counting(eos=(want[4],)).write(tmp_path)
    args = ("generate", path, "--ids", "3,1,4", "--max-new-tokens", 9)
    assert numbers(run(*args)) == want[:5]
    assert numbers(run(*args, "--ignore-eos")) == want


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--ids", "1,x"), "'x' is no token id"),
        (("--ids", "-1"), "'-1' is no token id"),
        (("--ids", "9" * 5000), "is no token id"),
        (("--ids", ""), "the prompt is empty"),
        (("--ids", "320"), "outside the vocabulary of 320"),
        (("--ids", "1 " * 64), "takes at most 63"),
        (("--ids", "1", "--prompt", "x"), "give one of them"),
        (("--ids", "1", "--k", 4), "k is 4; this artifact is built for 0 to 3"),
        (("--ids", "1", "--k", 2, "--no-mtp"), "contradict each other"),
        (("--ids", "1", "--k", -1), "'-1' is neither a number of drafts nor auto"),
        (("--ids", "1", "--max-new-tokens", 0), "0 is not in the range"),
        (("--prompt", "x"), "has no tokenizer. Give token ids"),
        (("--prompt-file", "nowhere.txt"), "does not exist"),
    ],
)
def test_misuse_exits_with_2_and_says_what_to_do(bare, args, message):
    result = run("generate", bare, *args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_a_prompt_that_is_no_text_is_misuse(folder):
    result = run("generate", folder, stdin=b"abc\xff")
    assert result.exit_code == 2
    assert "standard input is not UTF-8 at byte 3" in result.stderr


def test_an_empty_prompt_is_misuse(folder):
    assert run("generate", folder, "--prompt", "").exit_code == 2
    assert run("generate", folder, stdin=b"").exit_code == 2


def test_a_broken_artifact_exits_with_1(tmp_path):
    path = C.write(tmp_path)
    (path / "verify.onnx").write_bytes(b"")
    result = run("generate", path, "--ids", "1")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: verify.onnx has the SHA-256")


def test_nan_exits_with_1_and_names_the_graph(tmp_path):
    path = Counting(poison=True).write(tmp_path)
    result = run("generate", path, "--ids", "1", "--no-mtp")
    assert result.exit_code == 1
    assert "the decode graph gave NaN or infinity" in result.stderr


def test_a_folder_that_is_no_artifact_is_said(tmp_path):
    result = run("generate", tmp_path, "--ids", "1")
    assert result.exit_code == 1
    assert "is no artifact" in result.stderr


def interrupt_run(monkeypatch, number: int) -> None:
    """Raise what Ctrl-C raises when the graphs run for the `number`-th time."""
    native, runs = Session.run, []

    def counted(self, binding):
        runs.append(self)
        if len(runs) == number:
            raise KeyboardInterrupt
        native(self, binding)

    monkeypatch.setattr(Session, "run", counted)


def test_an_interrupt_keeps_what_was_made(bare, monkeypatch):
    interrupt_run(monkeypatch, 9)
    result = run("generate", bare, "--ids", "3,1,4", "--k", 3)
    assert result.exit_code == 130
    made = [int(word) for word in result.stdout.split()]
    assert made == C.greedy(IDS, len(made))
    assert len(made) >= 4
    assert f"output: {len(made)} tokens" in result.stderr
    assert "ended: because it was interrupted" in result.stderr


def test_an_interrupt_with_json_is_still_one_object(bare, monkeypatch):
    interrupt_run(monkeypatch, 1)
    result = run("generate", bare, "--ids", "3,1,4", "--json")
    assert result.exit_code == 130
    values = json.loads(result.stdout)
    assert (values["finish"], values["ids"]) == ("interrupted", [])


def test_ctrl_c_ends_the_process_cleanly(tmp_path):
    path = Counting(capacity=30000).write(tmp_path)
    args = [sys.executable, "-m", "runtime", "generate", str(path), "--ids", "3,1,4"]
    process = subprocess.Popen(
        [*args, "--max-new-tokens", "29000"],
        cwd=ROOT,
        bufsize=0,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    begun = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=20)
    assert process.returncode == 130, stderr.decode()
    made = [int(word) for word in (begun + stdout).split()]
    assert made[:40] == C.greedy(IDS, 40)[: len(made)]
    assert len(made) < 29000
    assert stderr.startswith(b"ended: because it was interrupted")


def test_check_exits_by_what_it_finds(bare, tmp_path):
    result = run("check", bare)
    assert result.exit_code == 0
    assert result.stdout.endswith("it runs, and rightly\n")
    result = run("check", Counting(keep_row=0).write(tmp_path / "fault"), "--json")
    assert result.exit_code == 1
    findings = json.loads(result.stdout)["findings"]
    assert {f["code"] for f in findings if f["severity"] == "error"} == {
        "run.rows",
        "run.lossless",
    }
    (tmp_path / "empty").mkdir()
    result = run("check", tmp_path / "empty")
    assert result.exit_code == 2
    assert "error run.load" in result.stdout


def test_help_has_examples_and_version_is_told():
    for args in (("--help",), ("generate", "--help"), ("check", "-h")):
        result = run(*args)
        assert result.exit_code == 0
        assert "Examples:\n  mtp-run" in result.stdout.replace("    mtp", "  mtp")
    assert "mtp-run, version" in run("--version").stdout
