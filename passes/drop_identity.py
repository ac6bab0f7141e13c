"""Identity nodes that only rename a value."""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["DropIdentityPass"]


class DropIdentityPass(ir.passes.InPlacePass):
    """Remove every ``Identity`` that no output depends on for its name.

        before   t = Exp(x);  u = Identity(t);  y = Neg(u);  z = Identity(t)     z: an output
        after    z = Exp(x);  y = Neg(z)

    An output that is an input, an initializer, another output or a value of an outer graph
    keeps its ``Identity``: nothing else could give it its name. (onnx_ir's own pass renames
    the other output there.)

    Attributes:
        changes: Nodes that the last call removed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.changes = 0

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Remove in place; `changes` counts."""
        self.changes = 0
        scopes: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
        for scope in scopes:
            for node in list(ir.traversal.RecursiveGraphIterator(scope)):
                self.changes += _drop(node)
        return ir.passes.PassResult(model, modified=bool(self.changes))


def _drop(node: ir.Node) -> bool:
    if (node.domain, node.op_type) != ("", "Identity") or node.graph is None:
        return False
    if len(node.inputs) != 1 or len(node.outputs) != 1 or node.inputs[0] is None:
        return False
    source, output = node.inputs[0], node.outputs[0]
    if source is output:
        return False
    if output.is_graph_output():
        maker = source.producer()
        if maker is None or maker.graph is not node.graph or source.is_graph_output():
            return False
    if source.type is None:
        source.type = output.type
    if source.shape is None and output.shape is not None:
        source.shape = ir.Shape(output.shape)
    if output.is_graph_output():
        name, output.name = output.name, None
        output.replace_all_uses_with(source, replace_graph_outputs=True)
        source.name = name
    else:
        output.replace_all_uses_with(source)
    node.graph.remove(node, safe=True)
    return True
