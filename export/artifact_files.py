"""Graphs and the one weight file that they share, written to the artifact's folder."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import onnx_ir as ir

from artifacts import DerivedTensor, Fallback, Graph, Weights
from export.pipeline import DerivedGraph
from export.weight_file import StoredTensor, write_weights
from passes.streamed import StreamedTensor, from_array

__all__ = ["Progress", "digest_of", "store_graphs", "store_weights"]

WEIGHT_FILE = "weights.safetensors"
LARGE = ("rotary.cos", "rotary.sin")
"""Tables that go into the weight file too; other constants stay inside the graphs."""
Progress = Callable[[str, int, int], None]
"""``(what, done, total)``, called often enough to draw a bar."""


def store_weights(
    graphs: Mapping[str, DerivedGraph], folder: Path, progress: Progress
) -> Weights:
    """Every weight of every graph, once; small constants stay inside the graphs."""
    tensors: dict[str, StoredTensor] = {}
    stored_as: dict[str, str] = {}  # weight -> the one in the file that has its bytes
    derived: dict[str, DerivedTensor] = {}
    first: dict[str, str] = {}
    for value, unpacked in _initializers(graphs):
        name = value.name or ""
        if not isinstance(value.const_value, StreamedTensor) and name not in LARGE:
            continue
        if name in unpacked:
            assert value.dtype is not None and value.shape is not None
            shape = tuple(value.shape.numpy())
            derived[name] = DerivedTensor(value.dtype.numpy().name, shape, *unpacked[name])
            continue
        tensor = _stored(value.const_value)
        stored_as[name] = first.setdefault(tensor.shared_as or name, name)
        tensors.setdefault(stored_as[name], tensor)
    written = write_weights(
        folder / WEIGHT_FILE,
        tensors,
        on_progress=lambda done, total: progress("write weights", done, total),
    )
    places = {name: written.tensors[stored] for name, stored in stored_as.items()}
    return dataclasses.replace(written, tensors=places, derived=derived)


def _initializers(
    graphs: Mapping[str, DerivedGraph],
) -> Iterator[tuple[ir.Value, Mapping[str, tuple[str, str]]]]:
    """Those of all graphs and their fallbacks, each with what is unpacked in its graph."""
    for graph in graphs.values():
        yield from ((value, {}) for value in graph.model.graph.initializers.values())
    for fallback in (graph.fallback for graph in graphs.values()):
        if fallback is not None:
            values = fallback.model.graph.initializers.values()
            yield from ((value, fallback.unpacked) for value in values)


def _stored(value: ir.TensorProtocol | None) -> StreamedTensor:
    """A value that can be streamed; what is held in memory counts as one block."""
    if isinstance(value, StreamedTensor):
        return value
    assert value is not None
    return from_array(value.numpy(), value.name)


def store_graphs(
    graphs: Mapping[str, DerivedGraph],
    weights: Weights,
    folder: Path,
    progress: Progress,
) -> dict[str, Graph]:
    """Write every graph and what it falls back to; weights are referred to, not held."""
    written: dict[str, Graph] = {}
    for name, derived in graphs.items():
        progress(f"write {name}", len(written), len(graphs))
        file, fallback = f"{name}.onnx", None
        digest, names = _save(derived.model, folder / file, weights)
        if derived.fallback is not None:
            other = f"{name}.stock.onnx"
            found, read = _save(derived.fallback.model, folder / other, weights)
            fallback = Fallback(file=other, sha256=found, weights=read)
        written[name] = Graph(
            file=file,
            sha256=digest,
            rows=derived.rows,
            inputs=derived.inputs,
            outputs=derived.outputs,
            passes=derived.passes,
            weights=names,
            fallback=fallback,
        )
    return written


def _save(model: ir.Model, path: Path, weights: Weights) -> tuple[str, tuple[str, ...]]:
    """Write a graph that refers to its weights; gives its digest and their names."""
    names = []
    for key, value in model.graph.initializers.items():
        if key in weights.tensors:
            tensor = weights.tensors[key]
            place = WEIGHT_FILE, tensor.offset, tensor.length
        elif key in weights.derived:
            place = WEIGHT_FILE, weights.size, weights.length(key)  # see artifacts.fallback
        else:
            continue
        assert value.dtype is not None and value.shape is not None
        value.const_value = ir.ExternalTensor(
            *place, value.dtype, shape=value.shape, name=key, base_dir=path.parent
        )
        names.append(key)
    ir.save(model, path)
    return digest_of(path), tuple(names)


def digest_of(path: Path) -> str:
    """SHA-256 of a file, as a manifest says it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
