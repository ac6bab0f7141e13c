"""What a client asks for: request bodies, read and checked.

The bodies are those of OpenAI's API. What this server does not do is refused by name, unless
the value asks for nothing; nothing is dropped silently.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime.chat_template import Message
from runtime.errors import RequestError
from runtime.stop import StopStrings
from runtime.template_options import RESERVED

__all__ = ["Ask", "BodyError", "parse_chat", "parse_completion"]

MAX_TOKENS = 2**31 - 1
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

GREEDY: dict[str, tuple[Any, ...]] = {
    "temperature": (0,),
    "top_p": (1,),
    "top_k": (0, -1, 1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
}
"""Parameters of sampling, with the values that leave decoding greedy."""

IGNORED = frozenset(
    [
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "seed",
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


class BodyError(RequestError):
    """A body does not say what it must."""

    def __init__(
        self, message: str, parameter: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.code = code


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
    sampling: Mapping[str, Any]
    """Passed on to `Decoder.generate`."""


def parse_completion(data: bytes) -> Ask:
    """Read a body of ``/v1/completions``; raises `BodyError`."""
    body = _object(data)
    _check_names(body, COMMON | {"prompt"})
    return _ask(body, prompt=_prompt(body.get("prompt")), messages=())


def parse_chat(data: bytes) -> Ask:
    """Read a body of ``/v1/chat/completions``; raises `BodyError`."""
    body = _object(data)
    _check_names(body, COMMON | {"messages", "max_completion_tokens", "chat_template_kwargs"})
    return _ask(body, prompt=None, messages=_messages(body.get("messages")))


def _ask(
    body: dict[str, Any],
    *,
    prompt: str | tuple[int, ...] | None,
    messages: tuple[Message, ...],
) -> Ask:
    newer = _integer(body, "max_completion_tokens", 1)
    return Ask(
        model=_text(body, "model"),
        prompt=prompt,
        messages=messages,
        max_tokens=_integer(body, "max_tokens", 1) if newer is None else newer,
        stop=_stops(body.get("stop")),
        stop_token_ids=_tokens(body.get("stop_token_ids") or [], "stop_token_ids"),
        ignore_eos=_flag(body, "ignore_eos"),
        k=_integer(body, "k", 0),
        stream=_flag(body, "stream"),
        include_usage=_include_usage(body.get("stream_options")),
        template_options=_template_options(body.get("chat_template_kwargs")),
        sampling=sampling_options(body),
    )


def sampling_options(body: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of `Decoder.generate` for a body's parameters of sampling.

    Raises:
        BodyError: A value would not decode greedily, which is all there is.
    """
    for name, greedy in GREEDY.items():
        value = body.get(name)
        if value is not None and not _is_one_of(value, greedy):
            raise BodyError(
                f"{name!r} is {_shown(value)}; this server decodes greedily, so leave it out "
                f"or give {greedy[0]}",
                name,
            )
    return {}


def _object(data: bytes) -> dict[str, Any]:
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


def _check_names(body: Mapping[str, Any], known: frozenset[str]) -> None:
    for name, value in body.items():
        if name in known or name in IGNORED or name in GREEDY:
            continue
        if name not in NOTHING:
            raise BodyError(f"there is no parameter {_shown(name)}", name[:100])
        if value is not None and not _is_one_of(value, NOTHING[name]):
            raise BodyError(f"{name!r} is not supported: leave it out", name)


def _is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Equal and of the same kind: true is not 1, but 0.0 is 0."""
    return any(
        value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed
    )


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _text(body: Mapping[str, Any], name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise BodyError(f"{name!r} is {_shown(value)}; it must be a string", name)
    return value


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise BodyError(f"{name!r} is {_shown(value)}; it must be true or false", name)
    return bool(value)


def _integer(body: Mapping[str, Any], name: str, least: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not least <= value <= MAX_TOKENS:
        raise BodyError(
            f"{name!r} is {_shown(value)}; it must be a whole number from {least} on", name
        )
    return int(value)


def _tokens(values: Any, name: str) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(
        isinstance(v, int) and not isinstance(v, bool) and 0 <= v <= MAX_TOKENS for v in values
    ):
        raise BodyError(f"{name!r} must be a list of token ids", name)
    return tuple(values)


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
    return _tokens(value, "prompt")


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
            f"'{place}.role' is {_shown(role)}; it must be system, developer, user or "
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
    return _flag(value, "include_usage")


def _template_options(value: Any) -> dict[str, Any]:
    name = "chat_template_kwargs"
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > MAX_OPTIONS:
        raise BodyError(f"{name!r} must be an object of at most {MAX_OPTIONS} values", name)
    for key, held in value.items():
        plain = held is None or isinstance(held, bool | int | float | str)
        if key in RESERVED or not key.isidentifier() or not plain:
            raise BodyError(f"{name!r} cannot set {_shown(key)} to {_shown(held)}", name)
        if isinstance(held, float) and not math.isfinite(held):
            raise BodyError(f"{name!r} sets {_shown(key)} to no number", name)
    return value
