"""Fixed sizes in the place of named ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir

from passes.counted import CountedPass

__all__ = ["PinShapesPass"]

FOLDED = ("Cast", "Shape", "Squeeze")
"""Operators of shape arithmetic whose result is computed here once its input is fixed."""


class PinShapesPass(CountedPass):
    """Give named dimensions a size, and replace what only computed that size by a constant.

        before   x [1, S, 8]    n = Cast(Shape<start=1, end=2>(x))    y = Add(past, n)
        after    x [1, 4, 8]                                          y = Add(past, 4)

    A captured CUDA graph must hold no node that runs on the CPU, and ONNX Runtime runs shape
    arithmetic there. Values that depend on data are left: nothing but `FOLDED` is computed.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__()
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"dimension {name!r} cannot be pinned to {size}")
        self.sizes = dict(sizes)

    def rewrite(self, model: ir.Model) -> int:
        """See the class."""
        changes = sum(self._pin(value) for value in _values(model.graph))
        for node in list(model.graph):
            if node.domain == "" and node.op_type in FOLDED:
                changes += _fold(model.graph, node)
        return changes

    def _pin(self, value: ir.Value) -> int:
        if value.shape is None:
            return 0
        dims = [
            self.sizes.get(str(dim.value), dim) if isinstance(dim, ir.SymbolicDim) else dim
            for dim in value.shape
        ]
        if all(new is old for new, old in zip(dims, value.shape, strict=True)):
            return 0
        value.shape = ir.Shape(dims)
        return 1


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    for node in graph:
        yield from node.outputs


def _fold(graph: ir.Graph, node: ir.Node) -> int:
    array = _computed(node)
    if array is None:
        return 0
    old = node.outputs[0]
    if old.is_graph_output():
        return 0
    constant = ir.node("Constant", [], {"value": ir.tensor(array)}, name=node.name)
    new = constant.outputs[0]
    new.name, new.type, new.shape = old.name, old.type, ir.Shape(array.shape)
    graph.insert_before(node, constant)
    ir.convenience.replace_all_uses_with(old, new)
    graph.remove(node, safe=True)
    return 1


def _computed(node: ir.Node) -> np.ndarray | None:
    """The constant that a node of shape arithmetic gives, or None while it is open."""
    value = node.inputs[0]
    if value is None:
        return None
    if node.op_type == "Shape":
        if value.shape is None:
            return None
        dims = value.shape.dims[node.attributes.get_int("start", 0) :]
        if "end" in node.attributes:
            dims = value.shape.dims[slice(*(_bounds(node)))]
        if not all(isinstance(dim, int) for dim in dims):
            return None
        return np.array(dims, np.int64)
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None:
        return None
    if node.op_type == "Cast":
        to = ir.DataType(node.attributes.get_int("to", 0))
        return tensor.numpy().astype(to.numpy())
    if len(node.inputs) > 1:
        return None
    return tensor.numpy().squeeze()


def _bounds(node: ir.Node) -> tuple[int, int]:
    return node.attributes.get_int("start", 0), node.attributes.get_int("end", 0)
