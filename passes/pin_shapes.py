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
    arithmetic there. Values that depend on data are left: nothing but `FOLDED` is computed,
    and that from whole numbers in a ``Constant`` only, so no weight is ever read.
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
        folded = []
        for node in list(model.graph.all_nodes()):
            if node.domain == "" and node.op_type in FOLDED:
                array = _computed(node)
                if array is not None:
                    folded.append(_replaced(node, array))
        for constant in folded:
            assert constant.graph is not None
            value = constant.outputs[0]
            if not value.uses() and not value.is_graph_output():
                constant.graph.remove(constant)
        return changes + len(folded)

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
    for inner in graph.subgraphs():
        yield from inner.inputs
    for node in graph.all_nodes():
        yield from node.outputs


def _replaced(node: ir.Node, array: np.ndarray) -> ir.Node:
    """Put a constant in the place of `node`, under the same names."""
    graph, old = node.graph, node.outputs[0]
    assert graph is not None
    constant = ir.node("Constant", [], {"value": ir.tensor(array)}, name=node.name)
    new = constant.outputs[0]
    new.name, new.type, new.shape = old.name, old.type, ir.Shape(array.shape)
    graph.insert_before(node, constant)
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    return constant


def _computed(node: ir.Node) -> np.ndarray | None:
    """The constant that a node of shape arithmetic gives, or None while it is open."""
    value = node.inputs[0]
    if value is None:
        return None
    if node.op_type == "Shape":
        return None if value.shape is None else _sizes(node, value.shape)
    made_by = value.producer()
    if made_by is None or made_by.op_type != "Constant":
        return None
    if value.dtype is None or not value.dtype.is_integer():
        return None
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None:
        return None
    if node.op_type == "Cast":
        to = ir.DataType(node.attributes.get_int("to", 0))
        return tensor.numpy().astype(to.numpy()) if to.is_integer() else None
    if len(node.inputs) > 1:
        return None
    return tensor.numpy().squeeze()


def _sizes(node: ir.Node, shape: ir.Shape) -> np.ndarray | None:
    start = node.attributes.get_int("start", 0)
    end = node.attributes.get_int("end", len(shape))
    sizes = shape.dims[start:end]
    return np.array(sizes, np.int64) if all(isinstance(n, int) for n in sizes) else None
