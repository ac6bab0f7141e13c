"""Four-bit matrices for stock operators, out of those that this project's kernels read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import numpy as np

from artifacts import DerivedTensor, Weights
from artifacts.packed_w4 import unpack_part
from runtime.buffers import Array

__all__ = ["unpacked_pieces"]


def unpacked_pieces(
    file: Array, weights: Weights, wanted: Mapping[str, DerivedTensor]
) -> Iterator[tuple[str, int, Array]]:
    """All bytes of `wanted`, one row block of a packed matrix in memory at a time.

    Args:
        file: uint8, the weight file.
        weights: Where the packed matrices lie in it.
        wanted: Checked by `derived_fault`.

    Yields:
        Name, first byte, and C-contiguous rows from there on.
    """
    by_source: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, tensor in wanted.items():
        by_source[tensor.source][tensor.part].append(name)
    for source, parts in by_source.items():
        place = weights.tensors[source]
        packed = file[place.offset : place.offset + place.length].reshape(place.shape)
        for index, row_block in enumerate(packed):
            for part, names in parts.items():
                blocks = wanted[names[0]].shape[1]
                bits = np.dtype(np.uint16)  # of scales, whatever their type
                data, scales = unpack_part(row_block, part, blocks, bits)
                for name in names:
                    rows = data if wanted[name].dtype == "uint8" else scales
                    start = index * len(rows)
                    kept = rows[: wanted[name].shape[0] - start]
                    yield name, start * rows[0].nbytes, np.ascontiguousarray(kept)
