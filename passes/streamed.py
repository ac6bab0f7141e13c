"""Tensors too large to hold: weights that are read, converted and written block by block.

A 27B checkpoint has single matrices of 2.5 GB, so no step of a build may hold one whole. A
`StreamedTensor` is an ``ir`` tensor like any other (it can be an initializer's value), but it
knows how to give its rows in blocks; writing one needs the memory of one block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, Protocol

import numpy as np
import onnx_ir as ir

__all__ = ["BLOCK_BYTES", "StreamedTensor", "cast", "concat_rows", "from_array"]

BLOCK_BYTES = 16 * 2**20
"""Size of a block: large enough that a disk streams, small beside any matrix that matters."""

Array = np.ndarray[Any, np.dtype[Any]]
Blocks = Callable[[], Iterator[Array]]


class Writable(Protocol):
    """What `StreamedTensor.tofile` writes to."""

    def write(self, data: memoryview, /) -> object:
        """Take the next bytes."""


class StreamedTensor(ir.LazyTensor):
    """A tensor given as a sequence of blocks along its first axis.

    `blocks` starts anew at each call and yields C-contiguous arrays of `dtype` whose first
    axes add up to ``shape[0]``; a scalar is one block. Nothing is kept between calls.

    Tensors with one `shared_as` have the same bytes (random weights of one shape), so a file
    may hold them once.
    """

    def __init__(
        self,
        blocks: Blocks,
        *,
        dtype: ir.DataType,
        shape: Sequence[int],
        name: str | None,
        shared_as: str | None = None,
    ) -> None:
        self._blocks = blocks
        self.shared_as = shared_as
        super().__init__(self._whole, dtype=dtype, shape=ir.Shape(shape), name=name)

    def __repr__(self) -> str:
        return f"StreamedTensor<{self.name!r}, {self.dtype}{list(self.shape.numpy())}>"

    def blocks(self) -> Iterator[Array]:
        """Consecutive row blocks; raises `ValueError` when they do not fill the shape."""
        shape, rows = tuple(self.shape.numpy()), 0
        for block in self._blocks():
            if block.dtype != self.dtype.numpy() or block.shape[1:] != shape[1:]:
                raise ValueError(
                    f"a block of {self.name!r} is {block.dtype}{list(block.shape)}; the "
                    f"tensor is {self.dtype.numpy()}{list(shape)}"
                )
            rows += len(block) if shape else 1
            yield block
        full = shape[0] if shape else 1
        if rows != full:
            raise ValueError(f"the blocks of {self.name!r} hold {rows} rows of {full}")

    def _whole(self) -> ir.TensorProtocol:
        blocks = list(self.blocks())
        whole = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
        return ir.Tensor(whole, dtype=self.dtype, name=self.name)

    def tofile(self, file: BinaryIO | Writable) -> None:
        """Write the little-endian bytes, one block in memory at a time."""
        for block in self.blocks():
            file.write(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)

    def renamed(self, name: str) -> StreamedTensor:
        """The same values under another name."""
        return StreamedTensor(
            self._blocks,
            dtype=self.dtype,
            shape=self.shape.numpy(),
            name=name,
            shared_as=self.shared_as,
        )


def from_array(array: Array, name: str | None = None) -> StreamedTensor:
    """A tensor that is small enough to hold."""
    dtype = ir.DataType.from_numpy(array.dtype)
    return StreamedTensor(lambda: iter((array,)), dtype=dtype, shape=array.shape, name=name)


def cast(tensor: StreamedTensor, dtype: ir.DataType) -> StreamedTensor:
    """The values in another type, rounded to nearest even, block by block."""
    if tensor.dtype == dtype:
        return tensor

    def blocks() -> Iterator[Array]:
        return (block.astype(dtype.numpy()) for block in tensor.blocks())

    key = tensor.shared_as and f"{tensor.shared_as} {dtype.name}"
    return StreamedTensor(
        blocks, dtype=dtype, shape=tensor.shape.numpy(), name=tensor.name, shared_as=key
    )


def concat_rows(tensors: Sequence[StreamedTensor], name: str) -> StreamedTensor:
    """The tensors one below the other; they agree in dtype and in all axes but the first."""
    first = tensors[0]
    for tensor in tensors:
        if tensor.dtype != first.dtype or tensor.shape[1:] != first.shape[1:]:
            raise ValueError(
                f"{tensor.name!r} is {tensor.dtype}{tensor.shape}, which does not go below "
                f"{first.name!r}, {first.dtype}{first.shape}"
            )

    def blocks() -> Iterator[Array]:
        for tensor in tensors:
            yield from tensor.blocks()

    rows = sum(tensor.shape.numpy()[0] for tensor in tensors)
    shape = (rows, *first.shape.numpy()[1:])
    keys = [tensor.shared_as for tensor in tensors]
    key = None if None in keys else " | ".join(map(str, keys))
    return StreamedTensor(blocks, dtype=first.dtype, shape=shape, name=name, shared_as=key)


def rows_per_block(shape: Sequence[int], itemsize: int) -> int:
    """Rows of a tensor of `shape` that make one block, at least one."""
    return max(1, BLOCK_BYTES // max(1, itemsize * math.prod(shape[1:])))
