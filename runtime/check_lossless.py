"""Are the tokens with drafts those of plain decoding? Each difference is explained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.decode import Decoder
from runtime.measure import TOLERANCE, gap

__all__ = ["Difference", "compare_with_greedy"]


@dataclass(frozen=True, slots=True)
class Difference:
    """A place where drafting and plain decoding chose different tokens."""

    position: int
    """Of the token among the emitted ones."""
    drafted: int
    """The token with drafts."""
    greedy: int
    """The token without."""
    gap: float
    """How far the lower of the two stands below the best logit, as a share of the largest,
    when the tokens before are run again."""
    is_tie: bool
    """Whether rounding explains it."""


def compare_with_greedy(
    decoder: Decoder, prompt: Sequence[int], count: int
) -> tuple[int, list[Difference]]:
    """Generate with drafts, then without, and explain each difference.

    After a difference, plain decoding goes on from the tokens that drafting chose, so that
    one near tie does not hide what comes after it.

    Returns:
        How many tokens were compared, and the differences.
    """
    tokens = _generate(decoder, prompt, count, decoder.manifest.k)
    differences: list[Difference] = []
    at = 0
    while at < len(tokens):
        greedy = _generate(decoder, [*prompt, *tokens[:at]], len(tokens) - at, 0)
        pairs = zip(tokens[at:], greedy, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(greedy))
        at += same
        if at >= len(tokens) or same == len(greedy):
            break
        differences.append(_explain(decoder, prompt, tokens, at, greedy[same]))
        at += 1
    return len(tokens), differences


def _generate(decoder: Decoder, ids: Sequence[int], count: int, k: int) -> list[int]:
    steps = decoder.generate(ids, count, k=k, stop_ids=())
    return [token for step in steps for token in step.tokens]


def _explain(
    decoder: Decoder, prompt: Sequence[int], tokens: list[int], at: int, greedy: int
) -> Difference:
    """Run the tokens before the difference again and look at both candidates' logits."""
    decoder.prefill([*prompt, *tokens[:at]])
    vocab = decoder.manifest.spec.vocab_size
    logits = decoder.loaded.buffers.read("logits", (vocab,))
    apart = gap(logits, tokens[at], greedy)
    limit = 2 * TOLERANCE[decoder.manifest.target.dtype]
    return Difference(at, tokens[at], greedy, apart, apart <= limit)
