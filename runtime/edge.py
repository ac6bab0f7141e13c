"""Where errors become messages and exit codes, and where progress is shown.

0     done
1     it failed, or a check found something
2     misuse: options, a prompt or a number that the artifact cannot take
130   interrupted
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console

from artifacts import ParseError
from runtime.errors import RequestError, RunError

__all__ = ["FOLDER", "INTERRUPTED", "THREADS", "errors_at_the_edge", "spinner"]

FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
THREADS = click.IntRange(0, 1024)
INTERRUPTED = 130
"""What a shell reports of a program that Ctrl-C ended: 128 + SIGINT."""


@contextmanager
def errors_at_the_edge(context: click.Context) -> Iterator[None]:
    """Turn errors of the room into click's, and an interrupt into exit code 130."""
    try:
        yield
    except RequestError as e:
        raise click.UsageError(str(e), context) from e
    except (ParseError, RunError) as e:
        raise click.ClickException(str(e)) from e
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        context.exit(INTERRUPTED)


@contextmanager
def spinner(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Give a callback that says what is being done; shown on a terminal alone."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda _: None
        return
    with console.status("starting") as status:
        yield lambda what: status.update(what)
