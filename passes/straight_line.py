"""Proof that a graph is nodes in a row: what a capture replays."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from passes.node_place import CONTROL_FLOW, place, subgraphs

__all__ = ["StraightLinePass"]


class StraightLinePass(ir.passes.PassBase):
    """Check that no node chooses or repeats and, with `static`, that no size does; no change.

        right    y = Add(x, w)                                     x: [1, 64]
        wrong    y = Scan<body>(s, x);  z = local.Block(y)         x: [1, S, 64]

    Refused are nodes that hold a subgraph, calls of model-local functions and, with `static`,
    values with a size that is no number, and inputs and outputs without a known shape. (A
    value inside, of whose shape nothing is known, is no proof of a dynamic one: shape
    inference does not know every op of the runtime.)
    """

    def __init__(self, *, static: bool = False) -> None:
        super().__init__()
        self.static = static

    @property
    def in_place(self) -> bool:
        """The same model is handed on."""
        return True

    @property
    def changes_input(self) -> bool:
        """Nothing is changed."""
        return False

    def requires(self, model: ir.Model) -> None:
        """Prove it.

        Raises:
            PreconditionError: Lists every node and value that stands against it.
        """
        faults = list(_node_faults(model))
        if self.static:
            faults += _shape_faults(model.graph)
        if faults:
            raise ir.passes.PreconditionError(
                f"the graph is not straight-line, for {len(faults)} reasons: "
                + "; ".join(faults)
            )

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Hand the model on; `requires` has checked it."""
        return ir.passes.PassResult(model, modified=False)


def _node_faults(model: ir.Model) -> Iterator[str]:
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        key = (node.domain, node.op_type)
        if node.op_identifier() in model.functions:
            yield (
                f"{place(node)} calls the function {node.domain}.{node.op_type}; inline it, "
                "or keep it as the runtime's own op"
            )
        elif key in CONTROL_FLOW or any(subgraphs(node)):
            yield (
                f"{place(node)} is control flow; pin its trips or its condition and inline it"
            )


def _shape_faults(graph: ir.Graph) -> Iterator[str]:
    ports = [("input", value) for value in graph.inputs]
    ports += [("output", value) for value in graph.outputs]
    for kind, value in ports:
        if value.shape is None:
            yield f"the shape of {kind} {value.name!r} is unknown; declare it"
        elif not value.shape.is_static():
            yield f"{kind} {value.name!r} is {value.shape}; pin its sizes"
    named = {value for _, value in ports}
    for node in graph:
        for value in node.outputs:
            if value in named or value.shape is None or value.shape.is_static():
                continue
            yield (
                f"{place(node)} gives {value.name!r} as {value.shape}; pin and infer its shape"
            )
