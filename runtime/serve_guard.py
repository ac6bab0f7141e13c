"""Who may come in, and with how much: checks on a request before its body is read."""

from __future__ import annotations

import asyncio
import hmac
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request

from runtime.serve_reply import error_object

__all__ = ["LOCAL_HOSTS", "Access", "Refusal", "check_access", "read_body"]

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
MAX_BODY_BYTES = 4 * 2**20
BODY_SECONDS = 30.0
"""A client that takes longer to send a body keeps a connection for nothing."""


class Refusal(Exception):  # noqa: N818  # not an error of the server
    """An answer other than the one asked for."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        parameter: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers
        self.object: dict[str, Any] = error_object(
            message, kind, parameter=parameter, code=code
        )


@dataclass(frozen=True, slots=True)
class Access:
    """Who may come in."""

    key: str | None
    """What a client must show; None lets everybody in who asks for a local name."""


def check_access(request: Request, access: Access) -> None:
    """Raise `Refusal` unless the client may come in.

    Without a key only requests to a local name are served: a web page that a person on this
    machine looks at could otherwise reach the server by a name of its own (DNS rebinding).
    """
    if access.key is None:
        if _host_name(request.headers.get("host", "")) not in LOCAL_HOSTS:
            raise Refusal(403, "without an API key this server answers to localhost alone")
        return
    scheme, _, shown = request.headers.get("authorization", "").partition(" ")
    same = hmac.compare_digest(shown.strip().encode(), access.key.encode())
    if scheme.lower() != "bearer" or not same:
        raise Refusal(
            401,
            "the API key is missing or wrong. Send it as: Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )


def _host_name(header: str) -> str:
    """Without the port."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].lower()


async def read_body(request: Request) -> bytes:
    """The body of a request; raises `Refusal` where it is no JSON, too large or too slow.

    The content type is asked for because a web page may send other types to any server
    without asking.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal(415, "the body must be sent as Content-Type: application/json")
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                data += part
                if len(data) > MAX_BODY_BYTES:
                    raise Refusal(
                        413,
                        f"the body is over {MAX_BODY_BYTES} bytes. Shorten it",
                        headers={"connection": "close"},
                    )
    except TimeoutError as e:
        raise Refusal(408, f"the body took over {BODY_SECONDS:.0f} seconds") from e
    except ClientDisconnect as e:
        raise Refusal(499, "the client left") from e
    return bytes(data)
