"""All memory that graphs share: allocated once, its addresses fixed for life.

Reads and writes by the host are explicit copies (`read`, `write`), never views: the same
code then serves buffers on a device.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from artifacts import Buffer
from runtime.errors import LoadError, SlotError

__all__ = ["Array", "Buffers", "Checkpoint", "CpuBuffers", "numpy_dtype"]

Array = np.ndarray[Any, np.dtype[Any]]

ALIGNMENT = 64
"""A cache line, and the widest vector register of a CPU."""

CACHES = (".key", ".value")
"""Ends of the names of buffers that `reset` leaves: rows from `length` on never count."""


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy type of a manifest's dtype."""
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


COPIES = 7
"""Copies of which `copy_bandwidth` takes the median."""


class Checkpoint(Protocol):
    """What some buffers held at a moment, kept on their own device."""

    def restore(self) -> None:
        """Give the buffers those values again; may be repeated."""

    def close(self) -> None:
        """Give the memory back; a later `restore` raises `SlotError`."""


class Buffers(Protocol):
    """Named memory on some device."""

    holder: object | None
    """Whose sequence they hold; None after a `reset`, until somebody feeds one again."""

    def declared(self, name: str) -> Buffer:
        """Type and shape of the buffer; raises `SlotError` where there is none."""

    def address(self, name: str) -> int:
        """Where the buffer begins; the same at every call."""

    def read(self, name: str, shape: Sequence[int] | None = None, offset: int = 0) -> Array:
        """A copy of the buffer, or of what `shape` covers from element `offset` on."""

    def write(self, name: str, values: Array, offset: int = 0) -> None:
        """Overwrite from element `offset` on; dtype as declared, nothing is converted."""

    def reset(self) -> None:
        """Make all as before the first prompt: states zero, nothing committed."""

    def checkpoint(self, names: Collection[str]) -> Checkpoint:
        """Copy some buffers as they are now."""

    def copy_bandwidth(self, size: int) -> float:
        """Bytes per second, read and written, of copying `size` bytes within this memory."""

    def close(self) -> None:
        """Give the memory back; every later call raises `SlotError`."""


class CpuBuffers:
    """`Buffers` in the host's memory."""

    def __init__(self, declared: Mapping[str, Buffer]) -> None:
        self.holder: object | None = None
        self._declared = dict(declared)
        self._arrays = {name: _allocate(name, buffer) for name, buffer in declared.items()}

    def _array(self, name: str) -> Array:
        self.declared(name)
        if name not in self._arrays:
            raise SlotError("the buffers are closed. Open the artifact again")
        return self._arrays[name]

    def declared(self, name: str) -> Buffer:
        """Type and shape of the buffer; raises `SlotError` where there is none."""
        if name not in self._declared:
            raise SlotError(f"there is no buffer {name!r}, only {', '.join(self._declared)}")
        return self._declared[name]

    def address(self, name: str) -> int:
        """Where the buffer begins; the same at every call."""
        return self._array(name).ctypes.data

    def read(self, name: str, shape: Sequence[int] | None = None, offset: int = 0) -> Array:
        """A copy of the buffer, or of what `shape` covers from element `offset` on."""
        if shape is None:
            return self._array(name).copy()
        return self._part(name, shape, offset).copy()

    def write(self, name: str, values: Array, offset: int = 0) -> None:
        """Overwrite from element `offset` on; dtype as declared, nothing is converted."""
        array = self._array(name)
        if values.dtype != array.dtype:
            raise SlotError(
                f"the buffer {name!r} holds {array.dtype}, not {values.dtype}. Convert before "
                "writing"
            )
        self._part(name, values.shape, offset)[...] = values

    def reset(self) -> None:
        """Make all as before the first prompt: states zero, nothing committed."""
        self.holder = None
        for name, array in self._arrays.items():
            if not name.endswith(CACHES):
                array[...] = 0

    def checkpoint(self, names: Collection[str]) -> Checkpoint:
        """Copy some buffers as they are now."""
        return _CpuCheckpoint(self, {name: self.read(name) for name in names})

    def copy_bandwidth(self, size: int) -> float:
        """Bytes per second, read and written, of copying `size` bytes in memory."""
        source, to = np.ones(size, np.uint8), np.empty(size, np.uint8)
        times = []
        for _ in range(COPIES):
            start = time.perf_counter()
            np.copyto(to, source)
            times.append(time.perf_counter() - start)
        return 2 * size / statistics.median(times)

    def close(self) -> None:
        """Give the memory back; every later call raises `SlotError`."""
        self._arrays.clear()

    def _part(self, name: str, shape: Sequence[int], offset: int) -> Array:
        array, size = self._array(name), math.prod(shape)
        if not 0 <= offset <= array.size - size:
            raise SlotError(
                f"the buffer {name!r} has {array.size} elements {list(array.shape)}; "
                f"{list(shape)} from element {offset} on does not fit"
            )
        return array.reshape(-1)[offset : offset + size].reshape(shape)


class _CpuCheckpoint:
    """`Checkpoint` in the host's memory."""

    def __init__(self, buffers: CpuBuffers, values: dict[str, Array]) -> None:
        self._buffers = buffers
        self._values: dict[str, Array] | None = values

    def restore(self) -> None:
        """Give the buffers those values again; may be repeated."""
        if self._values is None:
            raise SlotError("the checkpoint is closed. Prefill from the start")
        for name, values in self._values.items():
            self._buffers.write(name, values)

    def close(self) -> None:
        """Give the memory back; a later `restore` raises `SlotError`."""
        self._values = None


def _allocate(name: str, buffer: Buffer) -> Array:
    """Zeroed memory at a multiple of `ALIGNMENT`."""
    dtype = numpy_dtype(buffer.dtype)
    size = math.prod(buffer.shape) * dtype.itemsize
    try:
        memory = np.zeros(size + ALIGNMENT, np.uint8)
    except (MemoryError, ValueError, OverflowError) as e:
        raise LoadError(
            f"the buffer {name!r}, {buffer.dtype}{list(buffer.shape)}, takes {size} bytes, "
            "which this machine does not give. Build the artifact with a smaller capacity"
        ) from e
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(buffer.shape)
