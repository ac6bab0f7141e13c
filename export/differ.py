"""What differs between two graphs or bundles: nodes, types, shapes, attributes, weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx

from artifacts import ParseError
from artifacts.graph_file import open_regular
from export.bundles.data_files import FileState, data_files, dtype_name, region
from export.bundles.graph_index import GraphIndex, read_graph_file
from export.bundles.layout import BundleLayout, find_layout
from export.bundles.states import shape_of
from export.errors import BundleError

__all__ = ["Difference", "differences"]

BLOCK_BYTES = 2**24


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not the same; None where it is not there at all."""

    graph: str
    kind: str
    """``input``, ``output``, ``node``, ``attribute``, ``weight``, ``opset`` or ``file``."""
    name: str
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True)
class _Side:
    """The graphs of a side by role, each with its folder and its file in it."""

    graphs: Mapping[str, tuple[Path, str]]
    metadata: Path | None


def differences(one: Path, other: Path) -> Iterator[Difference]:
    """Compare two ``.onnx`` files, or two bundles graph by graph.

    Weights are compared by type, shape and sha256 of their bytes, wherever they lie; nodes
    by the value that they make first.

    Raises:
        BundleError: A side is no graph and no bundle, or a data file is not what it must be.
    """
    before, after = _side(one), _side(other)
    for role in dict.fromkeys((*before.graphs, *after.graphs)):
        if role not in before.graphs or role not in after.graphs:
            there = {side is before: side.graphs[role][1]
                     for side in (before, after) if role in side.graphs}  # fmt: skip
            yield Difference(role, "file", role, there.get(True), there.get(False))
            continue
        tables = [_tables(*side.graphs[role]) for side in (before, after)]
        for kind, left in tables[0].items():
            yield from _compare(role, kind, left, tables[1][kind])
    texts = [side.metadata.read_bytes() if side.metadata else None for side in (before, after)]
    if texts[0] != texts[1]:
        digests = [hashlib.sha256(t).hexdigest() if t is not None else None for t in texts]
        name = (before.metadata or after.metadata or one).name
        yield Difference("metadata", "file", name, digests[0], digests[1])


def _side(path: Path) -> _Side:
    if path.is_file():
        return _Side({"graph": (path.parent, path.name)}, None)
    layout: BundleLayout = find_layout(path)
    metadata = path / layout.metadata if layout.metadata else None
    return _Side({role: (path, file) for role, file in layout.graphs.items()}, metadata)


def _tables(folder: Path, file: str) -> dict[str, dict[str, str]]:
    index = GraphIndex(read_graph_file(folder / file))
    nodes, attributes = {}, {}
    for node in index.graph.node:
        key = next((name for name in node.output if name), node.name)
        domain = f"{node.domain}." if node.domain else ""
        nodes[key] = (
            f"{domain}{node.op_type}({', '.join(node.input)}) -> {', '.join(node.output)}"
        )
        for attribute in node.attribute:
            attributes[f"{key}:{attribute.name}"] = _attribute(attribute)
    return {
        "opset": {o.domain or "ai.onnx": str(o.version) for o in index.model.opset_import},
        "input": {name: _type(value) for name, value in index.inputs.items()},
        "output": {value.name: _type(value) for value in index.graph.output},
        "value": {value.name: _type(value) for value in index.graph.value_info},
        "node": nodes,
        "attribute": attributes,
        "function": {f"{f.domain}.{f.name}": _digest_of(f) for f in index.model.functions},
        "weight": dict(_weights(folder, file, index)),
    }


def _compare(
    role: str, kind: str, left: Mapping[str, str], right: Mapping[str, str]
) -> Iterator[Difference]:
    for name in dict.fromkeys((*left, *right)):
        before, after = left.get(name), right.get(name)
        if kind == "value" and (before is None or after is None):
            continue  # a declaration may be left out
        if before != after:
            yield Difference(role, kind, name, before, after)


def _type(value: onnx.ValueInfoProto) -> str:
    sizes = ",".join(str(size) for size in shape_of(value))
    return f"{dtype_name(value.type.tensor_type.elem_type)}[{sizes}]"


def _attribute(attribute: onnx.AttributeProto) -> str:
    if attribute.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.TENSOR):
        held = attribute.g if attribute.type == onnx.AttributeProto.GRAPH else attribute.t
        return _digest_of(held)
    return str(onnx.helper.get_attribute_value(attribute))


def _digest_of(message: onnx.GraphProto | onnx.TensorProto | onnx.FunctionProto) -> str:
    return hashlib.sha256(message.SerializeToString(deterministic=True)).hexdigest()[:16]


def _weights(folder: Path, file: str, index: GraphIndex) -> Iterator[tuple[str, str]]:
    for tensor in index.graph.initializer:
        place, digest = region(tensor, file), hashlib.sha256()
        if place is None:
            digest.update(onnx.numpy_helper.to_array(tensor).tobytes())
        else:
            (found,) = data_files(folder, [place])
            if found.state is not FileState.PRESENT:
                raise BundleError(f"{folder / found.file} is {found.state}")
            try:
                with open_regular(folder / place.file) as data:
                    data.seek(place.offset)
                    left = place.length
                    while left > 0 and (block := data.read(min(left, BLOCK_BYTES))):
                        digest.update(block)
                        left -= len(block)
            except ParseError as e:
                raise BundleError(f"{folder / place.file} cannot be read: {e}") from e
        sizes = list(tensor.dims)
        yield tensor.name, f"{dtype_name(tensor.data_type)}{sizes} {digest.hexdigest()[:16]}"
