"""``mtp-run check``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from artifacts import Finding, Severity
from artifacts.manifest import MANIFEST
from runtime.check import check_run
from runtime.edge import FOLDER, THREADS, errors_at_the_edge, spinner

__all__ = ["check_command"]


@click.command("check")
@click.argument("folder", type=FOLDER)
@click.option("--threads", type=THREADS, default=0, help="Threads of a graph; 0: every core.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as one JSON object.")
@click.pass_context
def check_command(context: click.Context, folder: Path, threads: int, as_json: bool) -> None:
    """Check the artifact in FOLDER by running it.

    It loads; every number is finite; verify equals decode at every accepted count with
    poisoned padding; drafting changes no token. Exit code 0: fine, notes at most; 1:
    findings; 2: no artifact at all.

    \b
    Examples:
      mtp-run check qwen-mtp
      mtp-run check qwen-mtp --json
    """
    with errors_at_the_edge(context), spinner(quiet=as_json) as progress:
        findings = check_run(folder, threads=threads, progress=progress)
    _print(findings, as_json=as_json)
    if not (folder / MANIFEST).is_file():
        context.exit(2)
    context.exit(1 if any(f.severity is not Severity.NOTE for f in findings) else 0)


def _print(findings: list[Finding], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"findings": [finding.to_json() for finding in findings]}))
        return
    for finding in findings:
        click.echo(
            f"{finding.severity} {finding.code}  {finding.place}\n    {finding.message}"
        )
        if finding.severity is not Severity.NOTE:
            click.echo(f"    {finding.remedy}")
    weighing = sum(finding.severity is not Severity.NOTE for finding in findings)
    click.echo(
        f"{weighing} finding{'s' * (weighing > 1)}" if weighing else "it runs, and rightly"
    )
