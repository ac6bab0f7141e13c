"""A runnable piece of a bundle's graph, for a bug report: nodes, weights, sample inputs."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from artifacts import ParseError
from artifacts.graph_file import open_regular
from artifacts.types.check import walk_model
from export.bundles.data_files import FileState, data_files, region
from export.bundles.describe import load_graphs
from export.bundles.graph_index import GraphIndex
from export.bundles.layout import BundleLayout, find_layout
from export.errors import BundleError, ExportError
from export.importing.probe import nodes_between
from export.samples import samples
from export.surgeon import cut

__all__ = ["Piece", "extract"]

GRAPH, DATA, SAMPLES = "model.onnx", "model.onnx.data", "inputs.npz"
SMALL = 4096
COPY_BYTES = 2**24


@dataclass(frozen=True, slots=True)
class Piece:
    """What was cut out."""

    role: str
    nodes: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weight_bytes: int


def extract(folder: Path, starts: Sequence[str], ends: Sequence[str], output: Path) -> Piece:
    """Cut the nodes that lead from the values `starts` to the values `ends`.

    What those nodes read besides becomes an input too, except weights and what is made of
    integer inputs alone (masks, positions, lengths): that comes along.

    Writes ``model.onnx``, ``model.onnx.data`` and ``inputs.npz`` (random samples; bfloat16 as
    its bits, uint16) into `output`, which must not exist.

    Raises:
        BundleError: There is no bundle, or a data file is not what the graph says.
        ExportError: The values are not in one graph or not connected, or `output` exists.
    """
    if output.exists():
        raise ExportError(f"{output} exists; name a folder that does not")
    layout = find_layout(folder)
    role, index = _graph_of(layout, (*starts, *ends))
    nodes, inputs = _region(index, frozenset(starts), ends)
    types = walk_model(index.model, role, None)[0].values
    elements = {name: _element(index, name, types) for name in inputs}
    model = cut(index.model, frozenset(o for n in nodes for o in n.output), elements, ends)
    fed = dict(samples(index, elements))
    output.parent.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}."))
    try:
        size = _copy_weights(layout, layout.graphs[role], model, stage)
        (stage / GRAPH).write_bytes(model.SerializeToString(deterministic=True))
        np.savez(stage / SAMPLES, **fed)
        stage.chmod(0o755)
        stage.rename(output)
    except (OSError, ExportError):
        shutil.rmtree(stage, ignore_errors=True)
        raise
    return Piece(role, len(model.graph.node), tuple(inputs), tuple(ends), size)


def _graph_of(layout: BundleLayout, names: Sequence[str]) -> tuple[str, GraphIndex]:
    """The graph that has all of these values."""
    missing = ""
    for role, index in load_graphs(layout).items():
        known = index.producers.keys() | index.inputs.keys()
        lacking = [name for name in names if name not in known]
        if not lacking:
            return role, index
        missing = missing or lacking[0]
    raise ExportError(
        f"no graph of {layout.folder.name} has all of these values; {missing!r} is not in the "
        "first one (inspect --node shows values)"
    )


def _region(
    index: GraphIndex, starts: frozenset[str], ends: Sequence[str]
) -> tuple[list[onnx.NodeProto], list[str]]:
    """The nodes between, with those that serve them, and the values to feed."""
    behind = nodes_between(index, ends, starts)
    reached, between = set(starts), []
    for node in behind:
        if reached & set(node.input):
            reached.update(node.output)
            between.append(node)
    apart = [end for end in ends if end not in reached]
    if apart or not between:
        raise ExportError(f"no way leads from {', '.join(sorted(starts))} to {apart or ends}")
    serving = _bookkeeping(index)
    kept = {id(node) for node in between}
    inputs, queue = dict.fromkeys(sorted(starts)), [n for node in between for n in node.input]
    while queue:
        name = queue.pop()
        maker = index.producers.get(name)
        if name in inputs or name in index.initializers or not name:
            continue
        if maker is None or (id(maker) not in kept and id(maker) not in serving):
            inputs[name] = None
        elif id(maker) not in kept:
            kept.add(id(maker))
            queue += maker.input
    return [node for node in index.graph.node if id(node) in kept], list(inputs)


def _bookkeeping(index: GraphIndex) -> frozenset[int]:
    """Nodes that are made of integer inputs and small constants alone."""
    whole = (onnx.TensorProto.INT64, onnx.TensorProto.INT32)
    kinds = {n: v.type.tensor_type.elem_type for n, v in index.inputs.items()}
    known = {name for name, kind in kinds.items() if kind in whole}
    small = {
        n for n, t in index.initializers.items() if np.prod(t.dims, dtype=object) <= SMALL
    }
    known |= small | {""}
    found = set()
    for node in index.graph.node:
        asks = node.op_type == "Shape" and node.input[0] in index.inputs
        if asks or all(name in known for name in node.input):
            known.update(node.output)
            found.add(id(node))
    return frozenset(found)


def _element(index: GraphIndex, name: str, types: Any) -> int:
    if name in index.inputs:
        return int(index.inputs[name].type.tensor_type.elem_type)
    known = types.get(name)
    if known is None or known.sure is None:
        raise ExportError(f"the type of '{name}' is not known; start from another value")
    return int(onnx.TensorProto.DataType.Value(known.sure.upper()))


def _copy_weights(layout: BundleLayout, file: str, model: onnx.ModelProto, stage: Path) -> int:
    """Bring the weights that the piece reads into one data file beside it; its bytes."""
    places = {t.name: place for t in model.graph.initializer
              if (place := region(t, file)) is not None}  # fmt: skip
    for found in data_files(layout.folder, places.values()):
        if found.state is not FileState.PRESENT:
            raise BundleError(
                f"{found.file} is {found.state}; no weights can be taken from it"
            )
    if not places:
        return 0
    with (stage / DATA).open("wb") as new:
        for tensor in model.graph.initializer:
            place = places.get(tensor.name)
            if place is None:
                continue
            new.seek(-(-new.tell() // 64) * 64)
            said = {"location": DATA, "offset": new.tell(), "length": place.length}
            del tensor.external_data[:]
            for key, value in said.items():
                tensor.external_data.add(key=key, value=str(value))
            try:
                with open_regular(layout.folder / place.file) as old:
                    old.seek(place.offset)
                    left = place.length
                    while left > 0 and (block := old.read(min(left, COPY_BYTES))):
                        new.write(block)
                        left -= len(block)
            except ParseError as e:
                raise BundleError(f"{place.file} cannot be read: {e}") from e
        return new.tell()
