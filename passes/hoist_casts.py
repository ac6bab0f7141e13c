"""One cast before a split in the place of one behind each part."""

from __future__ import annotations

import onnx_ir as ir
from onnxscript import GraphBuilder

from passes.counted import CountedPass

__all__ = ["HoistCastsPass"]


class HoistCastsPass(CountedPass):
    """Cast what is split once, where every part is cast to the same type.

        before   a, b = Split(x)    Cast(a)    Cast(b)
        after    a, b = Split(Cast(x))

    The values are the same bit for bit: a cast works element by element. A split of which
    one part is read as it is, or cast to another type, is left.
    """

    def rewrite(self, model: ir.Model) -> int:
        """See the class."""
        splits = [node for node in model.graph if node.op_type == "Split"]
        return sum(_hoist(model.graph, node) for node in splits if node.domain == "")


def _hoist(graph: ir.Graph, split: ir.Node) -> int:
    casts = [_only_cast(part) for part in split.outputs]
    if any(cast is None for cast in casts) or len(casts) < 2:
        return 0
    found = [cast for cast in casts if cast is not None]
    kinds = {cast.attributes.get_int("to", 0) for cast in found}
    if len(kinds) != 1:
        return 0
    to = ir.DataType(kinds.pop())
    builder = GraphBuilder(graph)
    builder.push_module("hoisted")
    split.replace_input_with(0, builder.op.Cast(split.inputs[0], to=to))
    builder.pop_module()
    for part, cast in zip(split.outputs, found, strict=True):
        part.type = ir.TensorType(to)
        ir.convenience.replace_all_uses_with(cast.outputs[0], part)
        graph.remove(cast, safe=True)
    return 1


def _only_cast(value: ir.Value) -> ir.Node | None:
    """The cast that alone reads `value`; None where there is another reader."""
    readers = value.consumers()
    if len(readers) != 1 or value.is_graph_output():
        return None
    cast = readers[0]
    is_cast = cast.op_type == "Cast" and cast.domain == "" and cast.graph is value.graph
    return cast if is_cast and not cast.outputs[0].is_graph_output() else None
