"""A request body as JSON: its values taken out, each checked where it is taken."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from runtime.errors import RequestError

__all__ = [
    "BodyError",
    "flag",
    "integer",
    "is_one_of",
    "read_object",
    "shown",
    "text",
    "token_ids",
]

MAX_NUMBER = 2**31 - 1
"""Of token ids and counts."""


class BodyError(RequestError):
    """A body does not say what it must."""

    def __init__(
        self, message: str, parameter: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.code = code


def read_object(data: bytes) -> dict[str, Any]:
    """The body's object; raises `BodyError` where it is none."""
    try:
        body = json.loads(data, parse_constant=_no_constant)
    except RecursionError as e:
        raise BodyError("the body is nested too deeply") from e
    except ValueError as e:
        raise BodyError(f"the body is not JSON: {e}") from e
    if not isinstance(body, dict):
        raise BodyError("the body must be a JSON object")
    return body


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Equal and of the same kind: true is not 1, but 0.0 is 0."""
    return any(
        value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed
    )


def shown(value: Any) -> str:
    """A value as an error shows it."""
    written = json.dumps(value)
    return written if len(written) <= 60 else written[:57] + "..."


def text(body: Mapping[str, Any], name: str) -> str | None:
    """A string or None; raises `BodyError`."""
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise BodyError(f"{name!r} is {shown(value)}; it must be a string", name)
    return value


def flag(body: Mapping[str, Any], name: str) -> bool:
    """True or false, the latter where it is missing; raises `BodyError`."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise BodyError(f"{name!r} is {shown(value)}; it must be true or false", name)
    return bool(value)


def integer(body: Mapping[str, Any], name: str, least: int) -> int | None:
    """A whole number from `least` on, or None; raises `BodyError`."""
    value = body.get(name)
    if value is None:
        return None
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not least <= value <= MAX_NUMBER:
        raise BodyError(
            f"{name!r} is {shown(value)}; it must be a whole number from {least} on", name
        )
    return int(value)


def token_ids(values: Any, name: str) -> tuple[int, ...]:
    """A list of token ids; raises `BodyError`."""
    if not isinstance(values, list) or not all(
        isinstance(v, int) and not isinstance(v, bool) and 0 <= v <= MAX_NUMBER for v in values
    ):
        raise BodyError(f"{name!r} must be a list of token ids", name)
    return tuple(values)
