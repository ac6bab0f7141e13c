"""Numbers that a graph stores, in its own file or beside it, read for a pass."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import numpy as np
import onnx_ir as ir

from artifacts import ParseError
from artifacts.graph_file import open_regular
from export.bundles.data_files import FileState, Region, data_files
from passes.fold_offsets import Read
from passes.streamed import Array

__all__ = ["reader_of"]

MAX_BYTES = 64 * 2**20
"""Of a tensor that is read whole: zero points of the largest LM head take 20 MB."""


def reader_of(folder: Path, graph_file: str) -> Read:
    """A function that reads the stored values of the graph `graph_file` of a bundle.

    It gives None for a value that is too large, of a type without numbers, or whose data
    file is not what the graph says: such a file is told by a check, not by a repair.
    """

    def read(value: ir.Value) -> Array | None:
        tensor = value.const_value
        if tensor is None or tensor.nbytes > MAX_BYTES:
            return None
        if not isinstance(tensor, ir.ExternalTensor):
            return tensor.numpy()
        return _beside(folder, graph_file, tensor)

    return read


def _beside(folder: Path, graph_file: str, tensor: ir.ExternalTensor) -> Array | None:
    file = str(PurePosixPath(graph_file).parent / PurePosixPath(str(tensor.location)))
    dtype, shape = tensor.dtype.numpy(), tensor.shape.numpy()
    size = int(np.prod(shape, dtype=object)) * dtype.itemsize
    place = Region(file, tensor.offset or 0, size)
    (found,) = data_files(folder, [place])
    if found.state is not FileState.PRESENT or tensor.length not in (None, size):
        return None
    try:
        with open_regular(folder / file) as data:
            data.seek(place.offset)
            return np.frombuffer(data.read(size), dtype).reshape(shape)
    except (OSError, ParseError, ValueError):
        return None
