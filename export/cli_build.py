"""``mtp-export build``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import click

from artifacts import Manifest, ParseError, Target
from export.build import Model, build
from export.errors import ExportError
from export.geometries import GEOMETRIES
from export.options import BuildOptions
from export.progress import shown_progress
from export.sources import read_source
from export.synthetic import synthetic as synthetic_model
from passes.state_window import MAX_WINDOW

__all__ = ["build_command"]

MAX_K = 16
DEFAULT_CAPACITY = 4096
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command("build")
@click.argument("source", type=FOLDER, required=False)
@click.option(
    "--synthetic",
    type=click.Choice(sorted(GEOMETRIES)),
    help="Random weights of a public size instead of a SOURCE, to measure speed.",
)
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path))
@click.option(
    "--k",
    type=click.IntRange(0, MAX_K),
    default=3,
    show_default=True,
    help="Tokens drafted a step; 0 leaves the MTP head out.",
)
@click.option(
    "--target",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="What the graphs are lowered for.",
)
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "fp16", "bf16"]),
    help="Activations and caches. Default: fp32 on the CPU, fp16 on CUDA.",
)
@click.option(
    "--weights",
    type=click.Choice(["dense", "int4"]),
    default="dense",
    show_default=True,
    help="Matrices as they are, or in four bits.",
)
@click.option(
    "--kernels",
    type=click.Choice(["stock", "own"]),
    default="stock",
    show_default=True,
    help="ONNX Runtime's kernels alone, or with this project's (int4, CUDA, Hopper).",
)
@click.option(
    "--capacity",
    type=click.IntRange(2, 2**22),
    help=f"Tokens a sequence may hold. Default: what the model announces, "
    f"at most {DEFAULT_CAPACITY}.",
)
@click.option(
    "--prefill-rows",
    type=click.IntRange(1, 2**16),
    default=512,
    show_default=True,
    help="Rows of a prompt that are read at a time.",
)
@click.option(
    "--sampling/--no-sampling",
    default=True,
    show_default=True,
    help="Build the graphs that draw tokens, beside the greedy ones.",
)
@click.option("--force", is_flag=True, help="Replace an artifact that is there.")
@click.option(
    "--no-check", is_flag=True, help="Do not run the new artifact before it is kept."
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
def build_command(
    source: Path | None,
    synthetic: str | None,
    output: Path,
    k: int,
    target: str,
    dtype: str | None,
    weights: str,
    kernels: str,
    capacity: int | None,
    prefill_rows: int,
    sampling: bool,
    force: bool,
    no_check: bool,
    as_json: bool,
) -> None:
    """Build an artifact from SOURCE: a checkpoint, or a bundle of another exporter.

    Layers of a bundle's graphs are told by their structure; whatever is in them and not in
    the model that is built is named and refused.

    An artifact for CUDA is checked by running it where there is a CUDA device; elsewhere,
    and for random weights, only without running it.

    \b
    Examples:
      mtp-export build Qwen3.5-0.8B -o qwen-mtp
      mtp-export build some-bundle -o from-onnx --k 2
      mtp-export build Qwen3.5-0.8B -o qwen-mtp --k 2 --capacity 8192 --force
      mtp-export build Qwen3.5-27B -o qwen-cuda --target cuda --weights int4
      mtp-export build --synthetic qwen3.5-27b -o random --target cuda --weights int4
    """
    if (source is None) == (synthetic is None):
        raise click.UsageError("name the SOURCE folder, or a size with --synthetic, not both")
    options = BuildOptions(
        k=k,
        capacity=capacity or DEFAULT_CAPACITY,
        prefill_rows=prefill_rows,
        target=_target(target, dtype, weights, kernels, k),
        sampling=sampling,
    )
    try:
        with shown_progress(quiet=as_json) as progress:
            model = _model(source, synthetic)
            if capacity is None:
                shorter = min(options.capacity, model.spec.max_positions)
                options = replace(options, capacity=shorter)
            manifest = build(
                model,
                output,
                options,
                force=force,
                run_check=not no_check and synthetic is None and _runs_here(target),
                progress=progress,
            )
    except (ExportError, ParseError) as e:
        raise click.ClickException(str(e)) from e
    if as_json:
        told = {"output": str(output), **summary(manifest), "notes": list(model.notes)}
        click.echo(json.dumps(told))
        return
    click.echo(f"{output}: " + describe(manifest))
    for note in model.notes:
        click.echo(f"  {note}")
    if k and not manifest.k:
        kind = manifest.source.kind
        click.echo(f"The {kind} has no MTP head, so there is nothing to draft with.")


DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def _target(provider: str, dtype: str | None, weights: str, kernels: str, k: int) -> Target:
    """The target of the options; raises `click.UsageError` for one that cannot be."""
    if provider == "cpu" and dtype not in (None, "fp32"):
        raise click.UsageError(
            f"--dtype {dtype} needs --target cuda: ONNX Runtime's CPU provider has no kernels "
            "for it in these layers"
        )
    if provider == "cuda" and dtype == "fp32":
        raise click.UsageError("--dtype fp32 needs --target cpu: attention on CUDA is 16 bits")
    if provider == "cuda" and k + 1 > MAX_WINDOW:
        raise click.UsageError(
            f"--k {k} is too many for CUDA: its kernels keep the states of {MAX_WINDOW} rows, "
            f"so k is at most {MAX_WINDOW - 1}"
        )
    if kernels == "own" and (provider, weights) != ("cuda", "int4"):
        raise click.UsageError("--kernels own needs --target cuda and --weights int4")
    chosen = dtype or ("fp32" if provider == "cpu" else "fp16")
    return Target(provider, DTYPES[chosen], weights, kernels)


def _model(source: Path | None, size: str | None) -> Model:
    if source is not None:
        return read_source(source)
    assert size is not None
    return synthetic_model(size)


def _runs_here(provider: str) -> bool:
    """Whether an artifact for `provider` can be run on this machine."""
    if provider == "cpu":
        return True
    from runtime.cuda_driver import CudaDriver
    from runtime.errors import DeviceError

    try:
        CudaDriver().close()
    except DeviceError:
        return False
    return True


def summary(manifest: Manifest) -> dict[str, object]:
    """What a build made, as plain JSON values."""
    return {
        "family": manifest.spec.family,
        "layers": len(manifest.spec.layers),
        "k": manifest.k,
        "rows": manifest.rows,
        "capacity": manifest.capacity,
        "provider": manifest.target.provider,
        "dtype": manifest.target.dtype,
        "weights": manifest.target.weights,
        "source": manifest.source.kind,
        "graphs": {
            name: {record.name: record.changes for record in graph.passes}
            for name, graph in manifest.graphs.items()
        },
        "weight_bytes": manifest.weights.size,
        "left_out": list(manifest.source.left_out),
    }


def describe(manifest: Manifest) -> str:
    """One sentence about an artifact."""
    megabytes = manifest.weights.size / 1e6
    kind = "random weights, " if manifest.source.kind == "synthetic" else ""
    return (
        f"{kind}{len(manifest.spec.layers)} layers, {', '.join(manifest.graphs)}; "
        f"k = {manifest.k}, "
        f"capacity {manifest.capacity}, {manifest.target.dtype} on "
        f"{manifest.target.provider}, {megabytes:,.1f} MB of "
        f"{manifest.target.weights} weights"
    )
