"""Four-bit matrices brought into the order of `artifacts.packed_w4`, block by block."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from artifacts.packed_w4 import BLOCK_ROWS, packed_shape, repack_rows
from passes.quantise import PackedMatrix
from passes.streamed import Array, StreamedTensor

__all__ = ["SCALES", "interleave", "repack"]

SCALES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
"""Types of scales that the kernel reads."""


def repack(matrix: PackedMatrix, name: str) -> StreamedTensor:
    """The matrix as uint8 [row blocks, bytes of one], one row block in memory at a time.

    Raises:
        ValueError: The scales are not 16-bit floats, which the kernel cannot read.
    """
    if matrix.scales.dtype not in SCALES:
        raise ValueError(
            f"the scales of {matrix.data.name!r} are {matrix.scales.dtype}, MatMulW4 takes "
            "FLOAT16 or BFLOAT16: cast the weights before they are quantised"
        )
    rows, blocks, _ = matrix.data.shape.numpy()

    def row_blocks() -> Iterator[Array]:
        pieces = zip(
            _in_rows(matrix.data, BLOCK_ROWS), _in_rows(matrix.scales, BLOCK_ROWS), strict=True
        )
        return (repack_rows(data, scales)[None] for data, scales in pieces)

    key = matrix.data.shared_as and f"{matrix.data.shared_as} w4"
    return StreamedTensor(
        row_blocks,
        dtype=ir.DataType.UINT8,
        shape=packed_shape(rows, blocks),
        name=name,
        shared_as=key,
    )


def interleave(gate: PackedMatrix, value: PackedMatrix) -> PackedMatrix:
    """Gates and values by turns, eight rows each, as ``silu=1`` takes them.

    A tile of the result has a gate in row g and its value in row g + 8, so one lane of the
    kernel holds both. The result has 16 rows for each eight begun.
    """
    for a, b in ((gate.data, value.data), (gate.scales, value.scales)):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise ValueError(
                f"{a.name!r} is {a.dtype}{a.shape} and {b.name!r} {b.dtype}{b.shape}; a gate "
                "and its values must agree"
            )
    return PackedMatrix(
        _by_turns(gate.data, value.data, 0x88), _by_turns(gate.scales, value.scales, 0)
    )


def _by_turns(gate: StreamedTensor, value: StreamedTensor, padding: int) -> StreamedTensor:
    rows, *rest = gate.shape.numpy()

    def blocks() -> Iterator[Array]:
        pieces = zip(_in_rows(gate, BLOCK_ROWS), _in_rows(value, BLOCK_ROWS), strict=True)
        for pair in pieces:
            missing = -len(pair[0]) % 8
            both = [
                np.concatenate([p, np.full((missing, *rest), padding, p.dtype)]).reshape(
                    -1, 8, *rest
                )
                for p in pair
            ]
            yield np.stack(both, axis=1).reshape(-1, *rest)

    return StreamedTensor(
        blocks, dtype=gate.dtype, shape=(-(-rows // 8) * 16, *rest), name=f"{gate.name}.silu"
    )


def _in_rows(tensor: StreamedTensor, rows: int) -> Iterator[Array]:
    """The blocks of a tensor cut anew, `rows` rows each but for the last."""
    kept: list[Array] = []
    held = 0
    for block in tensor.blocks():
        kept.append(block)
        held += len(block)
        if held >= rows:
            whole = np.concatenate(kept)
            for at in range(0, held - rows + 1, rows):
                yield whole[at : at + rows]
            kept = [whole[held - held % rows :]]
            held %= rows
    if held:
        yield np.concatenate(kept)
