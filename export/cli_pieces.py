"""``mtp-export extract`` and ``diff``: pieces and differences of graphs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from artifacts import ParseError
from export.differ import Difference, differences
from export.errors import BundleError, ExportError

__all__ = ["diff_command", "extract_command"]

FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
ANY = click.Path(exists=True, path_type=Path)
SHOWN = 160
"""Characters of one side of a difference."""


@click.command("extract")
@click.argument("bundle", type=FOLDER)
@click.option(
    "--from", "starts", multiple=True, required=True, metavar="TENSOR", help="Repeatable."
)
@click.option(
    "--to", "ends", multiple=True, required=True, metavar="TENSOR", help="Repeatable."
)
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print what was cut as JSON.")
def extract_command(
    bundle: Path, starts: tuple[str, ...], ends: tuple[str, ...], output: Path, as_json: bool
) -> None:
    """Cut a runnable piece out of a graph of BUNDLE, with its weights and sample inputs.

    What leads from one value to the other, for a bug report: model.onnx, model.onnx.data and
    inputs.npz, which ONNX Runtime can be given as they are.

    \b
    Examples:
      mtp-export extract some-bundle --from fc_out --to mtp_hidden -o piece
      mtp-export extract some-bundle --from input_ids --to logits -o whole
    """
    from export.extract import extract  # onnx-graphsurgeon is slow to load

    try:
        piece = extract(bundle, starts, ends, output)
    except (ExportError, ParseError) as e:
        raise click.ClickException(str(e)) from e
    except OSError as e:
        raise click.ClickException(f"{e.filename or output} cannot be written: {e}") from e
    if as_json:
        click.echo(json.dumps(asdict(piece) | {"output": str(output)}))
        return
    click.echo(
        f"{output}: {piece.nodes} nodes of the {piece.role}, inputs "
        f"{', '.join(piece.inputs)}, outputs {', '.join(piece.outputs)}, "
        f"{piece.weight_bytes} bytes of weights"
    )


@click.command("diff")
@click.argument("one", metavar="A", type=ANY)
@click.argument("other", metavar="B", type=ANY)
@click.option("--json", "as_json", is_flag=True, help="Print the differences as JSON.")
@click.pass_context
def diff_command(context: click.Context, one: Path, other: Path, as_json: bool) -> None:
    """Say what differs between two graphs or bundles A and B.

    Nodes, attributes, types and shapes by name, weights by digest. Exit code 0: the same; 1:
    they differ; 2: one cannot be read.

    \b
    Examples:
      mtp-export diff some-bundle mended
      mtp-export diff old/model.onnx new/model.onnx --json
    """
    try:
        found = list(differences(one, other))
    except (BundleError, ParseError, OSError, ValueError) as e:
        click.echo(f"Error: {e}", err=True)
        context.exit(2)
    if as_json:
        click.echo(json.dumps({"differences": [asdict(d) for d in found]}))
    else:
        for difference in found:
            _show(difference)
        click.echo(f"{len(found)} differences" if found else "the same")
    context.exit(1 if found else 0)


def _show(difference: Difference) -> None:
    click.echo(f"{difference.graph} {difference.kind} {difference.name}")
    for sign, text in (("-", difference.before), ("+", difference.after)):
        if text is not None:
            click.echo(f"  {sign} {text if len(text) <= SHOWN else text[:SHOWN] + '...'}")
