"""``mtp-run generate``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import click
from rich.console import Console

from runtime.answer import Answer
from runtime.cli_sampling import drafting_options, sampling_of, sampling_options
from runtime.decode import Decoder
from runtime.edge import FOLDER, INTERRUPTED, THREADS, errors_at_the_edge, spinner
from runtime.errors import RequestError
from runtime.load import load
from runtime.logprobs import MAX_TOP, TokenLogprob
from runtime.prompt import parse_ids, prompt_text
from runtime.report import figures, generation_json, print_figures
from runtime.request import AUTO, Drafts, drafts_of
from runtime.state import Finish, Step
from runtime.tokenizer import Tokenizer

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
@drafting_options
@sampling_options
@click.option(
    "--logprobs",
    type=click.IntRange(0, MAX_TOP),
    help="With --json: each token's log probability and so many likeliest ones. They are "
    "the target's own, before temperature, penalties and limits.",
)
@click.option("--stop", multiple=True, help="End before this text. Repeatable.")
@click.option("--stop-id", type=int, multiple=True, help="End at this token. Repeatable.")
@click.option("--ignore-eos", is_flag=True, help="Go on after an end-of-text token.")
@click.option("--threads", type=THREADS, default=0, help="Threads of a graph; 0: every core.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, nothing else.")
@click.pass_context
def generate_command(
    context: click.Context,
    /,
    folder: Path,
    prompt: str | None,
    prompt_file: Path | None,
    ids: str | None,
    max_new_tokens: int,
    k: Drafts,
    no_mtp: bool,
    lookup: bool,
    logprobs: int | None,
    stop: tuple[str, ...],
    stop_id: tuple[int, ...],
    ignore_eos: bool,
    threads: int,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Continue a prompt with the artifact in FOLDER.

    Greedily, or with --temperature by drawing tokens: from the 256 likeliest at each place,
    never from the rest. Either way drafts change how fast the text comes, not the text.

    The prompt comes from one of the options, or from standard input. The text goes to
    standard output as it is made, figures go to standard error.

    \b
    Examples:
      mtp-run generate qwen-mtp --prompt "def main():"
      git diff | mtp-run generate qwen-mtp --max-new-tokens 64
      mtp-run generate qwen-mtp --prompt "Q: why? A:" --stop "Q:"
      mtp-run generate qwen-mtp --ids 1,2,3 --no-mtp --json
      mtp-run generate qwen-mtp --prompt "Once" --temperature 0.8 --top-p 0.95 --seed 7
    """
    with errors_at_the_edge(context):
        if sum(source is not None for source in (prompt, prompt_file, ids)) > 1:
            raise RequestError("--prompt, --prompt-file and --ids: give one of them")
        if no_mtp and (lookup or k not in (0, AUTO)):
            other = "--lookup" if lookup else f"--k {k}"
            raise RequestError(f"--no-mtp and {other} contradict each other: give one of them")
        if logprobs is not None and not as_json:
            raise RequestError("--logprobs are printed as JSON alone. Give --json with it")
        draws = sampling_of(sampling)
        chosen = None if ids is None else parse_ids(ids)
        text = "" if ids is not None else prompt_text(prompt, prompt_file, _standard_input())
        with spinner(quiet=as_json) as progress:
            loaded = load(folder, threads=threads, progress=progress)
            tokenizer = Tokenizer.of(folder, loaded.manifest)
        with Decoder(loaded) as decoder:
            answer = None if tokenizer is None else Answer(tokenizer, stop)
            if stop and answer is None:
                raise RequestError("--stop needs a tokenizer; this artifact has none")
            k = 0 if no_mtp else k
            drafts = drafts_of(loaded.manifest, k)
            steps = decoder.generate(
                _encoded(text, tokenizer) if chosen is None else chosen,
                max_new_tokens,
                k=k,
                lookup=lookup,
                stop_ids=(*(() if ignore_eos else loaded.manifest.eos_token_ids), *stop_id),
                sampling=draws,
                logprobs=logprobs,
            )
            made: list[TokenLogprob] = []
            emitted, finish = _emit(_noted(steps, made), answer, quiet=as_json)
            if as_json:
                whole = None if answer is None else answer.text
                values = generation_json(
                    decoder, k=drafts, ids=emitted, text=whole, finish=finish
                )
                if logprobs is not None:
                    values["logprobs"] = [token.to_json() for token in made]
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


def _noted(steps: Iterator[Step], made: list[TokenLogprob]) -> Iterator[Step]:
    """The same steps; their log probabilities are added to `made`."""
    for step in steps:
        made += step.logprobs
        yield step


def _emit(
    steps: Iterator[Step], answer: Answer | None, *, quiet: bool
) -> tuple[list[int], Finish | None]:
    """Write what is generated as it comes; returns it and why it ended, None for Ctrl-C."""
    emitted: list[int] = [] if answer is None else answer.ids
    finish = None

    def write(piece: str) -> None:
        if piece and not quiet:
            click.echo(piece, nl=False)

    try:
        with spinner(quiet=quiet) as progress:
            progress("reading the prompt")
            first = next(steps)
        for step in chain((first,), steps):
            if answer is None:
                emitted += step.tokens
                finish = step.finish
                write("".join(f"{token} " for token in step.tokens))
                continue
            write(answer.add(step))
            finish = answer.finish
            if finish is not None:
                break
    except KeyboardInterrupt:
        finish = None
    write("\n")
    return emitted, finish
