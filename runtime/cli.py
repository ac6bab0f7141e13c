"""``mtp-run``: parse, call, print; nothing else."""

from __future__ import annotations

import click

from artifacts.version import __version__
from runtime.cli_bench import bench_command
from runtime.cli_chat import chat_command
from runtime.cli_check import check_command
from runtime.cli_generate import generate_command
from runtime.cli_serve import serve_command

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mtp-run")
def main() -> None:
    """Decode with multi-token prediction from an artifact that mtp-export made.

    \b
    Examples:
      mtp-run generate qwen-mtp --prompt "def main():"
      mtp-run chat qwen-mtp
      mtp-run serve qwen-mtp
      mtp-run check qwen-mtp
      mtp-run bench qwen-mtp
    """


main.add_command(generate_command)
main.add_command(chat_command)
main.add_command(serve_command)
main.add_command(bench_command)
main.add_command(check_command)
