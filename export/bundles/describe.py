"""A bundle told without its weights: what is in it, of which types, how it is wired."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx

from export.bundles.data_files import DataFile, data_files, dtype_name, region
from export.bundles.graph_index import GraphIndex, op_name, read_graph_file
from export.bundles.layout import BundleLayout, find_layout
from export.bundles.states import CacheKind, State, cache_kind, find_states, shape_of
from export.bundles.weights import WeightTotal, totals
from export.bundles.wiring import HeadWiring, HiddenKind, hidden_outputs, wire_head
from export.errors import BundleError

__all__ = ["BundleDescription", "GraphDescription", "NodeView", "Value"]
__all__ += ["inspect_bundle", "inspect_node", "load_graphs"]


@dataclass(frozen=True, slots=True)
class Value:
    """An input or an output."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphDescription:
    """One graph of a bundle."""

    role: str
    """``target`` or ``head``"""
    file: str
    producer: str
    ir_version: int
    opsets: tuple[tuple[str, int], ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    nodes: int
    ops: tuple[tuple[str, int], ...]
    """Ops of the main graph, the most frequent first."""
    domains: tuple[tuple[str, int], ...]
    functions: tuple[str, ...]
    """Bodies that the file brings along."""
    control_flow: int
    """If, Loop and Scan nodes outside of functions."""
    weights: tuple[WeightTotal, ...]
    states: tuple[State, ...]
    cache: CacheKind
    rows: int | str
    """Rows of one run: a number, or the name of a size that a run chooses."""
    hidden_outputs: tuple[tuple[str, HiddenKind], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleDescription:
    """All that can be said of a bundle without reading its weights."""

    folder: str
    exporter: str
    metadata: str | None
    graphs: tuple[GraphDescription, ...]
    wiring: HeadWiring | None
    files: tuple[DataFile, ...]
    others: tuple[str, ...]
    missing: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values, keys as the fields are called."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node with its neighbourhood, each line in ONNX's text form."""

    graph: str
    before: tuple[str, ...]
    node: str
    after: tuple[str, ...]
    types: tuple[str, ...]


def load_graphs(layout: BundleLayout) -> dict[str, GraphIndex]:
    """The graphs by role, without weights; raises `BundleError`."""
    return {
        role: GraphIndex(read_graph_file(layout.folder / file))
        for role, file in layout.graphs.items()
    }


def inspect_bundle(folder: Path) -> BundleDescription:
    """Describe the bundle in `folder`; raises `BundleError` when there is none."""
    layout = find_layout(folder)
    graphs = load_graphs(layout)
    regions = [
        place
        for role, index in graphs.items()
        for tensor in index.graph.initializer
        if (place := region(tensor, layout.graphs[role])) is not None
    ]
    wiring = None
    if "head" in graphs and layout.head:
        joint = (layout.target, graphs["target"]), (layout.head, graphs["head"])
        wiring = wire_head(*joint, layout.declared)
    return BundleDescription(
        folder=folder.name,
        exporter=layout.exporter,
        metadata=layout.metadata,
        graphs=tuple(_describe(r, layout.graphs[r], index) for r, index in graphs.items()),
        wiring=wiring,
        files=data_files(folder, regions),
        others=layout.others,
        missing=layout.missing,
    )


def inspect_node(folder: Path, name: str) -> NodeView:
    """The node called `name` (or the one that makes the value of that name)."""
    for role, index in load_graphs(find_layout(folder)).items():
        for node in index.graph.node:
            if node.name == name or name in node.output:
                return _view(role, index, node)
    raise BundleError(f"no graph of {folder} has a node or a value called {name!r}")


def _describe(role: str, file: str, index: GraphIndex) -> GraphDescription:
    model, states = index.model, find_states(index)
    ops = Counter(op_name(node) for node in index.graph.node)
    domains = Counter(node.domain or "ai.onnx" for node in index.graph.node)
    return GraphDescription(
        role=role,
        file=file,
        producer=f"{model.producer_name} {model.producer_version}".strip(),
        ir_version=model.ir_version,
        opsets=tuple((o.domain or "ai.onnx", o.version) for o in model.opset_import),
        inputs=tuple(_value(i) for i in index.inputs.values()),
        outputs=tuple(_value(o) for o in index.graph.output),
        nodes=len(index.graph.node),
        ops=tuple(sorted(ops.items(), key=lambda item: (-item[1], item[0]))),
        domains=tuple(sorted(domains.items())),
        functions=tuple(f"{f.domain}.{f.name}" for f in model.functions),
        control_flow=sum(ops[name] for name in ("If", "Loop", "Scan")),
        weights=totals(index),
        states=states,
        cache=cache_kind(index, states),
        rows=_rows(index),
        hidden_outputs=tuple(hidden_outputs(index).items()),
    )


def _value(info: onnx.ValueInfoProto) -> Value:
    return Value(info.name, dtype_name(info.type.tensor_type.elem_type), shape_of(info))


def _rows(index: GraphIndex) -> int | str:
    for name in ("input_ids", "inputs_embeds"):
        shape = shape_of(index.inputs[name]) if name in index.inputs else ()
        if len(shape) > 1:
            return shape[1]
    return "?"


def _view(role: str, index: GraphIndex, node: onnx.NodeProto) -> NodeView:
    before = [index.producers[i] for i in node.input if i in index.producers]
    after = [user for o in node.output for user in index.consumers.get(o, ())]
    known = {v.name: v for v in index.graph.value_info} | index.inputs
    known |= {v.name: v for v in index.graph.output}
    types = []
    for name in (*node.input, *node.output):
        if name in index.initializers:
            tensor = index.initializers[name]
            sizes: tuple[int | str, ...] = tuple(tensor.dims)
            types.append(f"{name}: {dtype_name(tensor.data_type)}{list(sizes)}, stored")
        elif name in known:
            value = _value(known[name])
            types.append(f"{name}: {value.dtype}{list(value.shape)}")
    return NodeView(
        graph=role,
        before=tuple(dict.fromkeys(_text(n) for n in before)),
        node=_text(node),
        after=tuple(dict.fromkeys(_text(n) for n in after)),
        types=tuple(types),
    )


def _text(node: onnx.NodeProto) -> str:
    return " ".join(onnx.printer.to_text(node).split())


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, str) else value
