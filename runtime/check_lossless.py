"""Are the tokens with drafts those of plain decoding? Each difference is explained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.decode import Decoder
from runtime.measure import TOLERANCE, gap

__all__ = ["Comparison", "Difference", "compare_with_greedy", "explain"]


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

    def __str__(self) -> str:
        return (
            f"token {self.position} is {self.drafted} with drafts and {self.greedy} without, "
            f"with logits {self.gap:.2g} of the largest apart"
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came of one prompt."""

    tokens: int
    """Emitted with drafts and compared."""
    ties: tuple[Difference, ...]
    """Differences that rounding explains."""
    real: Difference | None
    """The first difference that it does not; what follows it says nothing."""
    tried: int
    """Verifies that had drafts."""
    accepted: int
    """Drafts that stood, in all."""


def compare_with_greedy(decoder: Decoder, prompt: Sequence[int], count: int) -> Comparison:
    """Generate up to `count` tokens with drafts, then without, and explain differences.

    After a near tie, plain decoding goes on from the tokens that drafting chose, so that one
    does not hide what comes after it.
    """
    tokens = _generate(decoder, prompt, count, decoder.manifest.k)
    positions, accepted = decoder.stats.positions, decoder.stats.accepted
    limit = 2 * TOLERANCE[decoder.manifest.target.dtype]
    ties: list[Difference] = []
    real, at = None, 0
    while real is None and at < len(tokens):
        greedy = _generate(decoder, [*prompt, *tokens[:at]], len(tokens) - at, 0)
        pairs = zip(tokens[at:], greedy, strict=True)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(greedy))
        at += same
        if at < len(tokens):
            found = explain(decoder, prompt, tokens, at, greedy[same])
            if found.gap <= limit:
                ties.append(found)
            else:
                real = found
            at += 1
    tried = positions[0][0] if positions else 0
    return Comparison(len(tokens), tuple(ties), real, tried, accepted)


def _generate(decoder: Decoder, ids: Sequence[int], count: int, k: int) -> list[int]:
    steps = decoder.generate(ids, count, k=k, stop_ids=())
    return [token for step in steps for token in step.tokens]


def explain(
    decoder: Decoder, prompt: Sequence[int], tokens: list[int], at: int, greedy: int
) -> Difference:
    """Run the tokens before the difference again and look at both candidates' logits."""
    decoder.prefill([*prompt, *tokens[:at]])
    logits = decoder.loaded.buffers.read("logits", (decoder.manifest.spec.vocab_size,))
    return Difference(at, tokens[at], greedy, gap(logits, tokens[at], greedy))
