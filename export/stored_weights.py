"""Stored tensors as `StreamedTensor`: rows picked, values folded, block by block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir

from export.errors import CheckpointError
from export.family import Fold, Piece, RowGroups
from export.safetensors_index import DTYPES, StoredTensor
from passes.streamed import StreamedTensor, from_array, rows_per_block

__all__ = ["is_same", "weight"]

Array = np.ndarray[Any, np.dtype[Any]]
Range = tuple[int, int]


def weight(stored: StoredTensor, piece: Piece) -> StreamedTensor:
    """The canonical tensor `piece` of a stored one, whose shape has been checked.

    Folded tensors are vectors: they are read at once, so that bad values stop a build early.

    Raises:
        CheckpointError: the dtype is none that can be built from, the file cannot be read,
            or a tensor to fold holds NaN or infinity or becomes infinite.
    """
    if stored.dtype not in DTYPES:
        raise CheckpointError(
            f"{stored.name!r} in {stored.path} is stored as {stored.dtype}; only "
            f"{', '.join(DTYPES)} can be built from, so take the unquantised checkpoint"
        )
    if piece.fold is not Fold.NONE:
        return from_array(_folded(stored, piece.fold), piece.name)
    groups = piece.rows or (RowGroups(1, stored.shape[0], 0, stored.shape[0]),)
    dtype = DTYPES[stored.dtype]
    shape = (sum(g.count * g.width for g in groups), *stored.shape[1:])
    limit = rows_per_block(shape, dtype.itemsize)

    def blocks() -> Iterator[Array]:
        return (stored.read(ranges) for ranges in _batches(groups, limit))

    return StreamedTensor(
        blocks, dtype=ir.DataType.from_numpy(dtype), shape=shape, name=piece.name
    )


def _batches(groups: tuple[RowGroups, ...], limit: int) -> Iterator[list[Range]]:
    """The ranges of rows in order, cut and gathered into batches of at most `limit` rows."""
    batch: list[Range] = []
    room = limit
    for group in groups:
        for i in range(group.count):
            start = i * group.period + group.start
            stop = start + group.width
            while start < stop:
                end = min(stop, start + room)
                batch.append((start, end))
                room -= end - start
                start = end
                if not room:
                    yield batch
                    batch, room = [], limit
    if batch:
        yield batch


def _folded(stored: StoredTensor, fold: Fold) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):  # reported below, by name
        values = stored.read([(0, stored.shape[0])]).astype(np.float32)
        match fold:
            case Fold.ONE_PLUS:
                folded = np.float32(1) + values
            case Fold.MINUS_EXP:
                folded = -np.exp(values)
            case _:
                folded = values
    bad = np.flatnonzero(~(np.isfinite(values) & np.isfinite(folded)))
    if bad.size:
        at = int(bad[0])
        raise CheckpointError(
            f"{stored.name!r} in {stored.path} holds {values[at]} at {at}, which becomes "
            f"{folded[at]}; every value must be finite, so fetch the file anew"
        )
    return folded


def is_same(one: StreamedTensor, other: StreamedTensor) -> bool:
    """Whether two tensors agree in dtype, shape and every bit."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    pairs = zip(one.blocks(), other.blocks(), strict=True)
    return all(np.array_equal(a.view(np.uint8), b.view(np.uint8)) for a, b in pairs)
