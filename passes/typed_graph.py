"""A model beside its proto: findings of the type checks, led back to nodes and values."""

from __future__ import annotations

from collections.abc import Iterator

import onnx
import onnx_ir as ir

from artifacts.types.check import walk_model

__all__ = ["TypedModel", "dtype_of"]

Body = ir.Graph | ir.Function


def dtype_of(name: str) -> ir.DataType:
    """The element type called ``bfloat16``."""
    return ir.DataType(onnx.TensorProto.DataType.Value(name.upper()))


class TypedModel:
    """The walk over a model's types, with its nodes and graphs by those of the proto.

    A proto is made of the model as it stands; it holds no external weights. With a provider,
    bodies that it would inline are walked too.
    """

    def __init__(self, model: ir.Model, provider: str | None = None) -> None:
        self.model = model
        self.proto = ir.to_proto(model)
        # protobuf hands out the same wrapper for a message only while somebody holds it
        self._held: list[onnx.NodeProto | onnx.GraphProto | onnx.FunctionProto] = []
        self._nodes: dict[int, ir.Node] = {}
        self._bodies: dict[int, Body] = {}
        self._pair(model.graph, self.proto.graph)
        functions = {(f.domain, f.name, f.overload): f for f in self.proto.functions}
        for key, function in model.functions.items():
            self._pair(function, functions[key])
        self.walk, _ = walk_model(self.proto, "model", provider)

    def _pair(self, body: Body, proto: onnx.GraphProto | onnx.FunctionProto) -> None:
        self._held.append(proto)
        self._bodies[id(proto)] = body
        for node, stored in zip(body, proto.node, strict=True):
            self._held.append(stored)
            self._nodes[id(stored)] = node
            for attribute in stored.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    self._pair(node.attributes[attribute.name].as_graph(), attribute.g)

    def node(self, stored: onnx.NodeProto) -> ir.Node | None:
        """The node of the model; None for one that is in an inlined body only."""
        return self._nodes.get(id(stored))

    def body(self, stored: onnx.GraphProto) -> ir.Graph | None:
        """The graph of the model."""
        found = self._bodies.get(id(stored))
        return found if isinstance(found, ir.Graph) else None

    def declared(self) -> Iterator[tuple[ir.Value, str]]:
        """Values whose declaration is stale, with their true type; no graph outputs."""
        for fault in self.walk.mistyped:
            body, types = self.body(fault.graph), sorted(fault.types)
            if body is None or fault.output or len(types) != 1:
                continue
            values = (*body.inputs, *(o for node in body for o in node.outputs))
            for value in values:
                if value.name == fault.value:
                    yield value, types[0]
