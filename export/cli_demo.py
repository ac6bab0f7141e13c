"""``mtp-export demo``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from artifacts import ParseError
from export.cli_build import MAX_K
from export.errors import ExportError
from export.progress import shown_progress

__all__ = ["demo_command"]


@click.command("demo")
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
