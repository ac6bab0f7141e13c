import json
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from chat_artifact import TOKENIZER, write
from click.testing import CliRunner, Result
from counting_artifact import Counting

from runtime.chat_template import ChatTemplate
from runtime.cli import main
from runtime.conversation import Conversation
from runtime.decode import Decoder
from runtime.session import Session

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("chat"), eos=())


def chat(folder, *args: object, stdin: str | bytes = "") -> Result:
    args = ("chat", folder, "--max-new-tokens", 12, *args)
    return CliRunner().invoke(main, [str(arg) for arg in args], input=stdin)


def answers(folder, turns, **settings) -> list[str]:
    with Decoder.open(folder) as decoder:
        template = ChatTemplate.of(folder, decoder.manifest)
        conversation = Conversation(decoder, TOKENIZER, template, **settings)
        return ["".join(conversation.ask(turn, 12)) for turn in turns]


def test_each_line_is_a_turn_and_answers_go_to_standard_output(folder):
    result = chat(folder, stdin="hello\n\nagain\n")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == "\n".join(answers(folder, ["hello", "again"])).split(
        "\n"
    )


def test_json_is_one_object_a_turn_and_says_what_was_prefilled(folder):
    result = chat(folder, "--json", "--system", "s", stdin='a\n"b\\nc"\n"d\n/reset\na')
    assert (result.exit_code, result.stderr) == (0, "")
    turns = [json.loads(line) for line in result.stdout.splitlines()]
    assert [turn["text"] for turn in turns] == [
        *answers(folder, ["a", "b\nc", '"d'], system="s"),
        turns[0]["text"],
    ]
    assert turns[0].keys() == {"text", "ids", "finish", "stats"}
    assert turns[0]["stats"]["reused"] == turns[3]["stats"]["reused"] == 0
    for turn in turns[1:3]:
        assert 0 < turn["stats"]["reused"] < turn["stats"]["prompt_tokens"]


def test_exit_leaves_stats_are_shown_and_a_stop_ends_an_answer(folder):
    (whole,) = answers(folder, ["hello"])
    stop = next(c for i, c in enumerate(whole) if i and c.isprintable() and c.isascii())
    result = chat(folder, "--stop", stop, stdin="hello\n/stats\n/exit\nmore\n")
    assert result.exit_code == 0
    assert result.stdout == whole.split(stop)[0] + "\n"
    assert "ended: at a stop token" in result.stderr
    assert "drafts accepted: 1:" in result.stderr


def test_a_turn_that_does_not_fit_is_said_and_the_chat_goes_on(folder):
    result = chat(folder, "--json", stdin="x" * 600 + "\nhello\n")
    assert result.exit_code == 0
    first, second = (json.loads(line) for line in result.stdout.splitlines())
    assert "takes at most 511" in first["error"]
    assert second["text"] == answers(folder, ["hello"])[0]


def test_ctrl_c_ends_the_answer_and_not_the_chat(folder, monkeypatch):
    native, runs = Session.run, []

    def counted(self, binding):
        runs.append(self)
        if len(runs) == 6:
            raise KeyboardInterrupt
        native(self, binding)

    monkeypatch.setattr(Session, "run", counted)
    result = chat(folder, "--json", stdin="hello\nagain\n")
    assert result.exit_code == 0, result.stderr
    first, second = (json.loads(line) for line in result.stdout.splitlines())
    (whole,) = answers(folder, ["hello"])
    assert first["finish"] == "interrupted"
    assert whole.startswith(first["text"])
    assert len(first["ids"]) < 12 == len(second["ids"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--template-option", "x"), "give NAME=VALUE"),
        (("--template-option", "messages=1"), "give NAME=VALUE"),
        (("--k", 9), "k is 9; this artifact is built for 0 to 3"),
        (("--max-new-tokens", 0), "0 is not in the range"),
    ],
)
def test_misuse_exits_with_2(folder, args, message):
    result = chat(folder, *args, stdin="a\n")
    assert result.exit_code == 2
    assert message in result.stderr


def test_options_of_sampling_are_taken_and_refused_where_they_cannot_be(folder):
    result = chat(folder, "--temperature", 0.8, "--seed", 3, stdin="a\n")
    assert (result.exit_code, "built without sampling" in result.stderr) == (2, True)
    result = chat(folder, "--seed", 3, stdin="a\n")
    assert (result.exit_code, "draws nothing at temperature 0" in result.stderr) == (2, True)


def test_input_that_is_no_text_is_misuse(folder):
    result = chat(folder, stdin=b"a\n\xff\n")
    assert result.exit_code == 2
    assert "line 2 of standard input is not UTF-8 at byte 0" in result.stderr


def test_an_artifact_without_a_tokenizer_or_template_is_misuse(tmp_path):
    result = chat(Counting().write(tmp_path / "bare"), stdin="a\n")
    assert (result.exit_code, "has no tokenizer" in result.stderr) == (2, True)
    result = chat(write(tmp_path / "plain", template=None), stdin="a\n")
    assert (result.exit_code, "has no chat template" in result.stderr) == (2, True)


def test_template_options_reach_the_template(folder):
    result = chat(folder, "--json", "--template-option", "think=true", stdin="a\n")
    (turn,) = (json.loads(line) for line in result.stdout.splitlines())
    assert turn["text"] == answers(folder, ["a"], options={"think": True})[0]


def test_on_a_terminal_ctrl_c_and_ctrl_d_do_as_in_a_shell(tmp_path):
    """A real terminal: Ctrl-C drops a line and ends an answer, Ctrl-D leaves."""
    path = write(tmp_path, capacity=4000, eos=())
    ours, theirs = pty.openpty()
    args = [sys.executable, "-m", "runtime", "chat", str(path), "--max-new-tokens", "3900"]
    process = subprocess.Popen(
        args, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    seen = b""

    def wait_for(text: bytes) -> None:
        nonlocal seen
        while text not in seen:
            ready, _, _ = select.select([ours], [], [], 15)
            assert ready, seen[-500:]
            seen += os.read(ours, 65536)
        seen = seen[seen.index(text) + len(text) :]

    try:
        wait_for(b"> ")
        os.write(ours, b"dropped")
        wait_for(b"dropped")
        for _ in range(10):  # a signal between two keys is seen with the next one only
            process.send_signal(signal.SIGINT)
            if select.select([ours], [], [], 1.5)[0]:
                break
        wait_for(b"> ")
        os.write(ours, b"hello\n")
        wait_for(b"hello\r\n")
        if not seen:
            select.select([ours], [], [], 15)  # until the answer has begun
        process.send_signal(signal.SIGINT)
        wait_for(b"\n> ")
        os.write(ours, b"/stats\n")
        wait_for(b"interrupted")
        wait_for(b"> ")
        os.write(ours, b"\x04")
        assert process.wait(timeout=15) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
