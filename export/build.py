"""From a source to an artifact: graphs, one weight file, manifest, checks.

Everything is written into a staging folder beside the output and renamed into place once
both checks have passed, so an interrupted build leaves nothing that loads.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from artifacts import (
    DerivedTensor,
    Fallback,
    Finding,
    Graph,
    Manifest,
    ModelSpec,
    Severity,
    Source,
    Weights,
)
from artifacts.rules import check_artifact
from artifacts.version import PRODUCER
from export.errors import BuildError
from export.graphs import make_graphs
from export.options import BuildOptions
from export.pipeline import DerivedGraph
from export.ports import Layout
from export.quantisers import pack_rtn
from export.staging import stage
from export.weight_file import StoredTensor, write_weights
from passes.quantise import Pack
from passes.streamed import StreamedTensor, from_array

__all__ = ["Model", "Progress", "build"]

WEIGHT_FILE = "weights.safetensors"
LARGE = ("rotary.cos", "rotary.sin")
"""Tables that go into the weight file too; other constants stay inside the graphs."""
Progress = Callable[[str, int, int], None]
"""``(what, done, total)``, called often enough to draw a bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What a source gives to a build."""

    spec: ModelSpec
    weights: Mapping[str, StreamedTensor]
    """By canonical name; every one is used or the build fails naming it."""
    source: Source
    eos_token_ids: tuple[int, ...]
    files: Mapping[str, Path]
    """Files that travel along as they are (tokenizer, chat template)."""
    pack: Pack = pack_rtn
    """How a matrix is put into four bits, where that is asked."""


def build(
    model: Model,
    output: Path,
    options: BuildOptions,
    *,
    force: bool = False,
    run_check: bool = True,
    progress: Progress = lambda what, done, total: None,
) -> Manifest:
    """Write the artifact of `model` to `output`.

    Args:
        model: Spec and weights.
        output: The artifact's folder; an existing artifact is replaced only with `force`.
        options: Sizes and target.
        force: Replace an existing artifact, once the new one is complete.
        run_check: Run the new artifact before it is put in place.
        progress: Told how far the build is.

    Raises:
        ExportError: What cannot be built, or what a check found; nothing is left behind.
    """
    options = options.with_head_of(model.spec)
    _refuse_small(options)
    layout = Layout(model.spec, options)
    graphs = make_graphs(
        model.spec,
        model.weights,
        options,
        layout=layout,
        pack=model.pack,
        on_pass=lambda what, done: progress(what, done, 0),
    )
    with stage(output, force=force) as folder, _told(output):
        weights = _write_weights(graphs, folder, progress)
        manifest = Manifest(
            producer=PRODUCER,
            spec=model.spec,
            target=options.target,
            k=options.k,
            capacity=options.capacity,
            cache_rows=options.cache_rows,
            prefill_rows=options.prefill_rows,
            eos_token_ids=model.eos_token_ids,
            buffers=layout.buffers(),
            graphs=_write_graphs(graphs, weights, folder, progress),
            weights=weights,
            files={name: _copy(path, folder / name) for name, path in model.files.items()},
            source=model.source,
        )
        manifest.write(folder)
        progress("check files", 0, 1)
        _require_clean(check_artifact(folder, digests=False))
        if run_check:
            from runtime.check import check_run

            found = check_run(
                folder, progress=lambda what: progress(f"check run: {what}", 0, 0)
            )
            _require_clean(found)
    return manifest


def _refuse_small(options: BuildOptions) -> None:
    least = options.rows + 2
    if options.capacity < least:
        raise BuildError(
            f"a capacity of {options.capacity} leaves no room for a prompt and a step of "
            f"{options.rows} rows; with k = {options.k} give at least {least}"
        )


@contextmanager
def _told(output: Path) -> Iterator[None]:
    """Tell what the system refuses in one sentence, as all else that stops a build."""
    try:
        yield
    except OSError as e:
        raise BuildError(
            f"{output} cannot be written: {e.filename or 'a file of it'}: {e.strerror or e}. "
            "Make room, or choose another place"
        ) from e


def _write_weights(
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


def _write_graphs(
    graphs: Mapping[str, DerivedGraph],
    weights: Weights,
    folder: Path,
    progress: Progress,
) -> dict[str, Graph]:
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
    return _sha256(path), tuple(names)


def _copy(source: Path, to: Path) -> str:
    shutil.copyfile(source, to)
    return _sha256(to)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _require_clean(findings: list[Finding]) -> None:
    errors = [finding for finding in findings if finding.severity is Severity.ERROR]
    if errors:
        first = errors[0]
        raise BuildError(
            f"the new artifact fails its own check ({len(errors)} findings), so it was not "
            f"put in place. First: {first.code} at {first.place}: {first.message}"
        )
