"""An artifact's weights on a GPU: uploaded once, shared by the sessions of all graphs."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from artifacts import DerivedTensor, Weights, WeightTensor
from artifacts.fallback import derived_fault
from runtime.buffers import Array, numpy_dtype
from runtime.cuda_dlpack import capsule
from runtime.cuda_driver import TO_DEVICE, CudaDriver
from runtime.errors import LoadError
from runtime.unpacked_weights import unpacked_pieces

__all__ = ["CudaWeights", "check_tensors"]

ALIGNMENT = 256
"""What cudaMalloc gives and kernels with wide loads expect."""
PIECE_BYTES = 32 << 20
"""Copied at a time: the page-locked memory that an upload takes."""

Progress = Callable[[int, int], None]
"""``(done, total)`` bytes."""


def check_tensors(weights: Weights) -> None:
    """Hold each tensor's place against its type and the file; raises `LoadError`."""
    for name, tensor in weights.tensors.items():
        size = math.prod(tensor.shape) * numpy_dtype(tensor.dtype).itemsize
        if tensor.length != size or tensor.offset + size > weights.size:
            raise LoadError(
                f"manifest.json: the weight {name!r}, {tensor.dtype}{list(tensor.shape)}, "
                f"takes {size} bytes; it is said to be {tensor.length} bytes at "
                f"{tensor.offset} of {weights.size}. Build the artifact again"
            )
    for name, derived in weights.derived.items():
        reason = derived_fault(derived, weights.tensors.get(derived.source))
        if reason:
            raise LoadError(
                f"manifest.json: the weight {name!r} {reason}. Build the artifact again"
            )


class CudaWeights:
    """All tensors of the weight file in one allocation, each as a value for sessions.

    Tensors that share bytes in the file still get memory of their own: that is how a
    synthetic artifact is small on disk and honest about memory traffic.
    """

    def __init__(
        self,
        path: Path,
        weights: Weights,
        driver: CudaDriver,
        on_progress: Progress,
        *,
        names: Collection[str] | None = None,
    ) -> None:
        """Upload the file, or what is named of it.

        Args:
            path: The weight file.
            weights: What lies in it, and what is unpacked from that.
            driver: The device; stays open until the weights are closed.
            on_progress: Told of bytes on the device.
            names: Tensors to upload, derived ones among them; where None, all of the file.

        Raises:
            LoadError: A tensor does not lie in the file.
            DeviceError: The device has too little memory.
        """
        check_tensors(weights)
        self._driver = driver
        self._sources: list[Any] = []
        self.values: dict[str, Any] = {}
        """Name of an initializer -> its value on the device, an ``onnxruntime.OrtValue``."""
        tensors, derived = weights.tensors, weights.derived
        self._plain = {n: t for n, t in tensors.items() if names is None or n in names}
        self._derived = {n: t for n, t in derived.items() if n in (names or ())}
        places: dict[str, int] = {}
        self.total = 0
        for name in (*self._plain, *self._derived):
            places[name] = self.total
            self.total += -(-weights.length(name) // ALIGNMENT) * ALIGNMENT
        self._memory: int | None = driver.allocate(self.total, "the weights together")
        try:
            self._upload(path, weights, places, on_progress)
        except BaseException:
            self.close()
            raise
        for name, place in places.items():
            made = self._plain.get(name) or self._derived[name]
            self.values[name] = self._value(made, self._memory + place)

    def close(self) -> None:
        """Give the memory back; no session may hold it any more."""
        self.values.clear()
        if self._memory is not None:
            memory, self._memory = self._memory, None
            self._driver.free(memory)

    def _value(self, tensor: WeightTensor | DerivedTensor, address: int) -> Any:
        made, sources = capsule(address, tensor.dtype, tensor.shape)
        self._sources.append(sources)
        return onnxruntime.OrtValue.from_dlpack(made)

    def _upload(
        self, path: Path, weights: Weights, places: dict[str, int], on_progress: Progress
    ) -> None:
        total = sum(map(weights.length, places))
        staging, done = self._driver.allocate_pinned(PIECE_BYTES), 0
        try:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            whole = np.frombuffer(mapped, np.uint8)
            for name, first, values in self._pieces(whole, weights):
                for start in range(0, values.nbytes, PIECE_BYTES):
                    size = min(PIECE_BYTES, values.nbytes - start)
                    ctypes.memmove(staging, values.ctypes.data + start, size)
                    to = self._memory_at(places[name] + first + start)
                    self._driver.copy(to, staging, size, TO_DEVICE)
                    self._driver.synchronize()
                    done += size
                    on_progress(done, total)
        except (OSError, ValueError) as e:
            raise LoadError(f"{path.name} cannot be read: {e}. Copy the artifact again") from e
        finally:
            self._driver.synchronize()
            self._driver.free_pinned(staging)

    def _pieces(self, file: Array, weights: Weights) -> Iterator[tuple[str, int, Array]]:
        """Name, first byte and values of all that is to be uploaded."""
        for name, tensor in self._plain.items():
            yield name, 0, file[tensor.offset : tensor.offset + tensor.length]
        yield from unpacked_pieces(file, weights, self._derived)

    def _memory_at(self, place: int) -> int:
        assert self._memory is not None
        return self._memory + place
