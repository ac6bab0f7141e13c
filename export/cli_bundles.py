"""``mtp-export inspect`` and ``repair``: bundles of other exporters."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from artifacts import ParseError
from export.bundles.describe import inspect_bundle, inspect_node
from export.bundles.render import render, render_node
from export.errors import ExportError
from export.repair import PREFERENCES, FileRepair, repair_bundle

__all__ = ["inspect_command", "repair_command"]

FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command("inspect")
@click.argument("bundle", type=FOLDER)
@click.option("--json", "as_json", is_flag=True, help="Print it as one JSON object.")
@click.option("--node", metavar="NAME", help="Only this node, or the maker of this value.")
def inspect_command(bundle: Path, as_json: bool, node: str | None) -> None:
    """Say what is in the BUNDLE of another exporter, without reading its weights.

    Files that belong together, graphs and their inputs and outputs, types, operators,
    states, how the head hangs on the target. With --node, one node and its neighbours.

    \b
    Examples:
      mtp-export inspect some-bundle
      mtp-export inspect some-bundle --json
      mtp-export inspect some-bundle --node logits
    """
    try:
        if node is not None:
            view = inspect_node(bundle, node)
            click.echo(json.dumps(asdict(view)) if as_json else render_node(view), nl=as_json)
            return
        described = inspect_bundle(bundle)
    except (ExportError, ParseError) as e:
        raise click.ClickException(str(e)) from e
    shown = json.dumps(described.to_json()) if as_json else render(described)
    click.echo(shown, nl=as_json)


@click.command("repair")
@click.argument("bundle", type=FOLDER)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder to write.")
@click.option("--in-place", is_flag=True, help="Replace the files of BUNDLE that change.")
@click.option(
    "--prefer",
    type=click.Choice(sorted(PREFERENCES)),
    help="Type to bring a clash to, and to compute in where kernels are missing.",
)
@click.option(
    "--ep",
    "provider",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Execution provider that the bundle is to run on.",
)
@click.option(
    "--rewrite-data",
    is_flag=True,
    help="Write data files without the bytes that no graph reads; needs -o.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@click.option("--diff", is_flag=True, help="Show changed lines, nodes in ONNX text.")
def repair_command(
    bundle: Path,
    output: Path | None,
    in_place: bool,
    prefer: str | None,
    provider: str,
    rewrite_data: bool,
    dry_run: bool,
    diff: bool,
) -> None:
    """Mend the BUNDLE of another exporter; what comes out is the same kind of bundle.

    Types that do not agree, norms without epsilon, 1 + w added in half precision, quantised
    products that fast kernels pass by, a wrong hidden state for the head, metadata. Data
    files are copied as they are. A second run says "nothing to do".

    \b
    Examples:
      mtp-export repair some-bundle -o mended --prefer fp32
      mtp-export repair some-bundle --in-place --dry-run --diff
    """
    if (output is not None) + in_place != 1 and not (dry_run and output is None):
        raise click.UsageError("name the folder to write with -o, or say --in-place")
    try:
        repairs = repair_bundle(
            bundle,
            bundle if output is None else output,
            prefer=prefer,
            provider=provider,
            dry_run=dry_run,
            rewrite_data=rewrite_data,
        )
    except (ExportError, ParseError) as e:
        raise click.ClickException(str(e)) from e
    except OSError as e:
        raise click.ClickException(f"{e.filename or output} cannot be written: {e}") from e
    for repair in repairs:
        _show(repair, diff=diff)
    if not repairs:
        click.echo("nothing to do")
    elif dry_run:
        click.echo("nothing was written")


def _show(repair: FileRepair, *, diff: bool) -> None:
    click.echo(f"{repair.file}: {'; '.join(repair.done)}")
    if diff:
        for line in repair.difference:
            click.echo(f"  {line}")
