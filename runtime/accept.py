"""Which rows of a forward stand: the result that a graph hands over, read and checked."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.buffers import Array
from runtime.errors import FiniteError, SlotError

__all__ = ["Result", "parse_result"]

REBUILD = "Build the artifact again, or see what is wrong with: mtp-run check"


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
    """Read what a forward of some rows left in the buffer ``result``.

    Args:
        values: ``[2 * rows + 2] int64``: accepted, length, the best token of each row, and
            for each row 1 where its highest logit is a number, 0 for NaN and infinity.
        graph: Whose result it is, for the message.
        drafted: Drafts that counted in this forward.
        length: Rows that must be committed if no draft stood.
        vocab_size: Tokens are below it.

    Raises:
        FiniteError: An emitted token was chosen from logits that are no numbers.
        SlotError: The graph claims what cannot be, so nothing it wrote can be trusted.
    """
    accepted, committed, *rows = (int(value) for value in values)
    if not 0 <= accepted <= drafted:
        raise SlotError(
            f"the {graph} graph accepted {accepted} of {drafted} drafts. {REBUILD}"
        )
    if committed != length + accepted:
        raise SlotError(
            f"the {graph} graph committed {committed} rows where {length + accepted} stand. "
            f"{REBUILD}"
        )
    tokens = tuple(rows[: accepted + 1])
    finite = rows[len(rows) // 2 :][: accepted + 1]
    if not all(finite):
        row = finite.index(0)
        raise FiniteError(
            f"the {graph} graph gave NaN or infinity in the logits at position "
            f"{length - 1 + row} (row {row} of the forward). Start a new prompt; if it comes "
            "again the weights or the graph are broken: mtp-run check"
        )
    if not all(0 <= token < vocab_size for token in tokens):
        raise SlotError(
            f"the {graph} graph emitted {list(tokens)}, with a token outside the vocabulary "
            f"of {vocab_size}. {REBUILD}"
        )
    return Result(accepted, committed, tokens)
