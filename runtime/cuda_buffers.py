"""`Buffers` on a GPU: one allocation each, all traffic explicit and on one stream.

The host waits for the device in `read` alone. What it writes goes through page-locked memory
on the same stream, so a write is ordered before the next graph without any waiting.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import statistics
import time
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from artifacts import Buffer
from runtime.buffers import CACHES, COPIES, Array, numpy_dtype
from runtime.cuda_checkpoint import CudaCheckpoint
from runtime.cuda_driver import ON_DEVICE, TO_DEVICE, TO_HOST, CudaDriver
from runtime.errors import SlotError

__all__ = ["CudaBuffers"]

STAGING_BYTES = 1 << 20
"""Page-locked memory for each direction; larger reads and writes go in pieces."""


class CudaBuffers:
    """`Buffers` in the device's memory."""

    def __init__(
        self,
        declared: Mapping[str, Buffer],
        driver: CudaDriver,
        *,
        host_only: Collection[str] = (),
    ) -> None:
        """Allocate all, zeroed.

        Args:
            declared: What a manifest lists.
            driver: The device; stays open until the buffers are closed.
            host_only: Buffers that no graph writes: the same values are not sent twice.

        Raises:
            DeviceError: The device has too little memory.
        """
        self.holder: object | None = None
        self._declared = dict(declared)
        self._driver = driver
        self._host_only = frozenset(host_only)
        self._sent: dict[str, tuple[int, bytes]] = {}
        self._addresses: dict[str, int] = {}
        self._staging: dict[int, int] = {}
        self._queued = 0
        try:
            for kind in (TO_DEVICE, TO_HOST):
                self._staging[kind] = driver.allocate_pinned(STAGING_BYTES)
            for name, buffer in self._declared.items():
                what = f"the buffer {name!r}, {buffer.dtype}{list(buffer.shape)},"
                self._addresses[name] = driver.allocate(self.size(name), what)
                driver.zero(self._addresses[name], self.size(name))
        except BaseException:
            self.close()
            raise

    @property
    def total(self) -> int:
        """Bytes of all buffers."""
        return sum(map(self.size, self._declared))

    def size(self, name: str) -> int:
        """Bytes of a buffer."""
        buffer = self.declared(name)
        return math.prod(buffer.shape) * numpy_dtype(buffer.dtype).itemsize

    def declared(self, name: str) -> Buffer:
        """Type and shape of the buffer; raises `SlotError` where there is none."""
        if name not in self._declared:
            raise SlotError(f"there is no buffer {name!r}, only {', '.join(self._declared)}")
        return self._declared[name]

    def address(self, name: str) -> int:
        """Where the buffer begins on the device; the same at every call."""
        found = self._addresses.get(name)
        if found is None:
            self.declared(name)
            raise SlotError("the buffers are closed. Open the artifact again")
        return found

    def read(self, name: str, shape: Sequence[int] | None = None, offset: int = 0) -> Array:
        """A copy of the buffer, or of what `shape` covers from element `offset` on.

        Waits for all graphs before; one copy and one wait for each `STAGING_BYTES`.
        """
        shape = self.declared(name).shape if shape is None else shape
        start, size, dtype = self._part(name, shape, offset)
        made = np.empty(size, np.uint8)
        staging = self._staging[TO_HOST]
        for done in range(0, size, STAGING_BYTES):
            count = min(STAGING_BYTES, size - done)
            self._driver.copy(staging, start + done, count, TO_HOST)
            self._synchronize()
            ctypes.memmove(made.ctypes.data + done, staging, count)
        return made.view(dtype).reshape(shape)

    def write(self, name: str, values: Array, offset: int = 0) -> None:
        """Overwrite from element `offset` on; dtype as declared, nothing is converted.

        Returns before the device has the values; what runs next on its stream sees them.
        """
        start, size, dtype = self._part(name, values.shape, offset)
        if values.dtype != dtype:
            raise SlotError(
                f"the buffer {name!r} holds {dtype}, not {values.dtype}. Convert before "
                "writing"
            )
        data = np.ascontiguousarray(values).view(np.uint8).reshape(-1).tobytes()
        if self._sent.get(name) == (offset, data):
            return
        self._sent.pop(name, None)
        for done in range(0, size, STAGING_BYTES):
            piece = data[done : done + STAGING_BYTES]
            staging = self._stage(len(piece))
            ctypes.memmove(staging, piece, len(piece))
            self._driver.copy(start + done, staging, len(piece), TO_DEVICE)
        if name in self._host_only:
            self._sent[name] = (offset, data)

    def reset(self) -> None:
        """Make all as before the first prompt: states zero, nothing committed."""
        self.holder = None
        self._sent.clear()
        for name in self._declared:
            if not name.endswith(CACHES):
                self._driver.zero(self.address(name), self.size(name))

    @contextlib.contextmanager
    def kept(self, names: Collection[str]) -> Iterator[None]:
        """Whatever happens inside, give these buffers their values of before, on the device.

        Raises:
            DeviceError: There is no room for a second copy of them.
        """
        saved: dict[str, int] = {}
        try:
            for name in names:
                size = self.size(name)
                saved[name] = self._driver.allocate(size, f"a copy of the buffer {name!r}")
                self._driver.copy(saved[name], self.address(name), size, ON_DEVICE)
            try:
                yield
            finally:
                for name, copy in saved.items():
                    self._driver.copy(self.address(name), copy, self.size(name), ON_DEVICE)
        finally:
            self._synchronize()
            for copy in saved.values():
                self._driver.free(copy)

    def checkpoint(self, names: Collection[str]) -> CudaCheckpoint:
        """Copy some buffers as they are now, on the device.

        Raises:
            DeviceError: There is no room for a second copy of them.
        """
        return CudaCheckpoint(
            self._driver, {name: (self.address(name), self.size(name)) for name in names}
        )

    def copy_bandwidth(self, size: int) -> float:
        """Bytes per second, read and written, of copying `size` bytes on the device."""
        driver, times = self._driver, []
        source, to = (driver.allocate(size, "a measurement") for _ in range(2))
        try:
            for _ in range(COPIES):
                driver.synchronize()
                start = time.perf_counter()
                driver.copy(to, source, size, ON_DEVICE)
                driver.synchronize()
                times.append(time.perf_counter() - start)
        finally:
            driver.free(source)
            driver.free(to)
        return 2 * size / statistics.median(times)

    def close(self) -> None:
        """Give the memory back; every later call raises `SlotError`."""
        if self._staging:
            self._driver.synchronize()
        while self._addresses:
            self._driver.free(self._addresses.popitem()[1])
        while self._staging:
            self._driver.free_pinned(self._staging.popitem()[1])

    def _part(
        self, name: str, shape: Sequence[int], offset: int
    ) -> tuple[int, int, np.dtype[np.generic]]:
        """Address, bytes and type of what `shape` covers from element `offset` on."""
        address, buffer = self.address(name), self.declared(name)
        whole, elements = math.prod(buffer.shape), math.prod(shape)
        if not 0 <= offset <= whole - elements:
            raise SlotError(
                f"the buffer {name!r} has {whole} elements {list(buffer.shape)}; "
                f"{list(shape)} from element {offset} on does not fit"
            )
        dtype = numpy_dtype(buffer.dtype)
        return address + offset * dtype.itemsize, elements * dtype.itemsize, dtype

    def _stage(self, size: int) -> int:
        """Room for `size` bytes that no copy still reads."""
        if self._queued + size > STAGING_BYTES:
            self._synchronize()
        start, self._queued = self._staging[TO_DEVICE] + self._queued, self._queued + size
        return start

    def _synchronize(self) -> None:
        self._driver.synchronize()
        self._queued = 0
