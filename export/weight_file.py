"""Writes the one weight file of an artifact, streaming: the memory of one block.

The file is safetensors (`artifacts.weight_header`), so that any reader of weights opens it,
and ONNX refers into it as external data. Its layout is known before its data:

    header, planned = plan(tensors)       # graphs can be written from `planned`
    weights = write_weights(path, tensors)
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import onnx_ir as ir

from artifacts import Weights, WeightTensor
from artifacts.weight_header import (
    MAX_HEADER_BYTES,
    PAGE_BYTES,
    SAFETENSORS_DTYPES,
    encode_header,
    tensor_bytes,
)
from export.errors import ExportError
from passes.streamed import BLOCK_BYTES

__all__ = ["StoredTensor", "Tensors", "plan", "write_weights"]

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


class StoredTensor(Protocol):
    """What is asked of a tensor; `StreamedTensor` and onnx_ir's own have it."""

    @property
    def dtype(self) -> ir.DataType:
        """Element type."""

    @property
    def shape(self) -> ir.Shape:
        """Static shape."""

    def tofile(self, file: Any) -> None:
        """Write the little-endian bytes."""


Tensors = Mapping[str, StoredTensor] | Iterable[tuple[str, StoredTensor]]


def plan(tensors: Tensors) -> tuple[bytes, dict[str, WeightTensor]]:
    """Lay the file out without reading a weight.

    Tensors lie without holes, as safetensors demands: first those whose length is a
    multiple of a page, then of ever smaller powers of two, large before small; so each
    begins at a multiple of the largest power of two, up to a page, that divides its length.

    Args:
        tensors: Name -> tensor; equal places keep the given order.

    Returns:
        The header, and where each tensor will lie, offsets from the start of the file.

    Raises:
        ExportError: A name or a dtype that the file cannot hold.
    """
    header, placed, _ = _lay_out(tensors)
    return header, placed


def write_weights(
    path: Path, tensors: Tensors, *, on_progress: Progress | None = None
) -> Weights:
    """Write a new weight file and describe it.

    A file that could not be finished is removed. `path` must not exist: appending to a
    weight file is how half of one becomes orphaned.

    Args:
        path: Where to write.
        tensors: As for `plan`; each is written once, in the order of the plan.
        on_progress: Called with bytes written and bytes in all, at most a block apart.

    Raises:
        ExportError: As for `plan`; the disk is full or refuses; a tensor gives more or
            fewer bytes than its shape says.
    """
    header, placed, given = _lay_out(tensors)
    size = len(header) + sum(tensor.length for tensor in placed.values())
    _refuse_full_disk(path, size)
    try:
        file = path.open("xb", buffering=0)
    except OSError as e:
        raise ExportError(f"{path} cannot be created: {e.strerror or e}") from e
    try:
        with file:
            sink = _Sink(file, path, size, on_progress)
            sink.write(header)
            for name, place in placed.items():
                sink.begin(name, place.length)
                given[name].tofile(sink)
                sink.end()
            sink.sync()
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return Weights(file=path.name, size=size, sha256=sink.sha256(), tensors=placed)


class _Sink:
    """The file while it is written: hashes, counts and holds each tensor to its length."""

    def __init__(
        self, file: BinaryIO | Any, path: Path, size: int, on_progress: Progress | None
    ) -> None:
        self._file, self._path, self._size = file, path, size
        self._on_progress = on_progress
        self._digest = hashlib.sha256()
        self._done = 0
        self._name, self._end = "the header", size

    def begin(self, name: str, length: int) -> None:
        self._name, self._end = f"tensor {name!r}", self._done + length

    def end(self) -> None:
        if self._done != self._end:
            raise ExportError(
                f"{self._name} ended {self._end - self._done} bytes before its shape is "
                f"full; its source is cut short"
            )

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if self._done + size > self._end:
            raise ExportError(f"{self._name} gives more bytes than its shape holds")
        if size:  # an empty view cannot be cast
            view = memoryview(data).cast("B")
            for start in range(0, size, BLOCK_BYTES):
                self._write_block(view[start : start + BLOCK_BYTES])
        return size

    def _write_block(self, block: memoryview) -> None:
        self._digest.update(block)
        rest = block
        while rest:
            try:
                rest = rest[self._file.write(rest) :]
            except OSError as e:
                raise self._refused(e) from e
        self._done += len(block)
        if self._on_progress is not None:
            self._on_progress(self._done, self._size)

    def sync(self) -> None:
        try:
            os.fsync(self._file.fileno())
        except OSError as e:
            raise self._refused(e) from e

    def sha256(self) -> str:
        return self._digest.hexdigest()

    def _refused(self, error: OSError) -> ExportError:
        return ExportError(
            f"{self._path} cannot be written past byte {self._done} of {self._size}: "
            f"{error.strerror or error}. Make room, or choose another place"
        )


def _lay_out(
    tensors: Tensors,
) -> tuple[bytes, dict[str, WeightTensor], dict[str, StoredTensor]]:
    given = _named(tensors)
    described = {name: _describe(name, tensor) for name, tensor in given.items()}
    order = sorted(described, key=lambda name: _rank(described[name].length))
    offset, relative = 0, {}
    for name in order:
        tensor = described[name]
        relative[name] = WeightTensor(tensor.dtype, tensor.shape, offset, tensor.length)
        offset += tensor.length
    header = encode_header(relative)
    if len(header) - 8 > MAX_HEADER_BYTES:
        raise ExportError(
            f"{len(given)} tensors need a header of {len(header) - 8} bytes; readers of "
            f"safetensors take at most {MAX_HEADER_BYTES}. Use shorter names"
        )
    placed = {
        name: WeightTensor(t.dtype, t.shape, len(header) + t.offset, t.length)
        for name, t in relative.items()
    }
    return header, placed, given


def _rank(length: int) -> tuple[int, int]:
    """Ascending: by alignment, then by size, both largest first; empty tensors last."""
    return -min(PAGE_BYTES, length & -length), -length


def _named(tensors: Tensors) -> dict[str, StoredTensor]:
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    named: dict[str, StoredTensor] = {}
    for name, tensor in pairs:
        if not name or name == "__metadata__" or not _is_text(name):
            raise ExportError(
                f"a weight cannot be called {name!r}: safetensors keeps '__metadata__' for "
                "itself, and a name is text that is not empty. Rename it in its graph"
            )
        if name in named:
            raise ExportError(f"two weights are called {name!r}. Rename one in its graph")
        named[name] = tensor
    return named


def _is_text(name: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in name)


def _describe(name: str, tensor: StoredTensor) -> WeightTensor:
    dtype, shape = _dtype_name(tensor.dtype), tensor.shape
    if dtype not in SAFETENSORS_DTYPES:
        raise ExportError(
            f"weight {name!r} is {tensor.dtype}; a weight file holds "
            f"{', '.join(SAFETENSORS_DTYPES)}. Pack or cast it first"
        )
    if not shape.is_static():
        raise ExportError(f"weight {name!r} has the shape {shape}; it must be of fixed size")
    sizes = tuple(int(size) for size in shape.numpy())
    return WeightTensor(dtype, sizes, 0, tensor_bytes(dtype, sizes))


def _dtype_name(dtype: ir.DataType) -> str:
    return "float32" if dtype is ir.DataType.FLOAT else dtype.name.lower()


def _refuse_full_disk(path: Path, size: int) -> None:
    """Minutes earlier than the write that would fail."""
    try:
        stat = os.statvfs(path.parent)
    except OSError as e:
        raise ExportError(f"{path} cannot be created: {e.strerror or e}") from e
    free = stat.f_bavail * stat.f_frsize
    if stat.f_blocks and size > free:  # some file systems tell nothing of their size
        raise ExportError(
            f"{path} needs {size} bytes and its disk has {free} free. Make room, or choose "
            "another place"
        )
