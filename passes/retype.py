"""Carries a model out in another float type, behind the interface that it has."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from passes.operands import CONSTANT_ELEMENTS, RANK
from passes.typed_graph import TypedModel, dtype_of

__all__ = ["RetypePass"]

TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype")


class RetypePass(ir.passes.InPlacePass):
    """Let every value of type `source` be of type `target`.

        before   bf16 x, bf16 w        y = MatMul(x, w)
        after    bf16 x, bf16 w        x_float = Cast<f32>(x)    w_float = Cast<f32>(w)
                                       y_before = MatMul(x_float, w_float)
                                       y = Cast<bf16>(y_before)

    Inputs and outputs of the graph keep their types, and so do stored weights; constants
    that stand in the graph file are converted. Casts between the two types go.
    """

    def __init__(self, source: ir.DataType, target: ir.DataType) -> None:
        self._source, self._target = source, target

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Retype `model`; not modified when it has nothing of the source type."""
        graph, before = model.graph, self._source
        stored = [v for v in graph.initializers.values() if v.dtype == before]
        entering = [v for v in graph.inputs if v.dtype == before and not v.is_initializer()]
        outputs = [i for i, value in enumerate(graph.outputs) if value.dtype == before]
        nodes = [node for node in _all_nodes(graph) if self._touches(node)]
        if not (stored or entering or outputs or nodes):
            return ir.passes.PassResult(model, False)
        _declare(model)
        nodes = [node for node in _all_nodes(graph) if self._touches(node)]
        for node in nodes:
            self._retype(node)
        for value in (*entering, *stored):
            self._enter(graph, value)
        for index in outputs:
            self._leave(graph, index)
        self._drop_casts(graph)
        return ir.passes.PassResult(model, True)

    def _touches(self, node: ir.Node) -> bool:
        typed = (node.attributes.get_int(name, 0) for name in TYPE_ATTRIBUTES)
        bodies = (v for g in _bodies(node) for v in g.inputs)
        values = any(value.dtype == self._source for value in (*node.outputs, *bodies))
        return values or int(self._source) in typed

    def _retype(self, node: ir.Node) -> None:
        for value in (*node.outputs, *(v for g in _bodies(node) for v in g.inputs)):
            if value.dtype == self._source:
                value.dtype = self._target
        for name in TYPE_ATTRIBUTES:
            if node.attributes.get_int(name, 0) == int(self._source):
                node.attributes[name] = ir.AttrInt64(name, int(self._target))
        tensor = node.attributes.get_tensor("value") if node.op_type == "Constant" else None
        if tensor is not None and tensor.dtype == self._source:
            node.attributes["value"] = ir.AttrTensor("value", self._converted(tensor))

    def _enter(self, graph: ir.Graph, value: ir.Value) -> None:
        """A cast behind an input or a weight; a small constant is converted as it stands."""
        tensor, port = value.const_value, value.is_graph_output() or value.is_graph_input()
        external = tensor is None or isinstance(tensor, ir.ExternalTensor)
        if (
            tensor is not None
            and not external
            and tensor.size <= CONSTANT_ELEMENTS
            and not port
        ):
            value.const_value, value.dtype = self._converted(tensor), self._target
            return
        uses = list(value.uses())
        if not uses:
            return
        name = self._target.name.lower()
        cast = ir.node("Cast", [value], {"to": int(self._target)}, name=f"{value.name}/{name}")
        cast.outputs[0].name = f"{value.name}_{name}"
        cast.outputs[0].dtype, cast.outputs[0].shape = self._target, value.shape
        graph.insert_before(graph[0], cast)
        for user, index in uses:
            user.replace_input_with(index, cast.outputs[0])

    def _leave(self, graph: ir.Graph, index: int) -> None:
        value = graph.outputs[index]
        if value.is_graph_input() or value.is_initializer():
            return
        cast = ir.node("Cast", [value], {"to": int(self._source)}, name=f"{value.name}/leave")
        graph.append(cast)
        made, name = cast.outputs[0], value.name
        made.dtype, made.shape = self._source, value.shape
        value.name, value.dtype = f"{name}_before_cast", self._target
        made.name, graph.outputs[index] = name, made

    def _drop_casts(self, graph: ir.Graph) -> None:
        """Remove casts that now are between one type and itself."""
        for node in list(_all_nodes(graph)):
            source = node.inputs[0] if node.op_type == "Cast" and node.inputs else None
            if source is None or source.dtype != self._target or node.domain != "":
                continue
            made = node.outputs[0]
            if made.dtype == self._target and not made.is_graph_output():
                for user, index in list(made.uses()):
                    user.replace_input_with(index, source)
                assert node.graph is not None
                node.graph.remove(node, safe=True)

    def _converted(self, tensor: ir.TensorProtocol) -> ir.TensorProtocol:
        values = tensor.numpy().astype(self._target.numpy())
        return ir.Tensor(values, dtype=self._target, name=tensor.name)


def _declare(model: ir.Model) -> None:
    """Give values without a declaration the type that they have."""
    types = TypedModel(model).walk.values
    for node in model.graph:
        for value in node.outputs:
            known = types.get(value.name or "")
            if value.dtype is None and known is not None and known.sure in RANK:
                value.dtype = dtype_of(known.sure)


def _all_nodes(graph: ir.Graph) -> Iterator[ir.Node]:
    for node in graph:
        yield node
        for body in _bodies(node):
            yield from _all_nodes(body)


def _bodies(node: ir.Node) -> Iterator[ir.Graph]:
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()
