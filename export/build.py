"""From a source to an artifact: graphs, one weight file, manifest, checks.

Everything is written into a staging folder beside the output and renamed into place once
both checks have passed, so an interrupted build leaves nothing that loads.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from artifacts import (
    Finding,
    Manifest,
    ModelSpec,
    Severity,
    Source,
)
from artifacts.rules import check_artifact
from artifacts.version import PRODUCER
from export.artifact_files import Progress, digest_of, store_graphs, store_weights
from export.errors import BuildError
from export.graphs import make_graphs
from export.options import BuildOptions
from export.ports import Layout
from export.quantisers import pack_rtn
from export.staging import stage
from passes.quantise import Pack
from passes.streamed import StreamedTensor

__all__ = ["Model", "Progress", "build"]


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
    notes: tuple[str, ...] = ()
    """What was decided while the source was read and its owner should know."""


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
        weights = store_weights(graphs, folder, progress)
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
            graphs=store_graphs(graphs, weights, folder, progress),
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
                folder,
                prepack=False,  # a build must not need several times the weights' memory
                progress=lambda what: progress(f"check run: {what}", 0, 0),
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


def _copy(source: Path, to: Path) -> str:
    shutil.copyfile(source, to)
    return digest_of(to)


def _require_clean(findings: list[Finding]) -> None:
    errors = [finding for finding in findings if finding.severity is Severity.ERROR]
    if errors:
        first = errors[0]
        raise BuildError(
            f"the new artifact fails its own check ({len(errors)} findings), so it was not "
            f"put in place. First: {first.code} at {first.place}: {first.message}"
        )
