"""What a generation cost: tokens, forwards, acceptance, and time by phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from runtime.slots import Counters

__all__ = ["PHASES", "Stats"]

PHASES = ("prefill", "draft", "verify", "decode", "host")
"""Each moment of a run belongs to one; ``host`` is what happens between the graphs."""


@dataclass(slots=True)
class Stats:
    """Counts and times since the last prompt began."""

    prompt_tokens: int = 0
    reused: int = 0
    """Of these, how many the caches held already; only the others were fed."""
    tokens: int = 0
    """Emitted, the first one (by the prefill) included."""
    prefills: int = 0
    """Chunks of the prompt."""
    steps: int = 0
    """Target forwards after the prefill: verifies and decodes."""
    drafted: int = 0
    accepted: int = 0
    positions: list[list[int]] = field(default_factory=list)
    """By draft position: [tried, accepted]; tried only where all earlier ones stood."""
    proposers: dict[str, list[int]] = field(default_factory=dict)
    """By source of the drafts: [steps, drafted, accepted]."""
    first_token: float | None = None
    """Seconds from the start of the prompt to its first token."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    graphs: dict[str, Counters] = field(default_factory=dict)
    """Label -> what a captured slot did since it was opened, over all prompts."""
    _open: list[str] = field(default_factory=list)
    _since: float = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the time inside to `name`; an inner phase takes its time out of the outer."""
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now

    def count(self, *, tokens: int, drafted: int, accepted: int, source: str = "") -> None:
        """Note one step and who made its drafts."""
        self.steps += 1
        if drafted:
            made = self.proposers.setdefault(source, [0, 0, 0])
            for place, more in enumerate((1, drafted, accepted)):
                made[place] += more
        self.tokens += tokens
        self.drafted += drafted
        self.accepted += accepted
        while len(self.positions) < drafted:
            self.positions.append([0, 0])
        for position in range(min(accepted + 1, drafted)):
            self.positions[position][0] += 1
            self.positions[position][1] += position < accepted

    @property
    def decode_seconds(self) -> float:
        """Time of everything but the prefill."""
        return sum(self.seconds.values()) - self.seconds["prefill"]

    @property
    def tokens_per_second(self) -> float | None:
        """Of the tokens after the first; None before there is one."""
        if self.tokens < 2 or self.decode_seconds <= 0:
            return None
        return (self.tokens - 1) / self.decode_seconds

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens a target forward yields; None before the first step."""
        return (self.tokens - 1) / self.steps if self.steps else None

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "reused": self.reused,
            "first_token_seconds": self.first_token,
            "tokens": self.tokens,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_step": self.tokens_per_step,
            "prefills": self.prefills,
            "steps": self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "positions": [
                {"tried": tried, "accepted": accepted} for tried, accepted in self.positions
            ],
            "proposers": {
                source: {"steps": steps, "drafted": drafted, "accepted": accepted}
                for source, (steps, drafted, accepted) in self.proposers.items()
            },
            "seconds": dict(self.seconds),
            "graphs": {label: counters.to_json() for label, counters in self.graphs.items()},
        }
