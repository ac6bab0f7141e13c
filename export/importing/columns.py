"""Which columns of which product a value is: packed projections taken apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx

from export.bundles.graph_index import op_name
from export.bundles.weights import MATMULS
from export.importing.reader import Array, Reader

__all__ = ["Columns", "columns", "product"]


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of one product, in the order in which a value holds them."""

    node: onnx.NodeProto
    index: Array
    """int64 [n]"""
    width: int
    """Of the value's last axis; n is a multiple of it."""

    @property
    def input(self) -> str:
        """What the product multiplies."""
        name: str = self.node.input[0]
        return name


def product(reader: Reader, value: str, what: str) -> onnx.NodeProto:
    """The product that makes `value`."""
    return reader.made_by(value, sorted(MATMULS), what)


def columns(reader: Reader, value: str, what: str) -> Columns:
    """Follow `value` back to its product through splits and reshapes of the last axis."""
    node = reader.index.producers.get(value)
    op = op_name(node) if node is not None else ""
    if node is not None and op in MATMULS:
        reader.understood(node)
        size = _features(reader, node)
        return Columns(node, np.arange(size), size)
    if node is not None and op in ("Cast", "CastLike", "Identity"):
        reader.understood(node)
        return columns(reader, node.input[0], what)
    if node is not None and op == "Reshape":
        reader.understood(node)
        inner = columns(reader, node.input[0], what)
        return _reshaped(reader, node, inner)
    if node is not None and op == "Split":
        reader.understood(node)
        inner = columns(reader, node.input[0], what)
        start, stop = _part(reader, node, value, inner.width)
        picked = inner.index.reshape(-1, inner.width)[:, start:stop]
        return Columns(inner.node, picked.reshape(-1), stop - start)
    found = "an input or a weight" if node is None else f"a {op}"
    reader.refuse(node, f"{found} makes '{value}', where {what} is looked for")


def _reshaped(reader: Reader, node: onnx.NodeProto, inner: Columns) -> Columns:
    size, total = reader.last_size(node.input[1]), len(inner.index)
    if size is None or size[0] == 0:
        reader.refuse(node, "the last size of its shape is not in the file")
    width = total // max(1, size[1]) if size[0] == -1 else size[0]
    if width < 1 or total % width:
        reader.refuse(node, f"it makes rows of {width} out of {total} columns")
    return Columns(inner.node, inner.index, width)


def _part(reader: Reader, node: onnx.NodeProto, value: str, width: int) -> tuple[int, int]:
    """First and one past the last column of a split's output, of its input's last axis."""
    said = reader.attributes(node)
    axis = said.get("axis", 0)
    if axis == 0 or (axis > 0 and axis not in (2, 3)):
        reader.refuse(node, f"it splits axis {axis}, not the last one")
    sizes = reader.constant(node.input[1]) if len(node.input) > 1 and node.input[1] else None
    if sizes is None:
        parts = said.get("num_outputs", len(node.output))
        sizes = np.full(parts, width // parts)
    if int(sizes.sum()) != width or len(sizes) != len(node.output) or (sizes < 1).any():
        reader.refuse(node, f"its parts {sizes.tolist()} do not make up {width} columns")
    at = list(node.output).index(value)
    start = int(sizes[:at].sum())
    return start, start + int(sizes[at])


def _features(reader: Reader, node: onnx.NodeProto) -> int:
    """Columns of a product."""
    said = reader.attributes(node)
    if op_name(node) == "com.microsoft.MatMulNBits":
        return int(said.get("N", 0))
    tensor = reader.index.initializers.get(reader.source(node.input[1]))
    inner = reader.maker(node.input[1])
    turned = inner is not None and op_name(inner) == "Transpose"
    if turned and inner is not None:
        tensor = reader.index.initializers.get(reader.source(inner.input[0]))
    if tensor is None or len(tensor.dims) != 2:
        reader.refuse(node, f"'{node.input[1]}' is no stored matrix")
    out_first = bool(said.get("transB", 0)) != turned
    return int(tensor.dims[0 if out_first else 1])
