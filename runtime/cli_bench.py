"""``mtp-run bench``."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from runtime.bench import BenchOptions, BenchReport, bench
from runtime.edge import FOLDER, THREADS, errors_at_the_edge, spinner
from runtime.errors import RequestError
from runtime.graph_lines import graph_lines
from runtime.load import load

__all__ = ["bench_command", "render"]


class Numbers(click.ParamType[tuple[int, ...]]):
    """Whole numbers, separated by commas."""

    name = "N,N"

    def convert(
        self, value: object, param: click.Parameter | None, context: click.Context | None
    ) -> tuple[int, ...]:
        """Parse ``1,2,3``."""
        try:
            numbers = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is no list of whole numbers, such as 1,2,3", param, context)
        if any(number < 1 for number in numbers):
            self.fail(f"{value!r} has a number below 1", param, context)
        return numbers


@click.command("bench")
@click.argument("folder", type=FOLDER)
@click.option("--k", "ks", type=Numbers(), help="Drafts a step. Default: what is built.")
@click.option("--context", "contexts", type=Numbers(), default="512", show_default=True)
@click.option(
    "--forced-acceptance",
    "acceptance",
    type=click.FloatRange(0, 1),
    help="Let each draft be right with this chance: drafted ids are replaced by recorded "
    "ones; the head still runs, the verify still decides.",
)
@click.option("--steps", type=click.IntRange(3, 100_000), default=60, show_default=True)
@click.option("--warm-up", type=click.IntRange(0, 1000), default=10, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--threads", type=THREADS, default=0, help="Threads of a graph; 0: every core.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, nothing else.")
@click.pass_context
def bench_command(
    context: click.Context,
    folder: Path,
    ks: tuple[int, ...] | None,
    contexts: tuple[int, ...],
    acceptance: float | None,
    steps: int,
    warm_up: int,
    seed: int,
    threads: int,
    as_json: bool,
) -> None:
    """Measure the artifact in FOLDER: greedy and MTP decoding in one run.

    \b
    Examples:
      mtp-run bench qwen-mtp
      mtp-run bench qwen-mtp --context 512,8192 --forced-acceptance 0.83 --json
    """
    with errors_at_the_edge(context), spinner(quiet=as_json) as progress:
        start = time.perf_counter()
        loaded = load(folder, threads=threads, progress=progress)
        load_seconds = time.perf_counter() - start
        try:
            built = loaded.manifest.k
            chosen = ks or ((built,) if built else ())
            if any(k > built for k in chosen):
                raise RequestError(f"k = {max(chosen)}: this artifact drafts at most {built}")
            longest = max(contexts) + (max(chosen, default=0) + 1) * 4
            if longest > loaded.manifest.capacity:
                raise RequestError(
                    f"a context of {max(contexts)} leaves no room to decode in a capacity of "
                    f"{loaded.manifest.capacity}"
                )
            options = BenchOptions(
                ks=chosen,
                contexts=contexts,
                acceptance=acceptance,
                steps=steps,
                warm_up=warm_up,
                seed=seed,
            )
            report = bench(loaded, options, progress, load_seconds=load_seconds)
            lines = graph_lines(loaded.slots)
        finally:
            loaded.close()
    click.echo(json.dumps(report.to_json()) if as_json else render(report, lines))


def render(report: BenchReport, graphs: list[str]) -> str:
    """The report for a terminal."""
    model = report.model
    lines = [
        f"{model['family']} ({model['source']}), {model['layers']} layers, {model['dtype']}, "
        f"{model['weights']} weights, {report.kernels['in_use']} kernels, on "
        f"{model['provider']}"
    ]
    if report.kernels["reason"]:
        lines.append(
            f"not with {report.kernels['built_for']} kernels: {report.kernels['reason']}"
        )
    for at in report.contexts:
        lines.append(
            f"context {at.context}: prefill {at.prefill_ms:.1f} ms; greedy {at.greedy_ms:.3f} "
            f"ms a token, {at.greedy_tokens_per_second:.1f} tokens/s"
        )
        for mtp in at.mtp:
            stood = " ".join(f"{a}/{t}" for t, a in mtp.positions)
            lines.append(
                f"  k = {mtp.k}: step {mtp.step_ms:.3f} ms (draft {mtp.draft_ms:.3f}, verify "
                f"{mtp.verify_ms:.3f}, host {mtp.host_ms:.3f}), {mtp.tokens_per_step:.2f} "
                f"tokens a step, {mtp.tokens_per_second:.1f} tokens/s, "
                f"{mtp.over_greedy:.2f}x greedy; accepted by position {stood}"
            )
    lines.append(
        f"memory copies at {report.copy_bytes_per_second / 1e9:,.0f} GB/s; reading weights "
        + ", ".join(
            f"in {name} {report.weight_bytes[name] / 1e9:.2f} GB at {100 * share:.0f} %"
            for name, share in report.bandwidth_share.items()
        )
        + " of it"
    )
    if report.load_seconds is not None:
        lines.append(f"loaded in {report.load_seconds:.1f} s")
    if report.memory is not None:
        lines.append("device memory: " + json.dumps(report.memory))
    return "\n".join(lines + graphs)
