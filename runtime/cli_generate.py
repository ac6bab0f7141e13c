"""``mtp-run generate``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import click
from rich.console import Console

from runtime.decode import Decoder
from runtime.edge import FOLDER, INTERRUPTED, THREADS, errors_at_the_edge, spinner
from runtime.errors import RequestError
from runtime.load import load
from runtime.prompt import parse_ids, prompt_text
from runtime.report import figures, generation_json, print_figures
from runtime.request import drafts_of
from runtime.state import Finish, Step
from runtime.tokenizer import TextStream, Tokenizer

__all__ = ["generate_command"]


@click.command("generate")
@click.argument("folder", type=FOLDER)
@click.option("--prompt", help="Text to continue.")
@click.option(
    "--prompt-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="UTF-8 file to continue.",
)
@click.option("--ids", help="Token ids to continue, as in 1,2,3; needs no tokenizer.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option(
    "--k", type=click.IntRange(min=0), help="Drafts a step. Default: what the artifact has."
)
@click.option("--no-mtp", is_flag=True, help="Decode plainly, as with --k 0.")
@click.option("--ignore-eos", is_flag=True, help="Go on after an end-of-text token.")
@click.option("--threads", type=THREADS, default=0, help="Threads of a graph; 0: every core.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, nothing else.")
@click.pass_context
def generate_command(
    context: click.Context,
    folder: Path,
    prompt: str | None,
    prompt_file: Path | None,
    ids: str | None,
    max_new_tokens: int,
    k: int | None,
    no_mtp: bool,
    ignore_eos: bool,
    threads: int,
    as_json: bool,
) -> None:
    """Continue a prompt with the artifact in FOLDER, greedily.

    The prompt comes from one of the options, or from standard input. The text goes to
    standard output as it is made, figures go to standard error.

    \b
    Examples:
      mtp-run generate qwen-mtp --prompt "def main():"
      git diff | mtp-run generate qwen-mtp --max-new-tokens 64
      mtp-run generate qwen-mtp --ids 1,2,3 --no-mtp --json
    """
    with errors_at_the_edge(context):
        if sum(source is not None for source in (prompt, prompt_file, ids)) > 1:
            raise RequestError("--prompt, --prompt-file and --ids: give one of them")
        if no_mtp and k:
            raise RequestError(f"--no-mtp and --k {k} contradict each other: give one of them")
        chosen = None if ids is None else parse_ids(ids)
        text = "" if ids is not None else prompt_text(prompt, prompt_file, _standard_input())
        with spinner(quiet=as_json) as progress:
            loaded = load(folder, threads=threads, progress=progress)
            tokenizer = Tokenizer.of(folder, loaded.manifest)
        with Decoder(loaded) as decoder:
            drafts = drafts_of(loaded.manifest, 0 if no_mtp else k)
            steps = decoder.generate(
                _encoded(text, tokenizer) if chosen is None else chosen,
                max_new_tokens,
                k=drafts,
                stop_ids=() if ignore_eos else None,
            )
            emitted, finish = _emit(steps, tokenizer, quiet=as_json)
            if as_json:
                whole = None if tokenizer is None else tokenizer.decode(emitted)
                values = generation_json(
                    decoder, k=drafts, ids=emitted, text=whole, finish=finish
                )
                click.echo(json.dumps(values))
            else:
                print_figures(figures(decoder, drafts, finish), Console(stderr=True))
    if finish is None:
        context.exit(INTERRUPTED)


def _standard_input() -> BinaryIO | None:
    """Where it is a file or a pipe; a person is not waited for."""
    return None if sys.stdin is None or sys.stdin.isatty() else sys.stdin.buffer


def _encoded(text: str, tokenizer: Tokenizer | None) -> Sequence[int]:
    if tokenizer is None:
        raise RequestError("this artifact has no tokenizer. Give token ids: --ids 1,2,3")
    return tokenizer.encode(text)


def _emit(
    steps: Iterator[Step], tokenizer: Tokenizer | None, *, quiet: bool
) -> tuple[list[int], Finish | None]:
    """Write what is generated as it comes; returns it and why it ended, None for Ctrl-C."""
    stream = None if tokenizer is None else TextStream(tokenizer)
    emitted: list[int] = []
    finish = None

    def write(piece: str) -> None:
        if piece and not quiet:
            click.echo(piece, nl=False)

    try:
        with spinner(quiet=quiet) as progress:
            progress("reading the prompt")
            first = next(steps)
        for step in chain((first,), steps):
            emitted += step.tokens
            finish = step.finish
            write(_shown(step, stream))
    except KeyboardInterrupt:
        finish = None
    write("" if stream is None else stream.finish())
    write("\n")
    return emitted, finish


def _shown(step: Step, stream: TextStream | None) -> str:
    if stream is not None:
        return stream.add(step.tokens)
    return "".join(f"{token} " for token in step.tokens)
