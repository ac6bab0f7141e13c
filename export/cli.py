"""``mtp-export``: parse, call, print; nothing else. One module a group of commands."""

from __future__ import annotations

import click

from artifacts.version import __version__
from export.cli_build import build_command
from export.cli_bundles import inspect_command, repair_command
from export.cli_check import check_command
from export.cli_demo import demo_command
from export.cli_pieces import diff_command, extract_command

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mtp-export")
def main() -> None:
    """Build ONNX artifacts of hybrid language models with multi-token prediction.

    \b
    Examples:
      mtp-export demo
      mtp-export build Qwen3.5-0.8B -o qwen-mtp --k 3
      mtp-export check qwen-mtp
      mtp-export inspect some-bundle
      mtp-export repair some-bundle -o mended
    """


for command in (
    demo_command,
    build_command,
    check_command,
    inspect_command,
    repair_command,
    extract_command,
    diff_command,
):
    main.add_command(command)
