"""The package as a library."""

import subprocess
import sys
from pathlib import Path

import pytest
from chat_artifact import TOKENIZER, write
from counting_artifact import Counting

from runtime import Decoder, stream
from runtime.errors import RequestError

ROOT = Path(__file__).parent.parent
SNIPPET = """
from pathlib import Path
from runtime import Decoder, stream

with Decoder.open(Path("demo")) as decoder:
    for piece in stream(decoder, "def main():", 64, stop=["STOP"]):
        print(piece, end="", flush=True)
    print(decoder.stats.tokens_per_step)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("library") / "demo", eos=())


def python(code: str, cwd: Path) -> str:
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=cwd,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        timeout=20,
        check=True,
    )
    return run.stdout.decode()


def test_ten_lines_load_stream_and_tell(folder):
    with Decoder.open(folder) as decoder:
        steps = decoder.generate(TOKENIZER.encode("def main():"), 64)
        text = TOKENIZER.decode([token for step in steps for token in step.tokens])
        each = decoder.stats.tokens_per_step
    assert len(SNIPPET.strip().splitlines()) <= 10
    assert python(SNIPPET, folder.parent) == f"{text}{each}\n"


def test_importing_the_package_loads_nothing_of_weight():
    code = (
        "import runtime, sys\n"
        "heavy = {'numpy', 'onnxruntime', 'tokenizers', 'jinja2'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "from runtime import Decoder\n"
        "late = {'jinja2', 'starlette', 'uvicorn', 'click', 'onnx'} & set(sys.modules)\n"
        "assert not late, late\n"
    )
    python(code, ROOT)


def test_what_is_not_there_is_said():
    import runtime

    with pytest.raises(AttributeError, match="module 'runtime' has no attribute 'Encoder'"):
        _ = runtime.Encoder


def test_pieces_end_before_a_stop_string(folder):
    with Decoder.open(folder) as decoder:
        whole = "".join(stream(decoder, "def main():", 64))
        stop = whole[9:11]
        pieces = list(stream(decoder, "def main():", 64, stop=[stop], k=2))
        assert "".join(pieces) == whole[: whole.index(stop)]
        assert "" not in pieces


def test_what_cannot_be_is_refused_at_once(folder, tmp_path):
    with Decoder.open(folder) as decoder:
        with pytest.raises(RequestError, match="the prompt is empty"):
            stream(decoder, "", 5)
        with pytest.raises(RequestError, match="a stop string is empty"):
            stream(decoder, "a", 5, stop=[""])
    bare = Decoder.open(Counting().write(tmp_path))
    with bare, pytest.raises(RequestError, match="has no tokenizer"):
        stream(bare, "a", 5)
