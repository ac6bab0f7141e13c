"""Options of every command that generates: how tokens are drawn and how many are drafted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from runtime.errors import RequestError
from runtime.request import AUTO, Drafts
from runtime.sampling import SamplingOptions

__all__ = ["drafting_options", "sampling_of", "sampling_options"]

Command = TypeVar("Command", bound=Callable[..., Any])

NEED_DRAWS = ("top_k", "top_p", "min_p", "seed")
"""Options that mean nothing where the likeliest token is taken."""


def _drafts(context: click.Context, option: click.Parameter, value: str) -> Drafts:
    if value == AUTO:
        return AUTO
    if value.isascii() and value.isdigit() and len(value) < 4:
        return int(value)
    raise click.BadParameter(f"{value!r} is neither a number of drafts nor {AUTO}")


def drafting_options(command: Command) -> Command:
    """Add ``--k``, ``--no-mtp`` and ``--lookup``."""
    for option in (
        click.option(
            "--lookup",
            is_flag=True,
            help="Draft also from the text so far: what followed the newest tokens earlier.",
        ),
        click.option("--no-mtp", is_flag=True, help="Decode plainly, as with --k 0."),
        click.option(
            "--k",
            callback=_drafts,
            metavar="N|auto",
            default=AUTO,
            show_default=True,
            help="Drafts a step, up to what the artifact is built for. auto: as measured "
            "times and running acceptance make it pay, so never slower than plain decoding.",
        ),
    ):
        command = option(command)
    return command


def sampling_options(command: Command) -> Command:
    """Add the options that `sampling_of` takes."""
    for option in (
        click.option("--seed", type=int, help="The same seed gives the same text."),
        click.option(
            "--frequency-penalty",
            type=float,
            help="Taken off a token's logit for each time that it is in the output.",
        ),
        click.option(
            "--presence-penalty",
            type=float,
            help="Taken off the logits of tokens in the output.",
        ),
        click.option(
            "--repetition-penalty",
            type=float,
            help="Makes tokens of prompt and output less likely where over 1.",
        ),
        click.option(
            "--min-p", type=float, help="Leave out what is less likely than this share."
        ),
        click.option(
            "--top-p", type=float, help="Draw from the likeliest that add up to this."
        ),
        click.option(
            "--top-k",
            type=int,
            help="Draw from so many likeliest tokens. 256 at most, and 256 in any case: "
            "what is less likely is never drawn.",
        ),
        click.option(
            "--temperature",
            type=float,
            default=0.0,
            show_default=True,
            help="Over 0: draw tokens, from logits divided by this. 0: take the likeliest.",
        ),
    ):
        command = option(command)
    return command


def sampling_of(given: dict[str, Any]) -> SamplingOptions | None:
    """How tokens are drawn by the options of `sampling_options`; None for greedily.

    Raises:
        RequestError: One of them cannot be, or means nothing at temperature 0.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    options = SamplingOptions.parse(chosen)
    vain = [name for name in NEED_DRAWS if name in chosen and options.temperature == 0]
    if vain:
        raise RequestError(
            f"--{vain[0].replace('_', '-')} draws nothing at temperature 0. Give a "
            "--temperature over 0 with it"
        )
    return None if options.is_greedy else options
