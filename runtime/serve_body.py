"""What a client asks for: request bodies, read and checked.

The bodies are those of OpenAI's API. What this server does not do is refused by name, unless
the value asks for nothing; nothing is dropped silently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from runtime.chat_template import Message
from runtime.errors import RequestError
from runtime.sampling import SamplingOptions
from runtime.serve_fields import (
    BodyError,
    flag,
    integer,
    is_one_of,
    read_object,
    shown,
    text,
    token_ids,
)
from runtime.stop import StopStrings
from runtime.template_options import RESERVED

__all__ = ["COMMON", "Ask", "parse_chat", "parse_completion"]

MAX_MESSAGES = 4096
MAX_OPTIONS = 32
"""Of ``chat_template_kwargs``."""

NOTHING: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
}
"""Parameters that are not supported, with the values (besides null) that ask for nothing."""

SAMPLING = tuple(field.name for field in fields(SamplingOptions))
"""Parameters of sampling; where there is no temperature, the likeliest token is taken."""

IGNORED = frozenset(
    [
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
    ]
)
"""Parameters that change no token here."""

COMMON = frozenset(
    [
        "model",
        "max_tokens",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "k",
        "stream",
        "stream_options",
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request, checked as far as it can be without the artifact."""

    model: str | None
    prompt: str | tuple[int, ...] | None
    """Of a completion."""
    messages: tuple[Message, ...]
    """Of a chat."""
    max_tokens: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    k: int | None
    stream: bool
    include_usage: bool
    template_options: Mapping[str, Any]
    sampling: SamplingOptions | None
    """How tokens are drawn; None for greedily."""


def parse_completion(data: bytes) -> Ask:
    """Read a body of ``/v1/completions``; raises `BodyError`."""
    body = read_object(data)
    _check_names(body, COMMON | {"prompt"})
    return _ask(body, prompt=_prompt(body.get("prompt")), messages=())


def parse_chat(data: bytes) -> Ask:
    """Read a body of ``/v1/chat/completions``; raises `BodyError`."""
    body = read_object(data)
    _check_names(body, COMMON | {"messages", "max_completion_tokens", "chat_template_kwargs"})
    return _ask(body, prompt=None, messages=_messages(body.get("messages")))


def _ask(
    body: dict[str, Any],
    *,
    prompt: str | tuple[int, ...] | None,
    messages: tuple[Message, ...],
) -> Ask:
    newer = integer(body, "max_completion_tokens", 1)
    return Ask(
        model=text(body, "model"),
        prompt=prompt,
        messages=messages,
        max_tokens=integer(body, "max_tokens", 1) if newer is None else newer,
        stop=_stops(body.get("stop")),
        stop_token_ids=token_ids(body.get("stop_token_ids") or [], "stop_token_ids"),
        ignore_eos=flag(body, "ignore_eos"),
        k=integer(body, "k", 0),
        stream=flag(body, "stream"),
        include_usage=_include_usage(body.get("stream_options")),
        template_options=_template_options(body.get("chat_template_kwargs")),
        sampling=sampling_of(body),
    )


def sampling_of(body: Mapping[str, Any]) -> SamplingOptions | None:
    """How a body wants tokens drawn; None for greedily.

    Raises:
        BodyError: A value cannot be.
    """
    given = {name: body[name] for name in SAMPLING if body.get(name) is not None}
    for name, value in given.items():
        try:
            SamplingOptions.parse({name: value})
        except RequestError as e:
            raise BodyError(str(e), name) from e
    options = SamplingOptions.parse({"temperature": 0, **given})
    return None if options.is_greedy else options


def _check_names(body: Mapping[str, Any], known: frozenset[str]) -> None:
    for name, value in body.items():
        if name in known or name in IGNORED or name in SAMPLING:
            continue
        if name not in NOTHING:
            raise BodyError(f"there is no parameter {shown(name)}", name[:100])
        if value is not None and not is_one_of(value, NOTHING[name]):
            raise BodyError(f"{name!r} is not supported: leave it out", name)


def _prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        if value:
            return value
        raise BodyError("'prompt' is empty. Give at least one character", "prompt")
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        raise BodyError(
            f"'prompt' has {len(value)} prompts; this server takes one a request", "prompt"
        )
    if value is None or value == []:
        raise BodyError("'prompt' is missing or empty. Give a text or token ids", "prompt")
    return token_ids(value, "prompt")


def _messages(value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise BodyError("'messages' must be a list of at least one message", "messages")
    if len(value) > MAX_MESSAGES:
        raise BodyError(
            f"'messages' has {len(value)} messages; give at most {MAX_MESSAGES}", "messages"
        )
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(value))


def _message(value: Any, place: str) -> Message:
    if not isinstance(value, dict):
        raise BodyError(f"'{place}' must be an object", place)
    role = value.get("role")
    if role not in ("system", "developer", "user", "assistant"):
        raise BodyError(
            f"'{place}.role' is {shown(role)}; it must be system, developer, user or "
            "assistant",
            f"{place}.role",
        )
    for name, held in value.items():
        if name not in ("role", "content", "name") and held not in (None, [], ""):
            raise BodyError(f"'{place}.{name[:60]}' is not supported: leave it out", place)
    content = _content(value.get("content"), f"{place}.content")
    return {"role": "system" if role == "developer" else role, "content": content}


def _content(value: Any, place: str) -> str:
    """Text, or parts of text that follow each other."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        texts = [
            part["text"]
            for part in value
            if isinstance(part, dict)
            and part.get("type") == "text"
            and isinstance(part.get("text"), str)
        ]
        if len(texts) == len(value):
            return "".join(texts)
    raise BodyError(f"'{place}' must be a text, or a list of parts of the type text", place)


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise BodyError("'stop' must be a string or a list of strings", "stop")
    try:
        StopStrings(stops)
    except RequestError as e:
        raise BodyError(f"'stop': {e}", "stop") from e
    return tuple(stops)


def _include_usage(value: Any) -> bool:
    if value is None:
        return False
    if not isinstance(value, dict) or not value.keys() <= {
        "include_usage",
        "include_obfuscation",
    }:
        raise BodyError("'stream_options' takes 'include_usage' alone", "stream_options")
    return flag(value, "include_usage")


def _template_options(value: Any) -> dict[str, Any]:
    name = "chat_template_kwargs"
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > MAX_OPTIONS:
        raise BodyError(f"{name!r} must be an object of at most {MAX_OPTIONS} values", name)
    for key, held in value.items():
        plain = held is None or isinstance(held, bool | int | float | str)
        if key in RESERVED or not key.isidentifier() or not plain:
            raise BodyError(f"{name!r} cannot set {shown(key)} to {shown(held)}", name)
        if isinstance(held, float) and not math.isfinite(held):
            raise BodyError(f"{name!r} sets {shown(key)} to no number", name)
    return value
