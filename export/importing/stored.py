"""Weights of a bundle as streamed tensors ``[out, in]``, read when they are written."""

from __future__ import annotations

import math
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir

from export.bundles.data_files import FileState, data_files, dtype_name, region, tensor_bytes
from export.bundles.graph_index import GraphIndex, op_name
from export.bundles.layout import BundleLayout
from export.errors import BundleError
from export.importing.columns import Columns
from export.importing.dequantise import dequantised
from export.importing.reader import Array, Reader
from export.importing.tensor_file import StoredTensor, transposed
from passes.streamed import StreamedTensor, from_array, rows_per_block

__all__ = ["Weights"]

FLOATS: dict[int, np.dtype[np.generic]] = {
    onnx.TensorProto.FLOAT: np.dtype(np.float32),
    onnx.TensorProto.FLOAT16: np.dtype(np.float16),
    onnx.TensorProto.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}
DTYPES = FLOATS | {onnx.TensorProto.UINT8: np.dtype(np.uint8)}
MAX_SIZE = 2**31


class Weights:
    """The stored tensors of one graph of a bundle.

    Raises `BundleError` when a data file is not what the graph says of it.
    """

    def __init__(self, layout: BundleLayout, file: str, reader: Reader) -> None:
        self._layout, self._file, self._reader = layout, file, reader
        self._index: GraphIndex = reader.index
        self.unpacked = 0
        """Matrices that were stored in four bits."""
        _check(layout, file, self._index)

    def open(self, name: str) -> StoredTensor:
        """How to get the tensor `name`, a float or bytes."""
        tensor = self._index.initializers.get(name)
        if tensor is None:
            raise BundleError(f"{self._file} stores no '{name}', which a product reads")
        dtype = DTYPES.get(tensor.data_type)
        if dtype is None:
            raise BundleError(
                f"'{name}' in {self._file} is {dtype_name(tensor.data_type)}; only float, "
                "float16, bfloat16 and packed bytes can be imported"
            )
        self._reader.read.add(name)
        place = region(tensor, self._file)
        path = None if place is None else self._layout.folder / place.file
        return StoredTensor(tensor, path, 0 if place is None else place.offset, dtype)

    def vector(self, value: str, size: int, what: str) -> StreamedTensor:
        """A vector in float32, ``1 + w`` and ``-exp(w)`` computed in float32."""
        name, fold = self._reader.vector(value, size, what)
        stored = self.open(name)().astype(np.float32).reshape(-1)
        with np.errstate(over="ignore", invalid="ignore"):  # reported below, by name
            values = stored
            if fold == "one_plus":
                values = np.float32(1) + stored
            elif fold == "minus_exp":
                values = -np.exp(stored)
        if not np.isfinite(values).all():
            raise BundleError(f"'{name}' in {self._file} holds values that are not finite")
        return from_array(values)

    def whole(self, name: str, shape: tuple[int, ...]) -> StreamedTensor:
        """A tensor as it is stored, its shape told."""
        tensor = self._index.initializers.get(name)
        if tensor is None or math.prod(tensor.dims) != math.prod(shape):
            found = "no weight" if tensor is None else f"{list(tensor.dims)}"
            raise BundleError(f"'{name}' in {self._file} is {found}, not {list(shape)}")
        return _picked(self.open(name), np.arange(shape[0]), shape[1:], tensor)

    def matrix(self, picked: Columns) -> StreamedTensor:
        """The columns of a product as rows ``[n, in]``."""
        node, reader = picked.node, self._reader
        if op_name(node) == "com.microsoft.MatMulNBits":
            self.unpacked += 1
            return dequantised(reader, node, picked.index, self.open)
        said = reader.allow(node, transA=(0,), alpha=(1.0,), beta=(1.0,))
        reader.allow(node, transBatchA=(0,), transBatchB=(0,))
        if op_name(node) not in ("MatMul", "Gemm", "com.microsoft.FusedMatMul"):
            reader.refuse(node, "its weights are stored in a way that is not known here")
        if len(node.input) > 2 and node.input[2]:
            reader.refuse(node, "it has a bias")
        name, out_first = reader.source(node.input[1]), bool(said.get("transB", 0))
        turned = reader.index.producers.get(name)
        if turned is not None and op_name(turned) == "Transpose":
            reader.allow(turned, perm=([1, 0],))
            reader.understood(turned)
            name, out_first = reader.source(turned.input[0]), not out_first
        tensor = reader.index.initializers.get(name)
        if tensor is None or len(tensor.dims) != 2 or tensor.data_type not in FLOATS:
            reader.refuse(node, f"'{name}' is no stored matrix of floats")
        stored = self.open(name)
        width = tensor.dims[1 if out_first else 0]
        return _picked(stored, picked.index, (width,), tensor, turned=not out_first)


def _picked(
    stored: StoredTensor,
    index: Array,
    rest: tuple[int, ...],
    tensor: onnx.TensorProto,
    *,
    turned: bool = False,
) -> StreamedTensor:
    """Rows `index` of what `stored` gives, or of its transpose, block by block."""
    dtype = DTYPES[tensor.data_type]
    shape, whole = (len(index), *rest), (-1, *rest)
    limit = rows_per_block(shape, dtype.itemsize)

    def blocks() -> Iterator[Array]:
        for start in range(0, len(index), limit):
            part = index[start : start + limit]
            if turned:
                first = int(part.min())
                columns = stored.columns(first, int(part.max()) + 1)
                yield transposed(columns)[part - first]
            else:
                # mapped anew for each block: pages count as this process's until then
                yield np.array(stored().reshape(whole)[part])

    return StreamedTensor(blocks, dtype=ir.DataType(tensor.data_type), shape=shape, name=None)


def _check(layout: BundleLayout, file: str, index: GraphIndex) -> None:
    """Every tensor has sizes that are sizes, and lies in a file that holds all of it."""
    places = []
    for tensor in index.graph.initializer:
        place = region(tensor, file)
        size = tensor_bytes(tensor)
        if any(not 0 < d < MAX_SIZE for d in tensor.dims) and place is not None:
            raise BundleError(f"'{tensor.name}' in {file} is {list(tensor.dims)}, no shape")
        if place is None and tensor.HasField("raw_data") and len(tensor.raw_data) != size:
            raise BundleError(
                f"'{tensor.name}' in {file} has {len(tensor.raw_data)} bytes; its type and "
                f"shape make {size}"
            )
        if place is not None:
            if place.length != size:
                raise BundleError(
                    f"'{tensor.name}' in {file} is given {place.length} bytes; its type and "
                    f"shape make {size}"
                )
            places.append(place)
    for found in data_files(layout.folder, places):
        if found.state is not FileState.PRESENT:
            raise BundleError(
                f"{found.file}, which {file} keeps weights in, is {found.state} "
                f"({found.size} bytes, {found.wanted} are read); check says more"
            )
