"""The base of a rotary embedding, out of its table of cosines and sines."""

from __future__ import annotations

import numpy as np

from export.errors import BundleError
from export.importing.reader import Array

__all__ = ["theta_of"]

TOLERANCE = {2: 6e-3, 4: 2e-5}
"""Largest difference of a table from the one computed here, by bytes of its numbers; half
precision rounds to 5e-4 (float16) and 4e-3 (bfloat16)."""
SMALL = 4096


def theta_of(cos: Array, sin: Array) -> float:
    """Theta of ``cos[p, j] = cos(p * theta^(-2j / dim))``, where dim is twice the columns.

    The angle per position is followed from one row to rows ever further, so that it is known
    much better than one row tells. A round number is preferred where it fits as well.

    Raises:
        BundleError: The table is of another kind (scaled, shifted), or too small to tell.
    """
    rows, half = cos.shape
    tolerance = TOLERANCE.get(cos.dtype.itemsize, 2e-5)
    cosine, sine = cos.astype(np.float64), sin.astype(np.float64)
    if sin.shape != cos.shape or half < 2 or rows < 2:
        raise BundleError(f"a rotary table of {list(cos.shape)} does not tell its base")
    angle = np.arctan2(sine[1], cosine[1])
    row = 1
    while row * 2 < min(rows, SMALL):
        row *= 2
        guess = angle * row
        angle = (guess + _turned(np.arctan2(sine[row], cosine[row]) - guess)) / row
    exponents = np.arange(half) / half
    usable = (angle > 1e-9) & (exponents > 0)
    if not usable.any():
        raise BundleError("a rotary table that does not turn has no base")
    logs = -np.log(angle[usable]) / exponents[usable]
    found = float(np.exp(np.average(logs, weights=exponents[usable] * angle[usable])))
    for theta in (*_round(found), found):
        if _fits(cosine, sine, theta, tolerance):
            return theta
    raise BundleError(
        f"the rotary table is not that of one base (the nearest is {found:.6g}); scaled "
        "positions cannot be built"
    )


def _turned(angle: Array) -> Array:
    """An angle between -pi and pi."""
    turned: Array = (angle + np.pi) % (2 * np.pi) - np.pi
    return turned


def _round(theta: float) -> list[float]:
    """Numbers of one to four digits near `theta`, the roundest first."""
    return [float(f"{theta:.{digits}e}") for digits in range(4)]


def _fits(cosine: Array, sine: Array, theta: float, tolerance: float) -> bool:
    rows, half = min(len(cosine), SMALL), cosine.shape[1]
    angle = np.arange(rows)[:, None] * theta ** -(np.arange(half) / half)
    allowed = tolerance + angle * 2e-7
    return bool(
        (np.abs(np.cos(angle) - cosine[:rows]) <= allowed).all()
        and (np.abs(np.sin(angle) - sine[:rows]) <= allowed).all()
    )
