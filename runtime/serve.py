"""A server's life: load, listen, serve, stop in order."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from runtime.serve_answer import Service
from runtime.serve_app import make_app
from runtime.serve_guard import LOCAL_HOSTS, Access
from runtime.serve_metrics import Metrics
from runtime.serve_model import ServedModel
from runtime.serve_worker import Worker

__all__ = ["LOCAL_HOSTS", "Serving", "run_server", "server"]

MOST_CONNECTIONS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What to serve and how."""

    folder: Path
    name: str | None = None
    """Of the model; the folder's where None."""
    key: str | None = None
    """What clients must send; None for no key."""
    most_waiting: int = 32
    timeout: float = 600.0
    """Seconds for a request, waiting included."""
    grace: int = 10
    """Seconds that requests get to finish at the end."""
    threads: int = 0
    """Threads of a graph on the CPU; 0: every core."""


def server(serving: Serving) -> tuple[uvicorn.Server, Worker]:
    """A server that is ready to run, and its started decoding thread.

    Raises:
        LoadError: The artifact does not load.
        ParseError: Its manifest does not say what it must.
    """
    model = ServedModel.of(serving.folder, serving.name)
    metrics = Metrics()
    worker = Worker(
        lambda: model.open_decoder(serving.threads),
        model.tokenizer,
        metrics,
        most_waiting=serving.most_waiting,
    )
    service = Service(model, worker, metrics, Access(serving.key), serving.timeout)
    app = make_app(service)
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=serving.grace,
    )
    worker.start()
    return uvicorn.Server(config), worker


def run_server(
    serving: Serving, listening: socket.socket, tell: Callable[[str], None]
) -> None:
    """Serve until a signal ends it; requests under way get time to finish.

    Args:
        serving: What and how.
        listening: Bound; not yet listening.
        tell: Told where the server is.

    Raises:
        LoadError: The artifact does not load.
        ParseError: Its manifest does not say what it must.
    """
    made, worker = server(serving)
    listening.listen()  # from now on a client is not refused, at most made to wait
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    tell(f"serving {serving.folder.name} at http://{shown}:{port}/v1; Ctrl-C stops")
    try:
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again when done
            made.run(sockets=[listening])
    finally:
        worker.stop()
