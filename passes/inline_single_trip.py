"""Loops that run once become straight-line nodes: what a captured CUDA graph needs."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import onnx_ir as ir

from passes.inline_body import Splicer
from passes.node_place import CONTROL_FLOW, place, subgraphs
from passes.single_trip import NotProvenError, default_opset, prove_single_trip

__all__ = ["InlineSingleTripPass"]

logger = logging.getLogger(__name__)


class InlineSingleTripPass(ir.passes.InPlacePass):
    """Replace every ``Scan`` and ``Loop`` that provably runs once by its body.

        before   s, y = Scan <num_scan_inputs = 1, body = b> (past, x)     x: [1, D]
        after    e = Squeeze(x, 0);  s, out = ...body of (past, e)...;  y = Unsqueeze(out, 0)

    A ``Scan`` (opset 9 or later) runs once when the axis of every scan input has the static
    extent 1; a ``Loop`` when its trip count is the constant 1, or is absent or larger and the
    body's condition is the constant false, and its own condition is absent or true. Bodies are
    taken in as they are found, outermost first, also inside model-local functions. A node
    whose trips are not proven is left, and with `strict` refused before anything is changed.

    Attributes:
        changes: Nodes that the last call replaced.
    """

    def __init__(self, *, strict: bool = False) -> None:
        super().__init__()
        self.strict = strict
        self.changes = 0

    def requires(self, model: ir.Model) -> None:
        """Refuse, with `strict`, a model in which control flow would remain.

        Raises:
            PreconditionError: Names every ``Scan``, ``Loop`` and ``If`` that would, and why.
        """
        if not self.strict or not _has_control_flow(model):
            return
        trial = model.clone()  # tensors are shared; an outer loop decides on an inner one
        _inline_model(trial)
        remaining = [
            f"{place(node)}: {_reason(node, opset)}" for node, opset in _control_flow(trial)
        ]
        if remaining:
            raise ir.passes.PreconditionError(
                f"a captured CUDA graph allows no control flow, and {len(remaining)} nodes "
                "remain: " + "; ".join(remaining)
            )

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Inline in place; `changes` counts the nodes that went."""
        self.changes = _inline_model(model)
        logger.info("inlined %s single-trip nodes", self.changes)
        return ir.passes.PassResult(model, modified=bool(self.changes))


def _inline_model(model: ir.Model) -> int:
    count = _inline(model.graph, Splicer(model.graph))
    for function in model.functions.values():
        count += _inline(function.graph, Splicer(function))
    return count


def _inline(graph: ir.Graph, splicer: Splicer) -> int:
    count, stack = 0, list(reversed(graph))
    while stack:
        node = stack.pop()
        if (node.domain, node.op_type) in (("", "Scan"), ("", "Loop")):
            try:
                trip = prove_single_trip(node, splicer.opset)
            except NotProvenError as error:
                logger.debug("%s is left: %s", place(node), error)
            else:
                stack.extend(reversed(splicer.splice(graph, node, trip)))
                count += 1
                continue
        count += sum(_inline(inner, splicer) for inner in subgraphs(node))
    return count


def _has_control_flow(model: ir.Model) -> bool:
    return next(_control_flow(model), None) is not None


def _control_flow(model: ir.Model) -> Iterator[tuple[ir.Node, int]]:
    scopes: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for scope in scopes:
        for node in ir.traversal.RecursiveGraphIterator(scope):
            if (node.domain, node.op_type) in CONTROL_FLOW:
                yield node, default_opset(scope.opset_imports)


def _reason(node: ir.Node, opset: int) -> str:
    if node.op_type == "If":
        return "it chooses a branch at run time; fold its condition or compute both branches"
    try:
        prove_single_trip(node, opset)
    except NotProvenError as error:
        return str(error)
    return "it was left"  # cannot be: what is proven was inlined
