"""``mtp-export``: parse, call, print; nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import click

from artifacts import Finding, Manifest, ParseError, Severity, Target
from artifacts.version import __version__
from export.build import Model, build
from export.errors import ExportError
from export.geometries import GEOMETRIES
from export.options import BuildOptions
from export.progress import shown_progress
from export.sources import read_source
from export.synthetic import synthetic as synthetic_model
from passes.state_window import MAX_WINDOW

__all__ = ["main"]

MAX_K = 16
DEFAULT_CAPACITY = 4096
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mtp-export")
def main() -> None:
    """Build ONNX artifacts of hybrid language models with multi-token prediction.

    \b
    Examples:
      mtp-export demo
      mtp-export build Qwen3.5-0.8B -o qwen-mtp --k 3
      mtp-export check qwen-mtp
    """


@main.command("build")
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
    """Build an artifact from the checkpoint in SOURCE.

    An artifact for CUDA is checked by running it where there is a CUDA device; elsewhere,
    and for random weights, only without running it.

    \b
    Examples:
      mtp-export build Qwen3.5-0.8B -o qwen-mtp
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
        click.echo(json.dumps({"output": str(output), **summary(manifest)}))
    else:
        click.echo(f"{output}: " + describe(manifest))
        if k and not manifest.k:
            click.echo("The checkpoint has no MTP head, so there is nothing to draft with.")


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


@main.command("check")
@click.argument("folder", type=FOLDER, required=False)
@click.option("--no-digests", is_flag=True, help="Do not read the weights to compare digests.")
@click.option("--explain", metavar="CODE", help="Say what a rule means and how to mend it.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.pass_context
def check_command(
    context: click.Context,
    folder: Path | None,
    no_digests: bool,
    explain: str | None,
    as_json: bool,
) -> None:
    """Check the artifact in FOLDER without running it.

    Files and digests, manifest against graphs, types, aliases, links and paths that leave
    the folder. Exit code 0: clean; 1: findings; 2: no artifact at all.

    \b
    Examples:
      mtp-export check qwen-mtp
      mtp-export check qwen-mtp --json
      mtp-export check --explain graphs.aliases
    """
    from artifacts.rules import RULES, check_artifact

    if explain is not None:
        rule = RULES.get(explain)
        if rule is None:
            raise click.UsageError(f"no rule {explain!r}; there are {', '.join(RULES)}")
        click.echo(f"{rule.code} ({rule.severity}): {rule.title}\n\n{rule.explanation}")
        click.echo(f"\nRemedy: {rule.remedy}")
        return
    if folder is None:
        raise click.UsageError("name the artifact's FOLDER, or a rule with --explain")
    with shown_progress(quiet=as_json) as progress:
        findings = check_artifact(
            folder,
            digests=not no_digests,
            on_progress=lambda done, total: progress("reading weights", done, total),
        )
    print_findings(findings, as_json=as_json)
    if any(finding.code == "manifest.unreadable" for finding in findings):
        context.exit(2)
    context.exit(1 if any(f.severity is not Severity.NOTE for f in findings) else 0)


def print_findings(findings: list[Finding], *, as_json: bool) -> None:
    """Findings on standard output, one a paragraph or all as one JSON object."""
    if as_json:
        click.echo(json.dumps({"findings": [finding.to_json() for finding in findings]}))
        return
    for finding in findings:
        click.echo(f"{finding.severity} {finding.code}  {finding.place}")
        click.echo(f"    {finding.message}\n    {finding.remedy}")
    click.echo(f"{len(findings)} findings" if findings else "clean")


@main.command("demo")
@click.option("--k", type=click.IntRange(1, MAX_K), default=3, show_default=True)
@click.option("--prompt", help="Text to continue; three built-in ones otherwise.")
@click.option("--max-new-tokens", type=click.IntRange(1, 3000), default=200, show_default=True)
@click.option(
    "--keep",
    type=click.Path(path_type=Path),
    help="Keep the artifact in this folder, to go on with mtp-run.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as one JSON object.")
@click.pass_context
def demo_command(
    context: click.Context,
    k: int,
    prompt: str | None,
    max_new_tokens: int,
    keep: Path | None,
    as_json: bool,
) -> None:
    """Build the small trained checkpoint that ships along, and decode with and without MTP.

    Runs on the CPU in seconds; exits with 1 if a single token differs.

    \b
    Examples:
      mtp-export demo
      mtp-export demo --k 5 --prompt "def main():" --keep demo-artifact
    """
    from export.demo import render, show
    from runtime.errors import RunError

    try:
        with shown_progress(quiet=as_json) as progress:
            report = show(
                k=k,
                prompts=None if prompt is None else (prompt,),
                max_new_tokens=max_new_tokens,
                keep=keep,
                progress=progress,
            )
    except (ExportError, ParseError, RunError) as e:
        raise click.ClickException(str(e)) from e
    click.echo(json.dumps(report.to_json()) if as_json else render(report))
    context.exit(0 if report.same_tokens else 1)
