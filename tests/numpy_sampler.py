"""Sampling by sorting the whole vocabulary in float64: what the graphs must agree with."""

import numpy as np

RANKS = 256

__all__ = ["RANKS", "distribution", "noise", "sample"]


def noise(seed, position):
    """Gumbel noise of one position, drawn from the start of the stream."""
    raw = np.random.Philox(key=seed).random_raw((position + 1) * RANKS)[position * RANKS :]
    return np.array([-np.log(-np.log((int(x >> 12) + 0.5) / 2**52)) for x in raw.tolist()])


def _kept(logits, options, prompt=(), output=()):
    """Tokens that may be drawn, likeliest first, and their scaled logits."""
    order = np.argsort(-logits, kind="stable")[:RANKS]
    x = logits[order].astype(np.float64)
    for place, token in enumerate(order):
        if token in prompt or token in output:
            penalty = options.repetition_penalty
            x[place] = x[place] / penalty if x[place] > 0 else x[place] * penalty
        times = list(output).count(token)
        x[place] -= options.presence_penalty * (times > 0)
        x[place] -= options.frequency_penalty * times
    again = np.argsort(-x, kind="stable")
    order, x = order[again], x[again]
    if options.temperature == 0:
        return order[:1], x[:1] * 0
    z = (x - x[0]) / options.temperature
    if options.top_k:
        order, z = order[: options.top_k], z[: options.top_k]
    p = np.exp(z) / np.exp(z).sum()
    if options.top_p < 1:
        size = max(1, 1 + int((np.cumsum(p) < options.top_p).sum()))
    else:
        size = len(p)
    likely = p[:size] >= options.min_p * p[0]
    return order[:size][likely], z[:size][likely]


def sample(logits, options, gumbel, prompt=(), output=()):
    """The token of one row."""
    order, z = _kept(logits, options, prompt, output)
    return int(order[np.argmax(z + gumbel[: len(z)])])


def distribution(logits, options, prompt=(), output=()):
    """Each token that can be drawn and its probability."""
    order, z = _kept(logits, options, prompt, output)
    p = np.exp(z) / np.exp(z).sum()
    return dict(zip(order.tolist(), p.tolist(), strict=True))
