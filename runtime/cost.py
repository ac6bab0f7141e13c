"""When drafting pays: times that were measured, against acceptance as it runs.

A verify has the same rows however many drafts count, and the head always makes all its
guesses, so a step costs the same for any number of drafts but none. What is left to decide is
who drafts, if anyone: the source that promises the most tokens a second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Costs", "DraftPolicy"]

PRIOR = 0.75
"""Acceptance that a source is trusted with before it has shown any."""
TRUST = 4
"""Drafts that the prior counts for."""
LEAST_WEIGHT = 1 / 32
"""Of the newest draft in the running acceptance: the last few dozen decide."""
FIRST_PAUSE = 32
"""Steps without a source that does not pay, before it is tried again."""
LONGEST_PAUSE = 2048
"""Each try that fails doubles the pause up to this."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of one run of each graph."""

    decode: float
    verify: float
    draft: float
    """The head's catch-up over a verify's rows and all its guesses."""

    def of(self, source: str) -> float:
        """A step with drafts of `source`; what is no head costs nothing itself."""
        return self.verify + (self.draft if source == "head" else 0.0)

    def to_json(self) -> dict[str, float]:
        """As plain JSON values."""
        return asdict(self)


@dataclass(slots=True)
class _Source:
    """What is known of one source of drafts."""

    acceptance: list[float]
    """By position: running share that stood, where all earlier ones did."""
    tried: list[int]
    """By position: drafts that this share is of."""
    pause: int = FIRST_PAUSE
    wait: int = FIRST_PAUSE
    """Steps that could use it and do without, until it is tried again."""
    tries: int = 0
    """Steps that drafted although it did not seem to pay."""

    def expected(self, drafts: int) -> float:
        """Tokens that a step with so many drafts should yield."""
        tokens = stands = 1.0
        for share in self.acceptance[:drafts]:
            stands *= share
            tokens += stands
        return tokens

    def learn(self, drafted: int, accepted: int) -> None:
        for position in range(min(accepted + 1, drafted)):
            self.tried[position] += 1
            weight = max(LEAST_WEIGHT, 1 / (TRUST + self.tried[position]))
            stood = float(position < accepted)
            self.acceptance[position] += weight * (stood - self.acceptance[position])


@dataclass(slots=True)
class DraftPolicy:
    """Chooses the source of each step's drafts; knows nothing of graphs or clocks.

    A source that does not pay is tried again after a pause, which doubles with each try of
    which no draft stands; a try that pays for itself is followed by another one at once.
    """

    costs: Costs
    k: int
    """Most drafts of a step."""
    _sources: dict[str, _Source] = field(default_factory=dict)
    _trying: str | None = None

    @property
    def measured(self) -> bool:
        """Whether the costs are times, and not set so that drafting always pays."""
        return self.costs.decode < math.inf

    def choose(self, offers: Mapping[str, int]) -> str | None:
        """The source that drafts in this step, or None for a decode.

        Args:
            offers: How many drafts each source would make now, 1 or more; of equals the
                first is chosen.
        """
        self._trying = None
        rates = {
            name: self._source(name).expected(most) / self.costs.of(name)
            for name, most in offers.items()
        }
        best = max(rates, key=rates.__getitem__, default=None)
        if best is None or rates[best] > 1 / self.costs.decode:
            return best
        for name in sorted(rates, key=rates.__getitem__, reverse=True):
            source = self._source(name)
            source.wait -= 1
            if source.wait <= 0 and self._trying is None:
                source.tries += 1
                self._trying = name
        return self._trying

    def observe(self, name: str, drafted: int, accepted: int) -> None:
        """Learn what became of the drafts that `name` made in this step."""
        source = self._source(name)
        source.learn(drafted, accepted)
        pays = (1 + accepted) * self.costs.decode > self.costs.of(name)
        if self._trying == name:
            if not accepted:
                source.pause = min(2 * source.pause, LONGEST_PAUSE)
            elif pays:
                source.pause = FIRST_PAUSE
            source.wait = 1 if pays else source.pause
            self._trying = None
        elif pays:
            source.pause = source.wait = FIRST_PAUSE

    def _source(self, name: str) -> _Source:
        if name not in self._sources:
            self._sources[name] = _Source([PRIOR] * self.k, [0] * self.k)
        return self._sources[name]

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        sources = {
            name: {"acceptance": list(source.acceptance), "tries": source.tries}
            for name, source in self._sources.items()
        }
        return {"seconds": self.costs.to_json(), "sources": sources}
