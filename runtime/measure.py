"""How far two arrays are apart, and how far they may be."""

from __future__ import annotations

import numpy as np

from runtime.buffers import Array

__all__ = ["TOLERANCE", "gap", "spread"]

TOLERANCE = {"float32": 2e-5, "float16": 2e-2, "bfloat16": 1e-1}
"""By dtype of the activations: the largest difference, as a share of the largest value, that
another order of summing explains. Float32 kernels for one and for four rows were seen 2e-6
apart, so a difference over this is another computation, not another rounding."""


def spread(got: Array, expected: Array) -> float:
    """Largest difference as a share of the largest expected value (or of 1, if that is more).

    Infinite where one is not finite or the shapes differ.
    """
    if got.shape != expected.shape:
        return float("inf")
    a, b = got.astype(np.float64), expected.astype(np.float64)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    scale = max(1.0, float(np.abs(b).max(initial=0)))
    return float(np.abs(a - b).max(initial=0)) / scale


def gap(logits: Array, *tokens: int) -> float:
    """How far the worst of some tokens stands below the best one, as a share of the largest.

    Args:
        logits: ``[V]``.
        tokens: Which to look at.
    """
    values = logits.astype(np.float64)
    scale = max(1.0, float(np.abs(values).max()))
    return float(values.max() - min(values[token] for token in tokens)) / scale
