"""Rules about the graphs of a bundle: states, inputs, numerics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx

from artifacts.findings import Severity
from export.bundles.graph_index import GraphIndex, op_name
from export.bundles.rule import Bundle, BundleRule, Fault
from export.bundles.states import StateKind
from export.bundles.weights import NORMS

__all__ = ["GRAPH_RULES"]

HALF = ("float16", "bfloat16")


def _unpaired(bundle: Bundle) -> Iterator[Fault]:
    for graph in bundle.description.graphs:
        for state in graph.states:
            if state.present is None:
                yield f"{graph.role}:{state.past}", "no output gives the next step this state"


def _mismatched(bundle: Bundle) -> Iterator[Fault]:
    for graph in bundle.description.graphs:
        for state in graph.states:
            place = f"{graph.role}:{state.past}"
            if state.present is None:
                continue
            if state.dtype != state.present_dtype:
                yield (
                    place,
                    f"it is {state.dtype}, and its present '{state.present}' is "
                    f"{state.present_dtype}",
                )
            elif len(state.shape) != len(state.present_shape):
                yield (
                    place,
                    f"it has {len(state.shape)} axes, and its present '{state.present}' "
                    f"{len(state.present_shape)}",
                )


def _half(bundle: Bundle) -> Iterator[Fault]:
    for graph in bundle.description.graphs:
        found = [s for s in graph.states if s.kind is StateKind.RECURRENT and s.dtype in HALF]
        if found:
            layers = ", ".join(str(s.layer) for s in found)
            yield (
                f"{graph.role}:{found[0].past}",
                f"the recurrent state is {found[0].dtype} (layers {layers})",
            )


def _window(bundle: Bundle) -> Iterator[Fault]:
    if bundle.provider != "cpu":
        return
    for graph in bundle.description.graphs:
        found = [state for state in graph.states if state.window]
        if found:
            yield (
                f"{graph.role}:{found[0].past}",
                f"state_window is {found[0].window} ({len(found)} states); the CPU provider "
                "runs only 0",
            )


def _inputs(bundle: Bundle) -> Iterator[Fault]:
    listed = bundle.layout.declared.inputs
    if listed is None:
        return
    wanted = tuple(bundle.graphs["target"].inputs)
    for name in wanted:
        if name not in listed:
            yield f"{bundle.layout.metadata}:{name}", "the target needs it; it is not listed"
    for name in listed:
        if name not in wanted:
            yield (
                f"{bundle.layout.metadata}:{name}",
                "the target has no such input",
            )


def _epsilon(bundle: Bundle) -> Iterator[Fault]:
    for role, index in bundle.graphs.items():
        places = [node.name for node in index.graph.node if _bare_norm(index, node)]
        if places:
            yield (
                f"{role}:{places[0]}(Div):B",
                f"an L2 norm without an epsilon divides a row of zeros by zero "
                f"({len(places)} such nodes)",
            )


def _bare_norm(index: GraphIndex, node: onnx.NodeProto) -> bool:
    if node.op_type != "Div" or len(node.input) != 2:
        return False
    root = index.producers.get(node.input[1])
    if root is not None and op_name(root) == "ReduceL2":
        return True
    if root is None or op_name(root) != "Sqrt":
        return False
    total = index.producers.get(root.input[0])
    return total is not None and op_name(total) == "ReduceSumSquare"


def _offset(bundle: Bundle) -> Iterator[Fault]:
    for role, index in bundle.graphs.items():
        found = [n for n in index.graph.node if op_name(n) == "Add" and _offsets(index, n)]
        kinds = {index.initializers[n.input[0]].data_type for n in found}
        if found and kinds & {onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}:
            yield (
                f"{role}:{found[0].name}(Add)",
                f"the weight of a norm is added to 1 in half precision at run time "
                f"({len(found)} such nodes)",
            )


def _offsets(index: GraphIndex, node: onnx.NodeProto) -> bool:
    stored = all(name in index.initializers for name in node.input)
    users = index.consumers.get(node.output[0], ())
    return stored and any(op_name(user) in NORMS for user in users)


GRAPH_RULES: Sequence[BundleRule] = (
    BundleRule(
        code="states.unpaired",
        severity=Severity.ERROR,
        title="every past has its present",
        explanation="A state that no output gives starts each step anew.",
        remedy="export the graph with its present outputs",
        run=_unpaired,
    ),
    BundleRule(
        code="states.mismatched",
        severity=Severity.ERROR,
        title="a present has the dtype and the axes of its past",
        explanation="The next step binds it as its past.",
        remedy="cast the present where it is made, or export again",
        run=_mismatched,
    ),
    BundleRule(
        code="states.half",
        severity=Severity.WARNING,
        title="the recurrent state is float32",
        explanation="Rounded to half precision at every token it cost a port half its MMLU.",
        remedy="build an artifact from the bundle: its state is float32",
        run=_half,
    ),
    BundleRule(
        code="states.window",
        severity=Severity.ERROR,
        title="windowed states run on the provider",
        explanation="state_window is implemented by the CUDA kernels alone.",
        remedy="use --ep cuda, or build an artifact for the CPU",
        run=_window,
    ),
    BundleRule(
        code="metadata.inputs",
        severity=Severity.ERROR,
        title="the metadata lists the target's inputs",
        explanation="A runtime feeds what the metadata lists; the graph demands what it has.",
        remedy="repair writes the list anew",
        run=_inputs,
    ),
    BundleRule(
        code="numerics.epsilon",
        severity=Severity.WARNING,
        title="a norm has an epsilon",
        explanation="A key or query of zeros, such as padding gives, becomes NaN and stays.",
        remedy="repair guards it",
        run=_epsilon,
    ),
    BundleRule(
        code="numerics.offset",
        severity=Severity.WARNING,
        title="1 + w is folded in float32",
        explanation="In bfloat16 the sum has eight bits; w near zero vanishes.",
        remedy="repair folds it",
        run=_offset,
    ),
)
