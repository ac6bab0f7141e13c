"""How one request becomes an answer: checked, queued, waited for, streamed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from runtime.serve_body import Ask
from runtime.serve_fields import BodyError
from runtime.serve_guard import Access, Refusal, check_access, read_body
from runtime.serve_metrics import Metrics
from runtime.serve_model import ServedModel
from runtime.serve_reply import Reply, error_object, event
from runtime.serve_worker import Done, Event, Failed, Job, QueueFullError, Worker

__all__ = ["JsonReply", "Service", "answer", "check_model"]

RETRY_SECONDS = 1
"""What a client that finds the queue full is told to wait."""
SLACK = 5.0
"""Seconds beyond a request's time in which the decoding thread should have said so itself."""

STATUS = {"refused": 400, "timeout": 504, "failed": 500, "cancelled": 503}
"""By how a job ended."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Service:
    """What the routes need."""

    model: ServedModel
    worker: Worker
    metrics: Metrics
    access: Access
    timeout: float
    """Seconds for a request, waiting included."""


class JsonReply(JSONResponse):
    """JSON in ASCII, so that what a client sent can always be shown to it again."""

    def render(self, content: Any) -> bytes:
        """As bytes."""
        return json.dumps(content, allow_nan=False).encode()


class _Left(Exception):  # noqa: N818  # no error: nobody is there to be told one
    """The client left."""


class _Ticket:
    """A job and what its thread tells of it, seen from the event loop."""

    def __init__(self, service: Service, receive: Receive) -> None:
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._gone = asyncio.create_task(_disconnected(receive))
        self._job: Job | None = None
        self._ended = False

    def tell(self, event: Event) -> None:
        """Called from the decoding thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    def submit(self, job: Job) -> None:
        """Queue the job; raises `Refusal` where there is no room."""
        try:
            self._service.worker.submit(job)
        except QueueFullError as e:
            self._service.metrics.finished("queue_full")
            stopping = not self._service.worker.alive
            raise Refusal(
                503 if stopping else 429,
                str(e),
                kind="server_error" if stopping else "rate_limit_error",
                headers={"retry-after": str(RETRY_SECONDS)},
            ) from e
        self._job = job

    async def next(self) -> Event:
        """What comes next; raises `_Left` when the client left."""
        assert self._job is not None
        coming = asyncio.create_task(self._events.get())
        left = self._job.deadline - time.monotonic() + SLACK
        await asyncio.wait(
            {coming, self._gone}, timeout=left, return_when=asyncio.FIRST_COMPLETED
        )
        if coming.done():
            event = coming.result()
            self._ended = isinstance(event, Done | Failed)
            return event
        coming.cancel()
        if self._gone.done():
            raise _Left
        self.close("timeout")
        return Failed("the request was given up: timeout", "timeout")

    def close(self, outcome: str = "cancelled") -> None:
        """Let go of it, and of the job if that goes on."""
        self._gone.cancel()
        if self._job is not None and not self._ended:
            self._service.worker.withdraw(self._job, outcome)
            self._ended = True


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Stream(Response):
    """Server-sent events of one answer."""

    def __init__(self, ticket: _Ticket, reply: Reply, first: Event, ask: Ask) -> None:
        super().__init__(media_type="text/event-stream")
        self.headers["cache-control"] = "no-cache"
        del self.headers["content-length"]
        self._ticket, self._reply, self._first, self._ask = ticket, reply, first, ask

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            await send(start)
            async for part in self._parts():
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except (_Left, OSError):
            pass
        finally:
            self._ticket.close()

    async def _parts(self) -> AsyncIterator[bytes]:
        for chunk in self._reply.opening():
            yield event(chunk)
        told = self._first
        while isinstance(told, str):
            yield event(self._reply.piece(told))
            told = await self._ticket.next()
        if isinstance(told, Done):
            for chunk in self._reply.closing(told, include_usage=self._ask.include_usage):
                yield event(chunk)
        else:
            yield event(error_object(told.message, "server_error", code=told.outcome))
        yield event("[DONE]")


async def answer(
    service: Service,
    request: Request,
    parse: Callable[[bytes], Ask],
    kind: type[Reply],
) -> Response:
    """Serve a request for tokens.

    Args:
        service: What there is.
        request: Its body is not read yet.
        parse: Reads the body.
        kind: Objects of the answer.

    Raises:
        Refusal: There is no answer.
    """
    try:
        check_access(request, service.access)
        data = await read_body(request)
        ask = await asyncio.to_thread(_refusing, parse, data)
        check_model(service, ask.model)
    except Refusal:
        service.metrics.finished("refused")
        raise
    ticket = _Ticket(service, request.receive)
    keep = False
    try:
        job = await asyncio.to_thread(
            _refusing, service.model.job, ask, timeout=service.timeout, tell=ticket.tell
        )
        ticket.submit(job)
        told = await ticket.next()
        reply = kind(service.model.name)
        if ask.stream and not isinstance(told, Failed):
            keep = True  # the stream closes it
            return _Stream(ticket, reply, told, ask)
        text = ""
        while isinstance(told, str):
            text += told
            told = await ticket.next()
        if isinstance(told, Failed):
            raise _failure(told)
        return JsonReply(reply.whole(text, told))
    except _Left:
        return Response(status_code=499)
    finally:
        if not keep:
            ticket.close()


def _refusing(call: Callable[..., T], *given: Any, **named: Any) -> T:
    try:
        return call(*given, **named)
    except BodyError as e:
        raise Refusal(400, str(e), parameter=e.parameter, code=e.code) from e


def _failure(failed: Failed) -> Refusal:
    status = STATUS[failed.outcome]
    kind = "invalid_request_error" if status == 400 else "server_error"
    return Refusal(status, failed.message, kind=kind, code=failed.outcome)


def check_model(service: Service, name: str | None) -> None:
    """Raise `Refusal` where a client asks for another model."""
    if name is not None and name != service.model.name:
        raise Refusal(
            404,
            f"there is no model {name[:100]!r}, only {service.model.name!r}",
            parameter="model",
            code="model_not_found",
        )
