"""Text to tokens and back, by the artifact's own ``tokenizer.json``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import tokenizers

from artifacts import Manifest
from artifacts.parse import MAX_JSON_BYTES
from runtime.errors import LoadError, RequestError
from runtime.load import check_file

__all__ = ["TOKENIZER", "TextStream", "Tokenizer"]

TOKENIZER = "tokenizer.json"

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What bytes decode to that are no whole character, or not yet."""
WINDOW = 16
"""Tokens that are decoded again with each new one, at most about this many."""
CONTEXT = 4
"""Tokens kept before the new ones, since some decoders treat the first token apart."""


class Tokenizer:
    """The tokenizer of an artifact."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner

    @classmethod
    def of(cls, folder: Path, manifest: Manifest) -> Tokenizer | None:
        """The artifact's tokenizer, None where it has none; raises `LoadError`."""
        digest = manifest.files.get(TOKENIZER)
        if digest is None:
            return None
        path = folder / TOKENIZER
        check_file(path, digest, limit=MAX_JSON_BYTES)
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as e:  # the library raises this very class for any fault of a file
            raise LoadError(
                f"{TOKENIZER} is no tokenizer: {e}. Copy or build the artifact again, or give "
                "the prompt as token ids"
            ) from e

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, nothing added; raises `RequestError` for what is no text."""
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise RequestError(
                f"the prompt is not UTF-8 at character {e.start}. Convert it first"
            ) from e
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of tokens, without special ones; bytes that are no character become U+FFFD."""
        return str(self._inner.decode(list(ids), skip_special_tokens=True))


class TextStream:
    """Turns tokens into text as they come, never half a character.

    The pieces put together are the text of all tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0

    def add(self, ids: Iterable[int]) -> str:
        """The text that the next tokens complete; may be empty.

        Only a last U+FFFD is held back: what stands before it can no longer become whole.
        """
        self._ids.extend(ids)
        text = self._tokenizer.decode(self._ids)
        whole = text.removesuffix(UNFINISHED)
        piece = whole[self._shown :]
        self._shown = max(self._shown, len(whole))
        if whole == text and len(self._ids) > WINDOW:
            del self._ids[:-CONTEXT]
            self._shown = len(self._tokenizer.decode(self._ids))
        return piece

    def finish(self) -> str:
        """What was still held back."""
        text = self._tokenizer.decode(self._ids)
        piece = text[self._shown :]
        self._ids.clear()
        self._shown = 0
        return piece
