"""Rules about CUDA graphs: what a captured graph cannot hold, told before one is tried.

ONNX Runtime captures a graph when every node is on CUDA (nodes that only compute sizes may be
on the CPU), none is control flow, and nothing has to be copied between the two; what it
captured holds for one set of sizes and addresses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx

from artifacts.findings import Severity
from artifacts.rules_aliases import Flow
from artifacts.types.check import walk_model
from artifacts.types.table import ort_table, signature
from export.bundles.graph_index import GraphIndex, op_name
from export.bundles.rule import Bundle, BundleRule, Fault
from export.bundles.states import shape_of

__all__ = ["CAPTURE_RULES"]

CONTROL_FLOW = ("If", "Loop", "Scan")
SHOWN = 4
HOST_INPUTS: dict[str, tuple[int, ...]] = {
    "Reshape": (1,),
    "Expand": (1,),
    "Tile": (1,),
    "ConstantOfShape": (0,),
    "Range": (0, 1, 2),
    "Slice": (1, 2, 3, 4),
    "Pad": (1, 3),
    "TopK": (1,),
    "Squeeze": (1,),
    "Unsqueeze": (1,),
    "Split": (1,),
    "CumSum": (1,),
    "OneHot": (1,),
    "ReduceSum": (1,),
    "Trilu": (1,),
    "com.microsoft.GroupQueryAttention": (6,),
}
"""Inputs that the CUDA kernels take from the host's memory."""


def _on_cuda(bundle: Bundle) -> Iterator[tuple[str, GraphIndex]]:
    yield from bundle.graphs.items() if bundle.provider == "cuda" else ()


def _control_flow(bundle: Bundle) -> Iterator[Fault]:
    for role, index in _on_cuda(bundle):
        for node in index.graph.node:
            if node.op_type in CONTROL_FLOW and not node.domain:
                yield _place(role, node), f"{node.op_type} chooses on the host what runs"
        for function in index.model.functions:
            op = f"{function.domain}.{function.name}"
            inner = [n.op_type for n in function.node if n.op_type in CONTROL_FLOW]
            if inner and _is_written_out(op, function) and _is_called(index, function):
                yield f"{role}:{op}", f"its body, which is inlined for want of a kernel, " \
                                      f"holds {', '.join(inner)}"  # fmt: skip


def _is_written_out(op: str, function: onnx.FunctionProto) -> bool:
    known = signature(function.name, function.domain, 1)
    return known is None or not ort_table().has_kernel("cuda", op, known.since, {})


def _is_called(index: GraphIndex, function: onnx.FunctionProto) -> bool:
    name = function.domain, function.name
    return any((node.domain, node.op_type) == name for node in index.graph.node)


def _elsewhere(bundle: Bundle) -> Iterator[Fault]:
    for role, index in _on_cuda(bundle):
        _, missing = walk_model(index.model, role, bundle.provider)
        for group in missing:
            if not group.elsewhere:
                continue  # it does not load at all, which types.kernel tells
            for place in group.places:
                yield (
                    place,
                    (
                        f"{group.op} of {group.types} has a kernel on the CPU alone, so its "
                        "operands are copied there and back"
                    ),
                )


def _dynamic(bundle: Bundle) -> Iterator[Fault]:
    for role, index in _on_cuda(bundle):
        free = [
            f"{name}[{','.join(map(str, shape_of(value)))}]"
            for name, value in index.inputs.items()
            if not all(isinstance(size, int) for size in shape_of(value))
        ]
        if free:
            more = f" and {len(free) - SHOWN} more" if len(free) > SHOWN else ""
            yield (
                f"{role}:{free[0].partition('[')[0]}",
                f"a run chooses sizes of {len(free)} inputs: {', '.join(free[:SHOWN])}{more}",
            )


def _host_inputs(bundle: Bundle) -> Iterator[Fault]:
    for role, index in _on_cuda(bundle):
        reached = _reached_by_values(index)
        for node in index.graph.node:
            for at in HOST_INPUTS.get(op_name(node), ()):
                value = node.input[at] if at < len(node.input) else ""
                if value in reached:
                    formal = signature(node.op_type, node.domain, 24)
                    known = formal.input(at) if formal is not None else None
                    yield (
                        f"{_place(role, node)}:{known.name if known is not None else at}",
                        f"the host reads it, and it is made from the values of "
                        f"'{reached[value]}'",
                    )


def _reached_by_values(index: GraphIndex) -> dict[str, str]:
    """Values that are computed from what an input holds, not from its sizes."""
    reached = {name: name for name in index.inputs}
    for node in index.graph.node:
        if node.op_type in ("Shape", "Size"):
            continue
        origin = next((reached[name] for name in node.input if name in reached), None)
        if origin is not None:
            reached |= dict.fromkeys((name for name in node.output if name), origin)
    return reached


def _alias_order(bundle: Bundle) -> Iterator[Fault]:
    for graph in bundle.description.graphs if bundle.provider == "cuda" else ():
        index = bundle.graphs[graph.role]
        flow = Flow(index.graph)
        for state in graph.states:
            fixed = all(isinstance(size, int) for size in state.shape[1:])
            if not state.present or not fixed or state.shape != state.present_shape:
                continue  # a cache that grows is told by its sizes
            made = index.source(state.present)
            writer = flow.writer(made)
            if writer is None:
                continue
            late = flow.readers(state.past, {made}) - flow.before(writer) - {writer}
            if late:
                yield (
                    f"{graph.role}:{state.past}",
                    f"{', '.join(flow.shown(i) for i in sorted(late)[:SHOWN])} may read it "
                    f"after {flow.shown(writer)} has overwritten it",
                )


def _place(role: str, node: onnx.NodeProto) -> str:
    return f"{role}:{node.name or next(iter(node.output), '?')}({node.op_type})"


CAPTURE_RULES: Sequence[BundleRule] = (
    BundleRule(
        code="capture.control_flow",
        severity=Severity.WARNING,
        title="no node is If, Loop or Scan",
        explanation="A captured graph is a fixed list of kernels; ONNX Runtime refuses these.",
        remedy="build an artifact: recurrences become single operators there",
        run=_control_flow,
    ),
    BundleRule(
        code="capture.cpu",
        severity=Severity.WARNING,
        title="every node has a CUDA kernel",
        explanation=(
            "A node that falls back to the CPU is placed there without a word, copies are put "
            "around it, and the capture is refused."
        ),
        remedy="repair --prefer fp16 or bf16, or build an artifact for CUDA",
        run=_elsewhere,
    ),
    BundleRule(
        code="capture.dynamic",
        severity=Severity.WARNING,
        title="all sizes are fixed",
        explanation=(
            "What is captured holds for one set of sizes and addresses; a mask or a cache "
            "that grows with each step needs a new capture at each step."
        ),
        remedy="build an artifact: its graphs have fixed sizes and caches written in place",
        run=_dynamic,
    ),
    BundleRule(
        code="capture.host_input",
        severity=Severity.WARNING,
        title="the host reads nothing that changes from step to step",
        explanation=(
            "A replay runs kernels only: a number that a kernel was given from the host's "
            "memory stays what it was when the graph was captured."
        ),
        remedy="build an artifact: its lengths stay on the device",
        run=_host_inputs,
    ),
    BundleRule(
        code="capture.alias_order",
        severity=Severity.WARNING,
        title="a present may be bound onto its past",
        explanation=(
            "Fixed addresses ask for states that are updated in place, and ONNX Runtime may "
            "run a reader of the past after the node that overwrites it."
        ),
        remedy="read the past only before the node that makes the present, or copy it there",
        run=_alias_order,
    ),
)
