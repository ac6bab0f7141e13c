"""Which rows of a forward stand: the result that a graph hands over, read and checked."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from runtime.buffers import Array
from runtime.errors import FiniteError, SlotError

__all__ = ["Result", "check_finite", "parse_result"]


@dataclass(frozen=True, slots=True)
class Result:
    """What one forward did."""

    accepted: int
    """Drafts that stood."""
    length: int
    """Rows committed afterwards."""
    tokens: tuple[int, ...]
    """The emitted tokens: the accepted drafts, then the target's own next one."""


def parse_result(
    values: Array, *, graph: str, drafted: int, length: int, vocab_size: int
) -> Result:
    """Read the ``result`` buffer: accepted, length, then the best token of each row.

    Args:
        values: ``[rows + 2] int64``.
        graph: Whose result it is, for the message.
        drafted: Drafts that counted in this forward.
        length: Rows that must be committed if no draft stood.
        vocab_size: Tokens are below it.

    Raises:
        SlotError: The graph claims what cannot be, so nothing it wrote can be trusted.
    """
    accepted, committed = int(values[0]), int(values[1])
    if not 0 <= accepted <= drafted:
        raise SlotError(
            f"the {graph} graph accepted {accepted} of {drafted} drafts. Build the artifact "
            "again, or see what is wrong with: mtp-run check"
        )
    tokens = tuple(int(token) for token in values[2 : 3 + accepted])
    if committed != length + accepted:
        raise SlotError(
            f"the {graph} graph committed {committed} rows where {length + accepted} stand. "
            "Build the artifact again, or see what is wrong with: mtp-run check"
        )
    if not all(0 <= token < vocab_size for token in tokens):
        raise SlotError(
            f"the {graph} graph emitted {list(tokens)}, with a token outside the vocabulary "
            f"of {vocab_size}. Build the artifact again, or see: mtp-run check"
        )
    return Result(accepted, committed, tokens)


def check_finite(logits: Array, *, graph: str, length: int) -> None:
    """Look for NaN and infinity in the rows that emitted tokens.

    Args:
        logits: ``[1, accepted + 1, V]``.
        graph: Whose logits they are, for the message.
        length: Rows that were committed if no draft stood.

    Raises:
        FiniteError: There is one; the message names the first position.
    """
    finite = np.isfinite(logits[0]).all(axis=-1)
    if not finite.all():
        row = int(np.argmin(finite))
        raise FiniteError(
            f"the {graph} graph gave NaN or infinity in the logits at position "
            f"{length - 1 + row} (row {row} of the forward). Start a new prompt; if it comes "
            "again the weights or the graph are broken: mtp-run check"
        )
