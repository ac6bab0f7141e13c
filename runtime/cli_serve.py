"""``mtp-run serve``."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import click

from runtime.edge import FOLDER, THREADS, errors_at_the_edge
from runtime.errors import LoadError, RequestError

__all__ = ["serve_command"]

KEY_VARIABLE = "MTP_RUN_API_KEY"
LEAST_KEY = 16
"""Characters; a shorter key can be guessed."""
MAX_KEY = 4096


@click.command("serve")
@click.argument("folder", type=FOLDER)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True)
@click.option("--name", help="Of the model. Default: the folder's.")
@click.option(
    "--api-key-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help=f"File with the key that clients must send. Default: ${KEY_VARIABLE}, if set.",
)
@click.option(
    "--queue",
    type=click.IntRange(0, 10_000),
    default=32,
    show_default=True,
    help="Requests that may wait.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds for a request, waiting included.",
)
@click.option(
    "--grace",
    type=click.IntRange(0, 3600),
    default=10,
    show_default=True,
    help="Seconds that requests get to finish when the server is told to stop.",
)
@click.option("--threads", type=THREADS, default=0, help="Threads of a graph; 0: every core.")
@click.pass_context
def serve_command(
    context: click.Context,
    folder: Path,
    host: str,
    port: int,
    name: str | None,
    api_key_file: Path | None,
    queue: int,
    timeout: float,
    grace: int,
    threads: int,
) -> None:
    """Serve the artifact in FOLDER over HTTP, as OpenAI's API does.

    /v1/completions, /v1/chat/completions (both also as a stream), /v1/models, /health,
    /metrics. One request is decoded at a time, others wait; one that begins with the tokens of
    the last goes on from its state. Beyond this machine a key is needed.

    \b
    Examples:
      mtp-run serve qwen-mtp
      mtp-run serve qwen-mtp --host 0.0.0.0 --api-key-file key.txt
    """
    with errors_at_the_edge(context):
        key = _key(api_key_file)
        try:
            from runtime.serve import LOCAL_HOSTS, Serving, run_server
        except ImportError as e:
            raise LoadError(
                f"serving needs a package that is not installed ({e.name}). Install: "
                'pip install "onnx-mtp[serve]"'
            ) from e
        if key is None and host not in LOCAL_HOSTS:
            raise RequestError(
                f"--host {host} opens the server to other machines, so it needs a key: "
                f"--api-key-file FILE or ${KEY_VARIABLE}"
            )
        with _listen(host, port) as listening:
            run_server(
                Serving(
                    folder=folder,
                    name=name,
                    key=key,
                    most_waiting=queue,
                    timeout=timeout,
                    grace=grace,
                    threads=threads,
                ),
                listening,
                lambda line: click.echo(line, err=True),
            )


def _key(file: Path | None) -> str | None:
    """The key that clients must send; raises `RequestError` for one that protects nothing."""
    if file is None:
        key, source = os.environ.get(KEY_VARIABLE), f"${KEY_VARIABLE}"
        if key is None:
            return None
    else:
        source = f"--api-key-file {file}"
        try:
            with file.open("rb") as opened:
                key = opened.read(MAX_KEY + 1).decode().strip()
        except (OSError, UnicodeDecodeError) as e:
            raise RequestError(f"{source} cannot be read: {e}") from e
    if not LEAST_KEY <= len(key) <= MAX_KEY or not key.isascii() or not key.isprintable():
        raise RequestError(
            f"{source} must hold one key of {LEAST_KEY} to {MAX_KEY} printable ASCII "
            "characters"
        )
    return key


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
        except OSError:
            listening.close()
            raise
    except OSError as e:
        raise RequestError(
            f"cannot listen at {host} port {port}: {e.strerror or e}. Choose another "
            "--port or --host"
        ) from e
    return listening
