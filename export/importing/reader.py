"""One graph under import: values are followed, and what was understood is remembered.

Whatever is neither understood nor plain bookkeeping (masks, lengths, positions, shapes) is
named and refused: a node that is passed over makes another model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import numpy as np
import onnx

from export.bundles.data_files import dtype_name
from export.bundles.graph_index import GraphIndex, op_name
from export.errors import BundleError

__all__ = ["NORM_OPS", "SKIP_NORM", "Array", "Reader"]

Array = np.ndarray[Any, np.dtype[Any]]
SKIP_NORM = "com.microsoft.SkipSimplifiedLayerNormalization"
NORM_OPS = ("RMSNormalization", "SimplifiedLayerNormalization", SKIP_NORM)
HANDING_ON = ("Cast", "CastLike", "Identity", "Reshape")
MAX_CONSTANT = 4096
"""Elements of a constant that structure depends on (sizes, scales, zeros of a bias)."""


class Reader:
    """Follows the values of one graph backwards.

    Args:
        role: ``target`` or ``head``, for messages.
        index: The graph.
    """

    def __init__(self, role: str, index: GraphIndex) -> None:
        self.role, self.index = role, index
        self._understood: set[int] = set()
        self.read: set[str] = set()
        """Initializers that were understood."""

    def refuse(self, node: onnx.NodeProto | None, why: str) -> NoReturn:
        """Raise the `BundleError` that names a node."""
        raise BundleError(f"{self.role}:{_shown(node)}: {why}; it cannot be imported")

    def understood(self, *nodes: onnx.NodeProto) -> None:
        """Remember that `nodes` have their place in the canonical model."""
        self._understood.update(id(node) for node in nodes)

    def source(self, value: str) -> str:
        """`value` before casts and reshapes, which are understood on the way."""
        while True:
            node = self.index.producers.get(value)
            if node is None or op_name(node) not in HANDING_ON or not node.input:
                return value
            self.understood(node)
            value = node.input[0]

    def maker(self, value: str) -> onnx.NodeProto | None:
        """The node behind `value`, casts and reshapes stepped over; None for an input."""
        return self.index.producers.get(self.source(value))

    def made_by(self, value: str, ops: Iterable[str], what: str) -> onnx.NodeProto:
        """The node behind `value`, which must be one of `ops` and is then understood."""
        node, wanted = self.maker(value), tuple(ops)
        if node is None or op_name(node) not in wanted:
            found = "an input or a weight" if node is None else f"a {op_name(node)}"
            self.refuse(node, f"{found} makes '{value}', where {what} is looked for "
                              f"({', '.join(wanted)})")  # fmt: skip
        self.understood(node)
        return node

    def constant(self, value: str) -> Array | None:
        """A small number or list of numbers that the graph file holds; None otherwise."""
        tensor = self.index.initializers.get(value)
        node = self.index.producers.get(value)
        if tensor is None and node is not None and op_name(node) == "Constant":
            (attribute,) = node.attribute
            if attribute.name == "value":
                tensor = attribute.t
            elif attribute.name in ("value_int", "value_ints", "value_float", "value_floats"):
                return np.array(onnx.helper.get_attribute_value(attribute))
        if tensor is None or tensor.data_location == onnx.TensorProto.EXTERNAL:
            return None
        if math.prod(tensor.dims) > MAX_CONSTANT:
            return None
        array: Array = onnx.numpy_helper.to_array(tensor)
        return array

    def scalar(self, value: str) -> float | None:
        """A constant of one element."""
        node = self.index.producers.get(value)
        if node is not None and op_name(node) in ("Cast", "CastLike"):
            self.understood(node)
            return self.scalar(node.input[0])
        array = self.constant(value)
        return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None

    def last_size(self, shape: str) -> tuple[int, int] | None:
        """Of a reshape's target: its last size and the product of the other known ones."""
        sizes = self.constant(shape)
        if sizes is None:
            node = self.index.producers.get(shape)
            if node is None or op_name(node) != "Concat":
                return None
            parts = [self.constant(part) for part in node.input]
            if parts[-1] is None:
                return None
            sizes = parts[-1]
        known = [int(size) for size in sizes.reshape(-1)[:-1] if size > 0]
        return int(sizes.reshape(-1)[-1]), math.prod(known)

    def attributes(self, node: onnx.NodeProto) -> dict[str, Any]:
        """Attributes by name, texts as ``str``."""
        found = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        return {k: v.decode() if isinstance(v, bytes) else v for k, v in found.items()}

    def allow(self, node: onnx.NodeProto, **allowed: tuple[object, ...]) -> dict[str, Any]:
        """The attributes of `node`, where those named must be among the values given."""
        found = self.attributes(node)
        for name, values in allowed.items():
            if name in found and found[name] not in values:
                self.refuse(node, f"its {name} is {found[name]}, not {values[0]}")
        return found

    def vector(self, value: str, size: int, what: str) -> tuple[str, str]:
        """The initializer behind a vector of weights, and how it is folded on the way.

        Returns its name and ``plain``, ``one_plus`` (``1 + w``) or ``minus_exp``
        (``-exp(w)``).
        """
        name, fold = self.source(value), "plain"
        node = self.index.producers.get(name)
        if node is not None and op_name(node) == "Add" and self._one(node) is not None:
            name, fold = self.source(self._one(node) or ""), "one_plus"
            self.understood(node)
        elif node is not None and op_name(node) == "Neg":
            exponent = self.made_by(node.input[0], ["Exp"], what)
            self.understood(node)
            name, fold = self.source(exponent.input[0]), "minus_exp"
        tensor = self.index.initializers.get(name)
        if tensor is None:
            self.refuse(self.index.producers.get(name), f"{what} is no stored weight")
        if math.prod(tensor.dims) != size:
            self.refuse(node, f"{what} '{name}' is {list(tensor.dims)}, not [{size}]")
        self.read.add(name)
        return name, fold

    def _one(self, node: onnx.NodeProto) -> str | None:
        """The other operand of an addition of 1."""
        one, other = str(node.input[0]), str(node.input[1])
        if self.scalar(other) == 1.0:
            return one
        return other if self.scalar(one) == 1.0 else None

    def leftovers(self) -> Iterator[str]:
        """Nodes and weights that nothing understood, bookkeeping aside."""
        known = {
            name
            for name, value in self.index.inputs.items()
            if dtype_name(value.type.tensor_type.elem_type) in ("int64", "int32", "bool")
        }
        known |= {
            name
            for name, tensor in self.index.initializers.items()
            if tensor.data_location != onnx.TensorProto.EXTERNAL
            and math.prod(tensor.dims) <= MAX_CONSTANT
            and name not in self.read
        } | {""}
        for node in self.index.graph.node:
            plain = op_name(node) == "Shape" or all(name in known for name in node.input)
            if id(node) in self._understood:
                continue
            if plain and not any(a.HasField("g") for a in node.attribute):
                known.update(node.output)
            else:
                yield _shown(node)
        used = {name for node in self.index.graph.node for name in node.input}
        for name in self.index.initializers:
            if name not in self.read and name not in known:
                yield f"{name} (a weight that no node reads)" if name not in used else name


def _shown(node: onnx.NodeProto | None) -> str:
    if node is None:
        return "inputs"
    return f"{node.name or next(iter(node.output), '?')}({node.op_type})"
