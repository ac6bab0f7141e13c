"""Where a command's prompt comes from: an option, a file, standard input, or token ids."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from runtime.errors import RequestError

__all__ = ["parse_ids", "prompt_text"]

MAX_PROMPT_BYTES = 256 * 2**20
"""Far over any capacity; reading more would only use memory up."""


def parse_ids(text: str) -> list[int]:
    """Token ids separated by commas or blanks; raises `RequestError` naming what is none."""
    ids = []
    for word in text.replace(",", " ").split():
        if not (word.isascii() and word.isdigit() and len(word) <= 10):
            shown = word if len(word) <= 20 else word[:17] + "..."
            raise RequestError(f"--ids: {shown!r} is no token id. Give them as in --ids 1,2,3")
        ids.append(int(word))
    return ids


def prompt_text(prompt: str | None, file: Path | None, stream: BinaryIO | None) -> str:
    """The text of a prompt from the one source that is given.

    Args:
        prompt: The text itself.
        file: A UTF-8 file.
        stream: Read where neither is given; None where that would wait for a person.

    Raises:
        RequestError: There is none, or what there is cannot be read as UTF-8.
    """
    if prompt is not None:
        return prompt
    if file is not None:
        try:
            with file.open("rb") as opened:
                return _decoded(opened, str(file))
        except OSError as e:
            raise RequestError(f"--prompt-file {file}: {e.strerror or e}") from e
    if stream is not None:
        return _decoded(stream, "standard input")
    raise RequestError(
        "no prompt. Give one with --prompt, --prompt-file or --ids, or on standard input"
    )


def _decoded(stream: BinaryIO, name: str) -> str:
    data = stream.read(MAX_PROMPT_BYTES + 1)
    if len(data) > MAX_PROMPT_BYTES:
        raise RequestError(
            f"the prompt in {name} is over {MAX_PROMPT_BYTES} bytes. Shorten it"
        )
    try:
        return data.decode()
    except UnicodeDecodeError as e:
        raise RequestError(
            f"the prompt in {name} is not UTF-8 at byte {e.start}. Convert it first"
        ) from e
