"""A description as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from export.bundles.describe import BundleDescription, GraphDescription, NodeView, Value
from export.bundles.wiring import HeadWiring

__all__ = ["render", "render_node"]


def render(description: BundleDescription) -> str:
    """The description, a few dozen lines."""
    return "\n".join(_lines(description)) + "\n"


def render_node(view: NodeView) -> str:
    """A node between those that feed it and those that it feeds."""
    lines = [f"{view.graph}:", *(f"  < {line}" for line in view.before), f"  = {view.node}"]
    lines += [f"  > {line}" for line in view.after]
    return "\n".join([*lines, *(f"    {line}" for line in view.types)]) + "\n"


def _lines(bundle: BundleDescription) -> Iterator[str]:
    yield f"{bundle.folder}: {bundle.exporter}, metadata {bundle.metadata or 'none'}"
    for graph in bundle.graphs:
        yield from _graph(graph)
    if bundle.wiring is not None:
        yield from _wiring(bundle.wiring)
    yield "files"
    for file in bundle.files:
        unused = file.size - file.used
        note = f", {_size(unused)} unread" if file.size and unused else ""
        yield f"  {file.file:<24} {_size(file.size):>10}  {file.state}{note}"
    for name in bundle.missing:
        yield f"  {name:<24} {'-':>10}  missing"
    if bundle.others:
        yield f"  also: {', '.join(bundle.others)}"


def _graph(graph: GraphDescription) -> Iterator[str]:
    opsets = ", ".join(f"{domain} {version}" for domain, version in graph.opsets)
    yield f"{graph.role}: {graph.file}, {graph.producer}, IR {graph.ir_version}, {opsets}"
    yield f"  rows {graph.rows}, cache {graph.cache}, {graph.nodes} nodes"
    yield f"  inputs   {_values(graph.inputs)}"
    yield f"  outputs  {_values(graph.outputs)}"
    yield "  ops      " + ", ".join(f"{name} {count}" for name, count in graph.ops)
    yield "  domains  " + ", ".join(f"{name} {count}" for name, count in graph.domains)
    if graph.functions:
        yield f"  bodies   {', '.join(graph.functions)}"
    for state in graph.states:
        window = f", window {state.window}" if state.window else ""
        layer = "?" if state.layer is None else state.layer
        yield (
            f"  state    layer {layer} {state.kind}: {state.past} -> "
            f"{state.present or 'nothing'}, {state.dtype}{_shape(state.shape)}{window}"
        )
    for total in graph.weights:
        size = _size(total.bytes)
        yield f"  weights  {total.kind:<17} {total.dtype:<10} {total.tensors:>5} {size:>10}"
    for name, kind in graph.hidden_outputs:
        yield f"  hidden   {name}: {kind}"


def _wiring(wiring: HeadWiring) -> Iterator[str]:
    hidden, kind = wiring.hidden_output or "none", wiring.hidden_kind or "not an output"
    yield f"wiring: the head starts from {hidden} ({kind})"
    yield f"  feedback   {wiring.feedback_output or 'none'} ({wiring.feedback_kind or '-'})"
    yield f"  embedding  {wiring.embedding}: {wiring.embedding_weight or '-'}"
    yield f"  lm_head    {wiring.lm_head}: {wiring.lm_head_weight or '-'}"
    if wiring.kv_mode:
        yield f"  kv_mode    {wiring.kv_mode}"


def _values(values: tuple[Value, ...]) -> str:
    rest = [v for v in values if not v.name.startswith(("past", "present"))]
    shown = ", ".join(f"{v.name} {v.dtype}{_shape(v.shape)}" for v in rest)
    states = len(values) - len(rest)
    return f"{shown}, {states} states" if states else shown


def _shape(shape: tuple[int | str, ...]) -> str:
    return "[" + ",".join(str(size) for size in shape) + "]"


def _size(count: int) -> str:
    """Bytes in the largest unit that they reach: ``518.0 KiB``."""
    if count < 1024:
        return f"{count} B"
    power = min(3, (count.bit_length() - 1) // 10)
    return f"{count / 1024**power:.1f} {('KiB', 'MiB', 'GiB')[power - 1]}"
