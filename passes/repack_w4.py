"""Four-bit matrices in the order in which the kernel of `onnx_mtp::MatMulW4` reads them.

A row block of the packed form has 256 rows of the matrix, as bytes in this order:

    unit   K / 128, rounded up         half   2, of 64 columns each
      tile   16, of 16 rows each         lane   32 = g * 4 + t         16 bytes
        word b * 2 + j, b the block of 32, j the half of a lane's 8 columns 32 b + 8 t ..
          byte odd * 2 + pair: column 4 j + 2 pair + odd, row g low, row g + 8 high
      scales of tiles 2 i and 2 i + 1, i < 8
        g, tile, block of 32, row g or g + 8

so that a lane gets the operand of two tensor core instructions by one load. Rows and columns
that the matrix does not have are zero weights (8) with zero scales.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from passes.quantise import BLOCK, PackedMatrix
from passes.streamed import Array, StreamedTensor

__all__ = [
    "BLOCK_ROWS",
    "HALF_BYTES",
    "SCALES",
    "UNIT_WIDTH",
    "interleave",
    "repack",
    "repack_rows",
    "unpack_rows",
]

BLOCK_ROWS = 256
"""Rows of a row block: 8 warps of two tiles."""
UNIT_WIDTH = 128
"""Columns that are loaded at once."""
VALUE_BYTES = BLOCK_ROWS * UNIT_WIDTH // 2 // 2
HALF_BYTES = VALUE_BYTES + BLOCK_ROWS * UNIT_WIDTH // 2 // BLOCK * 2
"""A half of a unit: 8,192 bytes of values, 1,024 bytes of scales."""

SCALES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
"""Types of scales that the kernel reads."""

_TILE_PAIRS, _TILES, _G, _T = BLOCK_ROWS // 32, BLOCK_ROWS // 16, 8, 4


def repack_rows(data: Array, scales: Array) -> Array:
    """Bring one row block into the kernel's order.

    Args:
        data: uint8 [n, K / 32, 16], n <= 256: two weights a byte, the earlier one low.
        scales: 16-bit floats [n, K / 32].

    Returns:
        uint8 [K / 128 rounded up * 18,432].
    """
    n, blocks, _ = data.shape
    units = -(-blocks * BLOCK // UNIT_WIDTH)
    values = np.full((BLOCK_ROWS, units * UNIT_WIDTH // BLOCK, BLOCK // 2), 0x88, np.uint8)
    values[:n, :blocks] = data
    factors = np.zeros((BLOCK_ROWS, units * UNIT_WIDTH // BLOCK), np.uint16)
    factors[:n, :blocks] = scales.view(np.uint16)
    # [tile, high, g, unit, half, b, t, j, pair]: a byte is a pair, its even column low
    pairs = values.reshape(_TILES, 2, _G, units, 2, 2, _T, 2, 2)
    low, high = pairs[:, 0], pairs[:, 1]
    even, odd = low & 15 | high << 4, low >> 4 | high & 0xF0
    lanes = np.stack([even, odd])  # [odd, tile, g, unit, half, b, t, j, pair]
    lanes = lanes.transpose(3, 4, 1, 2, 6, 5, 7, 0, 8).reshape(units, 2, VALUE_BYTES)
    table = factors.reshape(
        _TILE_PAIRS, 2, 2, _G, units, 2, 2
    )  # [i, tile, high, g, unit, half, b]
    table = np.ascontiguousarray(table.transpose(4, 5, 0, 3, 1, 6, 2))
    tail = table.reshape(units, 2, -1).view(np.uint8)
    return np.concatenate([lanes, tail], axis=2).reshape(-1)


def unpack_rows(
    packed: Array, n: int, blocks: int, dtype: np.dtype[np.generic]
) -> tuple[Array, Array]:
    """Undo `repack_rows`: data uint8 [n, blocks, 16] and scales [n, blocks] in `dtype`."""
    halves = packed.reshape(-1, 2, HALF_BYTES)
    units = halves.shape[0]
    lanes = halves[:, :, :VALUE_BYTES].reshape(units, 2, _TILES, _G, _T, 2, 2, 2, 2)
    even, odd = lanes.transpose(7, 2, 3, 0, 1, 5, 4, 6, 8)
    low, high = even & 15 | odd << 4, even >> 4 | odd & 0xF0
    values = np.stack([low, high], axis=1).reshape(BLOCK_ROWS, -1, BLOCK // 2)
    table = np.ascontiguousarray(halves[:, :, VALUE_BYTES:]).view(np.uint16)
    table = table.reshape(units, 2, _TILE_PAIRS, _G, 2, 2, 2).transpose(2, 4, 6, 3, 0, 1, 5)
    scales = np.ascontiguousarray(table).reshape(BLOCK_ROWS, -1)[:n, :blocks]
    return values[:n, :blocks], np.ascontiguousarray(scales).view(dtype)


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

    units = -(-blocks * BLOCK // UNIT_WIDTH)
    key = matrix.data.shared_as and f"{matrix.data.shared_as} w4"
    return StreamedTensor(
        row_blocks,
        dtype=ir.DataType.UINT8,
        shape=(-(-rows // BLOCK_ROWS), units * 2 * HALF_BYTES),
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
