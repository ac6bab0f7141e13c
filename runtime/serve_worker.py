"""The one thread that decodes for a server, and the queue before it.

A decoder holds one sequence, and a captured graph belongs to the thread that captured it. So
one thread opens the decoder, uses it and closes it; requests wait in a bounded queue.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.answer import Answer
from runtime.decode import Decoder
from runtime.errors import RequestError, RunError
from runtime.serve_metrics import Metrics
from runtime.state import Finish
from runtime.stats import Stats
from runtime.tokenizer import Tokenizer

__all__ = ["Done", "Failed", "Job", "Outcome", "QueueFullError", "Worker"]

Outcome = str
"""``completed``, ``cancelled``, ``timeout``, ``refused`` or ``failed``."""


class QueueFullError(RunError):
    """As many requests wait as may."""


@dataclass(frozen=True, slots=True)
class Done:
    """The end of an answer."""

    finish: Finish
    ids: tuple[int, ...]
    stats: Stats


@dataclass(frozen=True, slots=True)
class Failed:
    """Why there is no answer, or no more of it."""

    message: str
    outcome: Outcome


Event = str | Done | Failed
"""What a job's owner is told: pieces of text, then how it ended."""


class _GivenUpError(RunError):
    """The owner left, or the time is over."""


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """One generation."""

    ids: Sequence[int]
    keep_at: int
    max_new_tokens: int
    stop: Sequence[str]
    choices: Mapping[str, Any]
    """For `Decoder.generate`."""
    deadline: float
    """When to give up, by `time.monotonic`."""
    tell: Callable[[Event], None]
    """Called from the worker's thread."""
    arrived: float = field(default_factory=time.monotonic)
    cancelled: threading.Event = field(default_factory=threading.Event)
    """Set by the owner to end it; decoding stops within a step."""

    def check(self) -> None:
        """Raise where there is no use in going on."""
        if self.cancelled.is_set():
            raise _GivenUpError("cancelled")
        if time.monotonic() > self.deadline:
            raise _GivenUpError("timeout")


class Worker:
    """Runs jobs one after the other in a thread of its own."""

    def __init__(
        self,
        open_decoder: Callable[[], Decoder],
        tokenizer: Tokenizer,
        metrics: Metrics,
        *,
        most_waiting: int,
    ) -> None:
        """Make one; `start` sets it going.

        Args:
            open_decoder: Called in the thread.
            tokenizer: Makes text of the tokens.
            metrics: Told of every generation.
            most_waiting: Jobs that may wait, besides the one that is done.
        """
        self._open = open_decoder
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._most = most_waiting
        self._jobs: deque[Job] = deque()
        self._running: Job | None = None
        self._changed = threading.Condition()
        self._ready = threading.Event()
        self._stopping = False
        self._broken: RunError | None = None
        self._thread = threading.Thread(target=self._work, name="decode", daemon=True)

    def start(self) -> None:
        """Open the decoder; raises what that raises of this room."""
        self._thread.start()
        self._ready.wait()
        if self._broken is not None:
            raise self._broken
        if not self.alive:
            raise RunError("the decoding thread ended at once; the log says why")

    def stop(self) -> None:
        """End the running job within a step, fail those that wait, close the decoder."""
        with self._changed:
            self._stopping = True
            if self._running is not None:
                self._running.cancelled.set()
            self._changed.notify()
        self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether jobs are being done."""
        return self._thread.is_alive() and not self._stopping

    @property
    def waiting(self) -> int:
        """Jobs in the queue."""
        return len(self._jobs)

    @property
    def running(self) -> int:
        """Jobs being done: 0 or 1."""
        return int(self._running is not None)

    def submit(self, job: Job) -> None:
        """Queue a job; raises `QueueFullError`, also where none is done any more."""
        with self._changed:
            if not self.alive:
                raise QueueFullError("the server is shutting down. Try another one")
            if len(self._jobs) >= self._most + (self._running is None):
                raise QueueFullError(
                    f"{len(self._jobs)} requests wait already. Try again later"
                )
            self._jobs.append(job)
            self._changed.notify()

    def withdraw(self, job: Job, outcome: Outcome) -> None:
        """End a job that nobody waits for any more; in the queue it is gone at once."""
        with self._changed:
            job.cancelled.set()
            if job in self._jobs:
                self._jobs.remove(job)
                self._metrics.finished(outcome)

    def _work(self) -> None:
        try:
            with self._open() as decoder:
                self._ready.set()
                while (job := self._next()) is not None:
                    self._run(decoder, job)
                    with self._changed:
                        self._running = None
        except RunError as e:
            self._broken = e
        finally:
            self._close()

    def _close(self) -> None:
        with self._changed:
            self._stopping = True
            left, self._running = [self._running, *self._jobs], None
            self._jobs.clear()
        for job in left:
            if job is not None:
                self._end(job, Failed("the server stopped. Try again", "failed"))
        self._ready.set()

    def _next(self) -> Job | None:
        with self._changed:
            while not self._jobs and not self._stopping:
                self._changed.wait()
            if self._stopping:
                return None
            self._running = self._jobs.popleft()
            return self._running

    def _run(self, decoder: Decoder, job: Job) -> None:
        answer = Answer(self._tokenizer, job.stop)
        first: float | None = None
        decoder.stats = Stats()
        try:
            job.check()
            for step in decoder.generate(
                job.ids,
                job.max_new_tokens,
                reuse=True,
                keep_at=job.keep_at,
                before_chunk=job.check,
                **job.choices,
            ):
                first = time.monotonic() - job.arrived if first is None else first
                piece = answer.add(step)
                if piece:
                    job.tell(piece)
                if answer.finish is not None:
                    break
                job.check()
        except _GivenUpError as e:
            end: Done | Failed = Failed(f"the request was given up: {e}", str(e))
        except RequestError as e:
            end = Failed(str(e), "refused")
        except RunError as e:
            end = Failed(str(e), "failed")
        else:
            end = Done(answer.finish or Finish.LENGTH, tuple(answer.ids), decoder.stats)
        self._metrics.generated(decoder.stats, first)
        self._end(job, end)

    def _end(self, job: Job, end: Done | Failed) -> None:
        self._metrics.finished("completed" if isinstance(end, Done) else end.outcome)
        job.tell(end)
