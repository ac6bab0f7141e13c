"""Four-bit matrices back to floats, a block of rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import onnx
import onnx_ir as ir

from export.importing.reader import Array, Reader
from passes.streamed import StreamedTensor, rows_per_block

__all__ = ["dequantised"]

MIDDLE = 8
"""What stands for zero where no zero points are stored."""


def dequantised(
    reader: Reader, node: onnx.NodeProto, index: Array, stored: Callable[[str], Open]
) -> StreamedTensor:
    """Rows `index` of a MatMulNBits matrix, float32 ``[n, K]``: ``(q - zero) * scale``.

    The packed form is ``uint8 [N, blocks, block / 2]``, the earlier weight low; scales
    ``[N, blocks]``; zero points two a byte, each row's padded to whole bytes, or floats as
    the scales.
    """
    said = reader.attributes(node)
    n, k, block = said.get("N", 0), said.get("K", 0), said.get("block_size", 0)
    if said.get("bits", 4) != 4 or block < 16 or block & (block - 1) or min(n, k) < 1:
        reader.refuse(node, "only four bits in blocks of 16 and more can be unpacked")
    if any(node.input[4:]):
        reader.refuse(node, "it has a group index or a bias")
    blocks = -(-k // block)
    packed, scales = stored(node.input[1]), stored(node.input[2])
    zeros = stored(node.input[3]) if len(node.input) > 3 and node.input[3] else None
    sizes = {1: n * blocks * block // 2, 2: n * blocks}
    for at, size in sizes.items():
        tensor = reader.index.initializers[node.input[at]]
        if int(np.prod(tensor.dims, dtype=object)) != size:
            reader.refuse(node, f"'{tensor.name}' has not the {size} elements of its sizes")
    limit = rows_per_block((n, k), 4)

    def rows() -> Iterator[Array]:
        for start in range(0, len(index), limit):
            part = index[start : start + limit]
            data, scale = packed().reshape(n, -1), scales().reshape(n, blocks)
            zero = None if zeros is None else zeros().reshape(n, -1)
            pairs = data[part].reshape(len(part), blocks, block // 2)
            values = _nibbles(pairs).astype(np.float32)
            values -= _zeros(zero, part, blocks)[..., None]
            values *= scale[part].astype(np.float32)[..., None]
            yield np.ascontiguousarray(values.reshape(len(part), -1)[:, :k])

    return StreamedTensor(rows, dtype=ir.DataType.FLOAT, shape=(len(index), k), name=None)


Open = Callable[[], Array]


def _nibbles(packed: Array) -> Array:
    """Two for each byte of the last axis, the low one first."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def _zeros(stored: Array | None, rows: Array, blocks: int) -> Array:
    if stored is None:
        return np.full((len(rows), blocks), MIDDLE, np.float32)
    if stored.dtype == np.uint8:
        return _nibbles(stored[rows])[:, :blocks].astype(np.float32)
    return stored[rows].astype(np.float32)
