"""The committed state of an artifact's target, as its own decode graph reads it.

Where a state lies is the build's affair: in a buffer of its own, or in a part of one that all
layers share. The ports of the decode graph tell.
"""

from __future__ import annotations

import numpy as np

from artifacts import Port
from runtime.buffers import CACHES, Array
from runtime.load import Loaded

__all__ = ["cache_rows", "poison", "states_of"]

PAST = "past."
"""Beginning of the names of a graph's state inputs."""


def _ports(loaded: Loaded, *, caches: bool) -> list[Port]:
    inputs = loaded.manifest.graphs["decode"].inputs
    pasts = [port for port in inputs if port.name.startswith(PAST)]
    return [port for port in pasts if port.name.endswith(CACHES) == caches]


def _shape(port: Port) -> tuple[int, ...]:
    return tuple(size for size in port.shape if isinstance(size, int))


def states_of(loaded: Loaded) -> dict[str, Array]:
    """A copy of every convolution and recurrent state, by the name of decode's input."""
    read = loaded.buffers.read
    return {p.name: read(p.buffer, _shape(p), p.offset) for p in _ports(loaded, caches=False)}


def cache_rows(loaded: Loaded, start: int, count: int) -> dict[str, Array]:
    """A copy of some rows of every cache of the target: ``[1, Hkv, count, hd]``."""
    rows = slice(start, start + count)
    return {
        p.name: loaded.buffers.read(p.buffer, _shape(p), p.offset)[:, :, rows]
        for p in _ports(loaded, caches=True)
    }


def poison(loaded: Loaded, length: int) -> None:
    """Fill what no forward may read with NaN, or with a token that cannot be.

    That is: cache rows from `length` on, state memory that decode does not read, and what
    earlier forwards put out for the host or for themselves.
    """
    buffers = loaded.buffers
    for name in loaded.manifest.buffers:
        if name.endswith(CACHES):
            rows = buffers.read(name)
            rows[:, :, length:] = np.nan
            buffers.write(name, rows)
    states = _ports(loaded, caches=False)
    for name, buffer in loaded.manifest.buffers.items():
        if "float" in buffer.dtype and not name.endswith(CACHES):
            kept = buffers.read(name)
            buffers.write(name, np.full_like(kept, np.nan))
            for port in states:
                if port.buffer == name:
                    first, last = port.span()
                    buffers.write(name, kept.reshape(-1)[first:last], first)
    for name in ("best", "result"):
        buffers.write(name, np.full_like(buffers.read(name), -1))
