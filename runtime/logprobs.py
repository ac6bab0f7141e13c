"""Log probabilities of emitted tokens: the target's own, before sampling changes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.buffers import Array
from runtime.errors import RequestError

__all__ = ["MAX_TOP", "TokenLogprob", "check_logprobs", "token_logprob"]

MAX_TOP = 256
"""Alternatives that may be asked for; more is a whole distribution for each token."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """An emitted token's log probability and those of the likeliest ones at its place."""

    token: int
    logprob: float
    """Natural logarithm, by the target's softmax at temperature 1, without penalties."""
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens, likeliest first; the emitted one need not be among them."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        top = [{"token": token, "logprob": logprob} for token, logprob in self.top]
        return {"token": self.token, "logprob": self.logprob, "top": top}


def check_logprobs(top: int | None, vocab_size: int) -> None:
    """Raise `RequestError` where so many alternatives cannot be had."""
    most = min(MAX_TOP, vocab_size)
    if top is not None and not 0 <= top <= most:
        raise RequestError(f"logprobs is {top}; an artifact gives 0 to {most} alternatives")


def token_logprob(logits: Array, token: int, top: int) -> TokenLogprob:
    """What a row of logits says about the token that was emitted there.

    Args:
        logits: ``[V]``.
        token: The emitted one.
        top: How many of the likeliest tokens to give; of equals the lower id comes first.
    """
    values = logits.astype(np.float64)
    peak = values.max()
    values -= peak + np.log(np.exp(values - peak).sum())
    likeliest: list[int] = []
    if top:
        least = np.partition(values, -top)[-top]
        candidates = np.flatnonzero(values >= least)
        order = np.argsort(-values[candidates], kind="stable")[:top]
        likeliest = [int(i) for i in candidates[order]]
    return TokenLogprob(
        token, float(values[token]), tuple((i, float(values[i])) for i in likeliest)
    )
