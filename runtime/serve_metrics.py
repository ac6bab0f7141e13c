"""What a server counts, in Prometheus' text form."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter

from runtime.stats import Stats

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

FIRST_TOKEN_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Seconds: from a warm cache on a GPU to a long prompt on a CPU."""
STEP_BOUNDS = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0)
"""Tokens a step: 1 where nothing is accepted, k + 1 at most."""


class _Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str) -> list[str]:
        lines, below = [], 0
        bounds = [f"{bound:g}" for bound in self._bounds] + ["+Inf"]
        for bound, count in zip(bounds, self._counts, strict=True):
            below += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {below}')
        return [*lines, f"{name}_sum {self._sum!r}", f"{name}_count {below}"]


class Metrics:
    """Counts requests and what they cost; any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outcomes: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self._tried: Counter[int] = Counter()
        self._accepted: Counter[int] = Counter()
        self._first_token = _Histogram(FIRST_TOKEN_BOUNDS)
        self._tokens_per_step = _Histogram(STEP_BOUNDS)

    def finished(self, outcome: str) -> None:
        """Count a request by how it ended."""
        with self._lock:
            self._outcomes[outcome] += 1

    def generated(self, stats: Stats, first_token: float | None) -> None:
        """Count what a generation cost, also one that was cut short.

        Args:
            stats: The decoder's, of this generation.
            first_token: Seconds from the request's arrival to its first token, None where
                there was none.
        """
        with self._lock:
            for name in ("prompt_tokens", "reused", "tokens", "steps"):
                self._totals[name] += getattr(stats, name)
            for position, (tried, accepted) in enumerate(stats.positions, 1):
                self._tried[position] += tried
                self._accepted[position] += accepted
            if first_token is not None:
                self._first_token.add(first_token)
            if stats.tokens_per_step is not None:
                self._tokens_per_step.add(stats.tokens_per_step)

    def text(self, *, queued: int, running: int) -> str:
        """All of it, and the two numbers of this moment."""
        with self._lock:
            families = [
                self._counter(
                    "requests_total",
                    "Requests by how they ended.",
                    [(f'outcome="{name}"', n) for name, n in sorted(self._outcomes.items())],
                ),
                self._total("prompt_tokens", "prompt_tokens_total", "Tokens of prompts."),
                self._total("reused", "prompt_tokens_reused_total", "Of these, held already."),
                self._total("tokens", "generated_tokens_total", "Tokens emitted."),
                self._total("steps", "steps_total", "Target forwards after prefills."),
                self._counter(
                    "drafts_total",
                    "Drafts by position, tried where all earlier ones stood.",
                    [(f'position="{p}"', n) for p, n in sorted(self._tried.items())],
                ),
                self._counter(
                    "drafts_accepted_total",
                    "Drafts that stood, by position.",
                    [(f'position="{p}"', n) for p, n in sorted(self._accepted.items())],
                ),
                _family(
                    "time_to_first_token_seconds",
                    "histogram",
                    "From a request's arrival.",
                    self._first_token.lines("mtp_time_to_first_token_seconds"),
                ),
                _family(
                    "tokens_per_step",
                    "histogram",
                    "Tokens a target forward, by request.",
                    self._tokens_per_step.lines("mtp_tokens_per_step"),
                ),
                _gauge("queue_length", "Requests that wait.", queued),
                _gauge("requests_running", "Requests being decoded.", running),
            ]
        return "".join(families)

    def _total(self, key: str, name: str, about: str) -> str:
        return self._counter(name, about, [("", self._totals[key])])

    def _counter(self, name: str, about: str, values: list[tuple[str, int]]) -> str:
        lines = [
            f"mtp_{name}{{{label}}} {n}" if label else f"mtp_{name} {n}" for label, n in values
        ]
        return _family(name, "counter", about, lines)


def _gauge(name: str, about: str, value: int) -> str:
    return _family(name, "gauge", about, [f"mtp_{name} {value}"])


def _family(name: str, kind: str, about: str, lines: list[str]) -> str:
    head = [f"# HELP mtp_{name} {about}", f"# TYPE mtp_{name} {kind}"]
    return "\n".join([*head, *lines]) + "\n"
