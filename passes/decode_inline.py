"""From a graph of functions and scans, pinned to one row, to straight-line nodes."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir
from onnx_ir.passes import common

from passes.drop_identity import DropIdentityPass
from passes.inline_single_trip import InlineSingleTripPass
from passes.single_trip import default_opset

__all__ = ["CallKernelsPass", "SeparateFunctionOutputsPass", "decode_inline_passes"]


def decode_inline_passes(
    keep: frozenset[tuple[str, str]] = frozenset(), *, strict: bool = True
) -> tuple[ir.passes.PassBase, ...]:
    """The passes that make a graph straight-line, in order; run them one by one.

    The graph's rows are pinned to one before: only then is it known that its scans take one
    trip.

    Args:
        keep: (domain, name) of functions that the runtime has a kernel for. Their calls stay,
            as calls of the runtime's own op.
        strict: Refuse a graph in which control flow would remain.
    """
    return (
        common.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
        SeparateFunctionOutputsPass(),
        common.InlinePass(lambda function: (function.domain, function.name) not in keep),
        CallKernelsPass(keep),
        common.ShapeInferencePass(),  # the extents of scans inside functions
        InlineSingleTripPass(strict=strict),
        DropIdentityPass(),
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedOpsetsPass(),
    )


class SeparateFunctionOutputsPass(ir.passes.InPlacePass):
    """Give each function output a node of its own, and each call all outputs.

        before   f (a) => (a, b, b) { b = Exp(a) }              y = f(x)
        after    f (a) => (c, b, d) { b = Exp(a);               y, _, _ = f(x)
                                      c = Identity(a);
                                      d = Identity(b) }

    `InlinePass` gives the value that a call returns the name of the call's output. Where that
    is an input handed through, it would rename an input of the model.

    Attributes:
        changes: Outputs and calls that the last call mended.
    """

    def __init__(self) -> None:
        super().__init__()
        self.changes = 0

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Mend in place; `changes` counts."""
        self.changes = sum(
            _separate(function, model.opset_imports) for function in model.functions.values()
        )
        scopes: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
        for scope in scopes:
            for node in ir.traversal.RecursiveGraphIterator(scope):
                function = model.functions.get(node.op_identifier())
                if function is not None and len(node.outputs) < len(function.outputs):
                    node.resize_outputs(len(function.outputs))
                    self.changes += 1
        return ir.passes.PassResult(model, modified=bool(self.changes))


def _separate(function: ir.Function, opset_imports: Mapping[str, int]) -> int:
    seen: set[ir.Value] = set()
    count = 0
    taken = {value.name for node in function.all_nodes() for value in node.outputs}
    taken |= {value.name for value in function.inputs}
    for index, value in enumerate(function.outputs):
        if not value.is_graph_input() and value not in seen:
            seen.add(value)
            continue
        name = f"{value.name}_out"
        while name in taken:
            name += "_"
        taken.add(name)
        identity = ir.Node("", "Identity", [value], name=name)
        identity.outputs[0].name = name
        identity.outputs[0].type, identity.outputs[0].shape = value.type, value.shape
        function.append(identity)
        function.outputs[index] = identity.outputs[0]
        count += 1
    if count and not default_opset(function.opset_imports):
        function.opset_imports[""] = default_opset(opset_imports)
    return count


class CallKernelsPass(ir.passes.InPlacePass):
    """Turn calls of functions that the runtime has a kernel for into calls of its own op.

        before   y = f.G(x)        f.G <scale: float = 0.25> (a) => (b) {...}
        after    y = f.G <scale = 0.25> (x)

    The function's definition goes; its attribute defaults are written onto the calls, since
    the runtime's op may have others. A function that is not named in `keep` is left.

    Attributes:
        changes: Calls of the last call's model that are now the runtime's.
    """

    def __init__(self, keep: frozenset[tuple[str, str]]) -> None:
        super().__init__()
        self.keep = keep
        self.changes = 0

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Change in place; `changes` counts the calls."""
        self.changes = 0
        kept = {
            key: function
            for key, function in model.functions.items()
            if (function.domain, function.name) in self.keep
        }
        for key in kept:
            del model.functions[key]
        scopes: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
        for scope in scopes:
            for node in ir.traversal.RecursiveGraphIterator(scope):
                function = kept.get(node.op_identifier())
                if function is None:
                    continue
                for attribute in function.attributes.values():
                    if attribute.value is not None and attribute.name not in node.attributes:
                        node.attributes.add(attribute)
                node.overload = ""
                scope.opset_imports.setdefault(node.domain, 1)
                self.changes += 1
        return ir.passes.PassResult(model, modified=bool(kept))
