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

from typing import Any

import numpy as np

__all__ = [
    "BLOCK",
    "BLOCK_ROWS",
    "HALF_BYTES",
    "PARTS",
    "UNIT_WIDTH",
    "packed_shape",
    "repack_rows",
    "unpack_part",
    "unpack_rows",
]

Array = np.ndarray[Any, np.dtype[Any]]

BLOCK = 32
"""Weights that share a scale."""
PARTS = ("all", "gates", "values")
"""What of a packed matrix a matrix can be: all rows, or every other eight of them."""
BLOCK_ROWS = 256
"""Rows of a row block: 8 warps of two tiles."""
UNIT_WIDTH = 128
"""Columns that are loaded at once."""
VALUE_BYTES = BLOCK_ROWS * UNIT_WIDTH // 2 // 2
HALF_BYTES = VALUE_BYTES + BLOCK_ROWS * UNIT_WIDTH // 2 // BLOCK * 2
"""A half of a unit: 8,192 bytes of values, 1,024 bytes of scales."""

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


def unpack_part(
    packed: Array, part: str, blocks: int, dtype: np.dtype[np.generic]
) -> tuple[Array, Array]:
    """All of a row block, or of one of two matrices that lie in it by turns.

    Args:
        packed: One row block.
        part: One of `PARTS`.
        blocks: K / 32.
        dtype: Of the scales.

    Returns:
        Data uint8 [rows, blocks, 16] and scales [rows, blocks]; 256 rows, or 128 by turns.
    """
    data, scales = unpack_rows(packed, BLOCK_ROWS, blocks, dtype)
    if part == "all":
        return data, scales
    turn = PARTS.index(part) - 1
    return _turns(data, turn), _turns(scales, turn)


def _turns(rows: Array, turn: int) -> Array:
    by_turns = rows.reshape(-1, 2, 8, *rows.shape[1:])
    return np.ascontiguousarray(by_turns[:, turn]).reshape(-1, *rows.shape[1:])


def packed_shape(rows: int, blocks: int) -> tuple[int, int]:
    """Row blocks and bytes of one, of a packed matrix [rows, blocks * 32]."""
    units = -(-blocks * BLOCK // UNIT_WIDTH)
    return -(-rows // BLOCK_ROWS), units * 2 * HALF_BYTES
