"""Putting a body that runs once in the place of the ``Scan`` or ``Loop`` that holds it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import onnx_ir as ir

from passes.single_trip import SingleTrip, default_opset

__all__ = ["Splicer"]

AXES_ARE_INPUTS = 13
"""From this opset on, Squeeze and Unsqueeze take their axes as an input."""

Array = np.ndarray[Any, np.dtype[Any]]


class Splicer:
    """Splices bodies into one scope: the main graph or a function, with all its subgraphs.

    Body nodes are moved, not copied: values that they capture, or that subgraphs within
    them capture, stay the same objects. A name is kept where it stays unique in the scope.
    """

    def __init__(self, scope: ir.Graph | ir.Function) -> None:
        self.opset = default_opset(scope.opset_imports)
        self._function = scope.graph if isinstance(scope, ir.Function) else None
        graph = scope.graph if isinstance(scope, ir.Function) else scope
        self._values = _Names(_value_names(graph))
        self._nodes = _Names(node.name for node in ir.traversal.RecursiveGraphIterator(graph))

    def splice(self, graph: ir.Graph, node: ir.Node, trip: SingleTrip) -> list[ir.Node]:
        """Replace `node` of `graph` by its body; returns the nodes that came, in order."""
        added: list[ir.Node] = []
        bound = self._bind_inputs(trip, added)
        bound |= self._move_initializers(graph, trip.body, added)
        results = [(bound.get(value, value), axis) for value, axis in trip.results]
        trip.body.outputs.clear()
        for value, replacement in bound.items():
            value.replace_all_uses_with(replacement)
        added += self._release_nodes(trip.body)
        self._give_outputs(node, results, added)
        graph.insert_before(node, added)
        graph.remove(node, safe=True)
        return added

    def _bind_inputs(self, trip: SingleTrip, added: list[ir.Node]) -> dict[ir.Value, ir.Value]:
        """What each body input that is read is outside."""
        for value in trip.body.inputs:
            self._values.release(value.name)
        bound = dict(trip.carried)
        results = {value for value, _ in trip.results}
        for value, source in trip.carried:
            _describe(source, source.type or value.type, source.shape or value.shape)
        for value, number in trip.numbers:
            if value.uses() or value in results:
                # a body may declare them as scalars or with one element
                shape = (1,) if value.shape is not None and len(value.shape) == 1 else ()
                dtype = np.bool_ if isinstance(number, bool) else np.int64
                bound[value] = self._constant(np.full(shape, number, dtype), value.name, added)
        for value, source, axis in trip.sliced:
            if value.uses() or value in results:
                dims = list(source.shape or ())
                axis %= len(dims)
                del dims[axis]
                bound[value] = self._reshaped("Squeeze", source, axis, added)
                _describe(bound[value], value.type or source.type, ir.Shape(dims))
                bound[value].name = self._values.fresh(value.name)
        return bound

    def _move_initializers(
        self, graph: ir.Graph, body: ir.Graph, added: list[ir.Node]
    ) -> dict[ir.Value, ir.Value]:
        """Hand the body's initializers to `graph`; returns those that become constants."""
        replaced: dict[ir.Value, ir.Value] = {}
        for value in list(body.initializers.values()):
            if value.is_graph_input():
                continue
            del body.initializers[str(value.name)]
            value.name = self._values.settle(value.name)
            if graph is not self._function:
                graph.initializers.add(value)
            elif value.const_value is not None:  # a function holds no initializers
                attribute = ir.AttrTensor("value", value.const_value)
                constant = self._node("Constant", [], added, attribute)
                _describe(constant, value.type, value.shape)
                constant.name = value.name
                replaced[value] = constant
        return replaced

    def _release_nodes(self, body: ir.Graph) -> list[ir.Node]:
        nodes = list(body)
        body.remove(nodes)
        for node in nodes:
            name = node.name  # ONNX Runtime refuses two nodes of one name
            node.name = self._nodes.settle(name) if name else self._nodes.fresh(node.op_type)
            for output in node.outputs:
                if output.name != "":  # an optional output left out
                    output.name = self._values.settle(output.name)
        return nodes

    def _give_outputs(
        self,
        node: ir.Node,
        results: Iterable[tuple[ir.Value, int | None]],
        added: list[ir.Node],
    ) -> None:
        """Put the body's results in place of the node's outputs."""
        for output, (value, axis) in zip(node.outputs, results, strict=False):
            if not _is_read(output):
                self._values.release(output.name)
                continue
            if axis is None:
                _describe(value, value.type or output.type, value.shape or output.shape)
                if not output.is_graph_output():
                    self._values.release(output.name)
                    output.replace_all_uses_with(value)
                    continue
                given, shape = self._node("Identity", [value], added), value.shape
            else:
                axis, shape = _stacked(value.shape, axis)
                given = self._reshaped("Unsqueeze", value, axis, added)
            _describe(given, output.type or value.type, output.shape or shape)
            given.name = output.name  # it may be an output of the model
            output.replace_all_uses_with(given, replace_graph_outputs=True)

    def _reshaped(self, op: str, value: ir.Value, axis: int, added: list[ir.Node]) -> ir.Value:
        if self.opset < AXES_ARE_INPUTS:
            return self._node(op, [value], added, ir.AttrInt64s("axes", [axis]))
        axes = self._constant(np.array([axis], np.int64), "axes", added)
        return self._node(op, [value, axes], added)

    def _constant(self, array: Array, stem: str | None, added: list[ir.Node]) -> ir.Value:
        tensor = ir.Tensor(array)
        value = self._node("Constant", [], added, ir.AttrTensor("value", tensor))
        _describe(value, ir.TensorType(tensor.dtype), ir.Shape(array.shape))
        value.name = self._values.fresh(stem)
        return value

    def _node(
        self, op: str, inputs: list[ir.Value], added: list[ir.Node], *attributes: ir.Attr
    ) -> ir.Value:
        node = ir.Node("", op, inputs, attributes, name=self._nodes.fresh(op))
        added.append(node)
        return node.outputs[0]


class _Names:
    """How often each name is used in a scope, so that a moved thing can keep or change its."""

    def __init__(self, names: Iterable[str | None]) -> None:
        self._counts = Counter(name for name in names if name)

    def release(self, name: str | None) -> None:
        if name:
            self._counts[name] -= 1

    def fresh(self, stem: str | None) -> str:
        stem = stem or "value"
        name, number = stem, 1
        while self._counts[name] > 0:
            number += 1
            name = f"{stem}_{number}"
        self._counts[name] = 1
        return name

    def settle(self, name: str | None) -> str:
        self.release(name)
        return self.fresh(name)


def _value_names(graph: ir.Graph) -> Iterator[str | None]:
    for inner in (graph, *graph.subgraphs()):
        held = {*inner.inputs, *inner.initializers.values()}
        yield from (value.name for value in held)
        yield from (value.name for node in inner for value in node.outputs)


def _is_read(value: ir.Value) -> bool:
    return bool(value.uses()) or value.is_graph_output()


def _describe(value: ir.Value, type_: ir.TypeProtocol | None, shape: ir.Shape | None) -> None:
    value.type = type_
    value.shape = None if shape is None else shape.copy()


def _stacked(shape: ir.Shape | None, axis: int) -> tuple[int, ir.Shape | None]:
    """Axis, counted from the front where the rank is known, and shape of a stack of one."""
    if shape is None:
        return axis, None
    axis %= len(shape) + 1
    return axis, ir.Shape([*shape[:axis], 1, *shape[axis:]])
