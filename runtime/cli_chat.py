"""``mtp-run chat``."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from runtime.chat_template import ChatTemplate
from runtime.cli_sampling import sampling_of, sampling_options
from runtime.conversation import Conversation
from runtime.decode import Decoder
from runtime.edge import FOLDER, THREADS, errors_at_the_edge, spinner
from runtime.errors import RequestError
from runtime.load import load
from runtime.report import figures, print_figures, turn_json
from runtime.request import drafts_of
from runtime.sampling import check_samples
from runtime.template_options import parse_options
from runtime.tokenizer import Tokenizer

__all__ = ["chat_command"]

HELP = "/reset forgets the conversation, /stats shows figures, /exit or Ctrl-D leaves"
PROMPT = "> "
MAX_LINE = 2**24
"""Bytes; a longer line of a pipe is taken in parts."""
EXIT, RESET, STATS = "/exit", "/reset", "/stats"


@click.command("chat")
@click.argument("folder", type=FOLDER)
@click.option("--system", help="Message that stands before all turns.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=1024, show_default=True)
@click.option(
    "--k", type=click.IntRange(min=0), help="Drafts a step. Default: what the artifact has."
)
@sampling_options
@click.option("--stop", multiple=True, help="End an answer before this text. Repeatable.")
@click.option(
    "--template-option",
    "options",
    multiple=True,
    metavar="NAME=VALUE",
    help="Variable for the chat template, such as enable_thinking=false. Repeatable.",
)
@click.option("--threads", type=THREADS, default=0, help="Threads of a graph; 0: every core.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a turn.")
@click.pass_context
def chat_command(
    context: click.Context,
    /,
    folder: Path,
    system: str | None,
    max_new_tokens: int,
    k: int | None,
    stop: tuple[str, ...],
    options: tuple[str, ...],
    threads: int,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Talk with the artifact in FOLDER, by its own chat template.

    One line is one turn. Only what is new is prefilled; where the template rewrites earlier
    turns, what follows the change is prefilled again. Ctrl-C ends an answer. In the input,
    /reset forgets the conversation, /stats shows figures, /exit leaves. With --json a line
    may also be a JSON string, which can hold line breaks.

    \b
    Examples:
      mtp-run chat qwen-mtp --system "Answer in one sentence."
      echo "What is a monad?" | mtp-run chat qwen-mtp --json
    """
    with errors_at_the_edge(context):
        variables, draws = parse_options(options), sampling_of(sampling)
        with spinner(quiet=as_json) as progress:
            loaded = load(folder, threads=threads, progress=progress)
            tokenizer = Tokenizer.of(folder, loaded.manifest)
            template = ChatTemplate.of(folder, loaded.manifest)
        with Decoder(loaded) as decoder:
            if tokenizer is None or template is None:
                missing = "tokenizer" if tokenizer is None else "chat template"
                raise RequestError(
                    f"this artifact has no {missing}. Continue plain prompts: mtp-run generate"
                )
            if draws is not None:
                check_samples(loaded.manifest)
            conversation = Conversation(
                decoder, tokenizer, template, system=system, options=variables
            )
            choices = {"k": drafts_of(loaded.manifest, k), "stop": stop, "sampling": draws}
            _talk(decoder, conversation, max_new_tokens, choices, as_json=as_json)


def _talk(
    decoder: Decoder,
    conversation: Conversation,
    most: int,
    choices: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    """Take turns until the input ends."""
    for line in _lines(as_json=as_json):
        if line.strip() == EXIT:
            return
        if line.strip() == RESET:
            conversation.reset()
        elif line.strip() == STATS:
            rows = figures(decoder, choices["k"], conversation.answer.finish)
            print_figures(rows, Console(stderr=True))
        elif line.strip():
            try:
                _turn(decoder, conversation, line, most, choices, as_json=as_json)
            except RequestError as e:
                _refuse(e, as_json=as_json)


def _turn(
    decoder: Decoder,
    conversation: Conversation,
    line: str,
    most: int,
    choices: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    pieces = conversation.ask(line, most, **choices)
    try:
        for piece in pieces:
            if not as_json:
                click.echo(piece, nl=False)
    except KeyboardInterrupt:  # ends the answer, not the conversation
        pieces.close()
    click.echo(
        json.dumps(turn_json(decoder, conversation.answer, k=choices["k"])) if as_json else ""
    )


def _refuse(error: RequestError, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"error": str(error)}))
    else:
        click.echo(f"{error}. {RESET} starts anew", err=True)


def _lines(*, as_json: bool) -> Iterator[str]:
    """What is typed, or the lines of a file or pipe."""
    if sys.stdin is not None and sys.stdin.isatty() and not as_json:
        click.echo(HELP, err=True)
        yield from _typed()
        return
    stream = io.BytesIO() if sys.stdin is None else sys.stdin.buffer
    number = 0
    while data := stream.readline(MAX_LINE):
        number += 1
        try:
            line = data.decode().rstrip("\r\n")
        except UnicodeDecodeError as e:
            raise RequestError(
                f"line {number} of standard input is not UTF-8 at byte {e.start}. Convert it "
                "first"
            ) from e
        yield _unquoted(line) if as_json else line


def _typed() -> Iterator[str]:
    """Lines from a person, with editing where the machine has it."""
    while True:
        try:
            yield input(PROMPT)
        except EOFError:
            click.echo(err=True)
            return
        except KeyboardInterrupt:  # drops the line, as in a shell
            click.echo(err=True)


def _unquoted(line: str) -> str:
    if line.startswith('"'):
        try:
            value = json.loads(line)
        except ValueError:
            return line
        if isinstance(value, str):
            return value
    return line
