"""How matrices are rounded to four bits: with ONNX Runtime's own quantiser."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir
from onnxruntime.capi import _pybind_state as native

from passes.quantise import BLOCK, PackedMatrix
from passes.streamed import Array, StreamedTensor

__all__ = ["MIN_ROWS", "pack_rtn"]

MIN_ROWS = 128
"""Narrower matrices (the gates of a Gated DeltaNet layer) stay as they are: their bytes do
not count, and their errors are exponentiated."""


def pack_rtn(weight: StreamedTensor) -> PackedMatrix | None:
    """Round to nearest, symmetric, one scale for 32 weights in a row.

    None for a matrix with fewer than `MIN_ROWS` rows, or whose width is no multiple of 32.
    Scales get the matrix's own dtype.
    """
    rows, width = weight.shape.numpy()
    if rows < MIN_ROWS or width % BLOCK:
        return None
    blocks = width // BLOCK

    def quantised() -> Iterator[tuple[Array, Array]]:
        return (_rtn(block) for block in weight.blocks())

    def data() -> Iterator[Array]:
        return (packed for packed, _ in quantised())

    def scales() -> Iterator[Array]:
        dtype = weight.dtype.numpy()
        return (scale.astype(dtype) for _, scale in quantised())

    return PackedMatrix(
        StreamedTensor(
            data,
            dtype=ir.DataType.UINT8,
            shape=(rows, blocks, BLOCK // 2),
            name=f"{weight.name}.q4",
        ),
        StreamedTensor(
            scales, dtype=weight.dtype, shape=(rows, blocks), name=f"{weight.name}.q4.scales"
        ),
    )


def _rtn(block: Array) -> tuple[Array, Array]:
    """Rows of a matrix to ``uint8 [n, K / 32, 16]`` and ``float32 [n, K / 32]``."""
    n, k = block.shape
    source = np.ascontiguousarray(block.astype(np.float32).T)
    data = np.zeros((n, k // BLOCK, BLOCK // 2), np.uint8)
    scales = np.zeros(n * (k // BLOCK), np.float32)
    unused = np.zeros(n * ((k // BLOCK + 1) // 2), np.uint8)
    native.quantize_matmul_4bits(data, source, scales, unused, BLOCK, n, k, True)
    return data, scales.reshape(n, k // BLOCK)
