"""A bar on standard error for whatever takes longer than a glance."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from export.build import Progress as Report

__all__ = ["shown_progress"]

PLAIN_SECONDS = 2.0
"""Without a terminal, at most one line in so many seconds."""


@contextmanager
def shown_progress(*, quiet: bool) -> Iterator[Report]:
    """Give a callback ``(what, done, total)`` that shows how far the work is."""
    console = Console(stderr=True)
    if quiet:
        yield lambda what, done, total: None
    elif console.is_terminal:
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        ) as bar:
            task = bar.add_task("starting", total=None)

            def report(what: str, done: int, total: int) -> None:
                bar.update(task, description=what, completed=done, total=total or None)

            yield report
    else:
        yield _plain(console)


def _plain(console: Console) -> Report:
    last = time.monotonic()

    def report(what: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= PLAIN_SECONDS:
            last = now
            share = f" {100 * done // total} %" if total else ""
            console.print(f"{what}{share}", highlight=False)

    return report
