"""Rules about single graphs: readable, well-typed, and of the ports that the manifest says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import onnx

from artifacts.findings import Severity
from artifacts.graph_file import value_type, without_weights
from artifacts.manifest import GRAPHS, MANIFEST, Graph, Manifest, Port
from artifacts.rule import Case, Fault, Rule

__all__ = ["GRAPH_RULES"]

CHECKER_ERRORS = (
    onnx.checker.ValidationError,
    onnx.shape_inference.InferenceError,
    ValueError,  # of a type number that ONNX does not know, of a message that is no UTF-8
    RuntimeError,
    IndexError,
    TypeError,
)


def _unreadable(case: Case) -> Iterator[Fault]:
    for name, error in case.unreadable_graphs():
        yield Fault(case.described[name].file, f"graph {name}: {error}")


def _types(case: Case) -> Iterator[Fault]:
    for name, graph, model in case.graphs():
        if any(t.external and not t.is_initializer for t in case.tensors(name)):
            continue  # another rule says so; the checker would go and look for the data
        try:
            onnx.checker.check_model(without_weights(model), full_check=True)
        except CHECKER_ERRORS as e:
            text = " ".join(str(e).split())
            yield Fault(graph.file, f"onnx's checker refuses graph {name}: {text}")


def _ports(case: Case) -> Iterator[Fault]:
    for name, graph, model in case.graphs():
        weights = {tensor.name for tensor in model.graph.initializer}
        inputs = [value for value in model.graph.input if value.name not in weights]
        yield from _compare(name, "input", inputs, graph.inputs)
        yield from _compare(name, "output", model.graph.output, graph.outputs)
    for name, graph in case.manifest.graphs.items():
        for port in (*graph.inputs, *graph.outputs):
            if port.buffer not in case.manifest.buffers:
                yield Fault(
                    f"{name}:{port.name}",
                    f"{port.name} is bound to {port.buffer!r}, no buffer of {MANIFEST}",
                )


def _compare(
    graph: str, kind: str, values: Iterable[onnx.ValueInfoProto], ports: tuple[Port, ...]
) -> Iterator[Fault]:
    found = {value.name: value_type(value) for value in values}
    said = {port.name: (port.dtype, port.shape) for port in ports}
    for name, count in Counter(port.name for port in ports).items():
        if count > 1:
            yield Fault(f"{graph}:{name}", f"{MANIFEST} has {count} {kind}s called {name}")
    for name in [*said, *(name for name in found if name not in said)]:
        place = f"{graph}:{name}"
        if name not in found:
            yield Fault(place, f"{MANIFEST} has an {kind} {name}, the graph has none")
        elif name not in said:
            yield Fault(place, f"the graph has an {kind} {name}, {MANIFEST} has none")
        elif said[name] != found[name]:
            yield Fault(
                place,
                f"{kind} {name} is {_shown(*found[name])} in the graph and "
                f"{_shown(*said[name])} in {MANIFEST}",
            )


def _shown(dtype: str, shape: tuple[int | str, ...]) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"


def _rows(case: Case) -> Iterator[Fault]:
    manifest = case.manifest
    needed = GRAPHS if manifest.k else GRAPHS[:2]
    for name in needed:
        if name not in manifest.graphs:
            yield Fault(MANIFEST, f"graph {name} is missing; k is {manifest.k}")
    if manifest.k and manifest.samples != ("verify_sampled" in manifest.graphs):
        yield Fault(
            MANIFEST, "only one of the graphs decode_sampled and verify_sampled is there"
        )
    for name, graph in manifest.graphs.items():
        if name not in manifest.graph_rows:
            yield Fault(
                f"{MANIFEST}:{name}",
                f"graph {name} is one too many; with k = {manifest.k} there are "
                f"{', '.join(manifest.graph_rows)}",
            )
        else:
            yield from _rows_of(name, graph, manifest)


def _rows_of(name: str, graph: Graph, manifest: Manifest) -> Iterator[Fault]:
    rows = manifest.graph_rows[name]
    if graph.rows != rows:
        yield Fault(f"{MANIFEST}:{name}", f"graph {name} has rows = {graph.rows}, not {rows}")
    if rows is None:
        return
    for port in (*graph.inputs, *graph.outputs):
        names = [size for size in port.shape if isinstance(size, str)]
        if names:
            yield Fault(
                f"{name}:{port.name}",
                f"{port.name} has the open size {names[0]!r}; shapes of {name} are fixed, or "
                "it cannot be captured",
            )
        elif port.name in ("input_ids", "ids", "best") and port.shape != (1, rows):
            yield Fault(
                f"{name}:{port.name}",
                f"{port.name} is {list(port.shape)}; {rows} rows make it [1, {rows}]",
            )


GRAPH_RULES = (
    Rule(
        code="graphs.unreadable",
        severity=Severity.ERROR,
        title="every graph file is an ONNX file",
        explanation="A file cut short or of another kind stops a run before its first token.",
        remedy="copy the file again, or build the artifact again",
        run=_unreadable,
    ),
    Rule(
        code="graphs.types",
        severity=Severity.ERROR,
        title="every graph passes onnx's full checker",
        explanation=(
            "The checker infers every type and shape and compares; a clash such as bfloat16 "
            "plus float32 is what ONNX Runtime refuses at load. Weights are not read: each is "
            "taken as its declared type. Operators of com.microsoft are unknown to onnx and "
            "taken as their declared outputs."
        ),
        remedy="build the artifact again; of somebody else's bundle, run mtp-export repair",
        run=_types,
    ),
    Rule(
        code="graphs.ports",
        severity=Severity.ERROR,
        title="inputs and outputs of each graph are those of the manifest",
        explanation=(
            "A run binds each port to a fixed address by the manifest alone; a port that is "
            "larger in the graph writes past its buffer."
        ),
        remedy="build the artifact again; graphs and manifest come from one build",
        run=_ports,
    ),
    Rule(
        code="graphs.rows",
        severity=Severity.ERROR,
        title="each graph has the rows that its place in a step demands",
        explanation=(
            "verify and draft take k + 1 rows, decode takes one, and their shapes are fixed: "
            "a captured graph replays one shape. Without drafts (k = 0) there is neither "
            "verify nor draft. The graphs that sample come together or not at all."
        ),
        remedy="build the artifact again with the k you want",
        run=_rows,
    ),
)
