"""Text in, text out as it comes: the whole way through an artifact in one call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from runtime.answer import Answer
from runtime.decode import Decoder
from runtime.errors import RequestError
from runtime.state import Step
from runtime.tokenizer import Tokenizer

__all__ = ["stream"]


def stream(
    decoder: Decoder,
    prompt: str,
    max_new_tokens: int,
    *,
    stop: Sequence[str] = (),
    tokenizer: Tokenizer | None = None,
    **choices: Any,
) -> Iterator[str]:
    """Continue a text.

    Args:
        decoder: Generates; its ``stats`` tell afterwards what it cost.
        prompt: The text.
        max_new_tokens: Most tokens to emit, 1 or more.
        stop: Strings that end the text, before the first of them.
        tokenizer: The artifact's; read anew where None, which takes a while if it is large.
        choices: For `Decoder.generate`, such as ``k`` or ``stop_ids``.

    Yields:
        Pieces of text, each of whole characters.

    Raises:
        RequestError: At once, where the artifact cannot do what is asked.
        RunError: A graph failed.
    """
    tokenizer = tokenizer or Tokenizer.of(decoder.loaded.folder, decoder.manifest)
    if tokenizer is None:
        raise RequestError("this artifact has no tokenizer. Use Decoder.generate with ids")
    answer = Answer(tokenizer, stop)
    steps = decoder.generate(tokenizer.encode(prompt), max_new_tokens, **choices)
    return _pieces(steps, answer)


def _pieces(steps: Iterator[Step], answer: Answer) -> Iterator[str]:
    for step in steps:
        piece = answer.add(step)
        if piece:
            yield piece
        if answer.finish is not None:
            return
