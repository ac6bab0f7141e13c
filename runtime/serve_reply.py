"""What a client is told: the objects of OpenAI's API."""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

from runtime.serve_worker import Done
from runtime.state import Finish

__all__ = ["ChatReply", "CompletionReply", "Reply", "error_object", "event"]

FINISH = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.CAPACITY: "length"}


def error_object(
    message: str, kind: str, *, parameter: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": parameter, "code": code}}


def event(value: dict[str, Any] | str) -> bytes:
    """One server-sent event; what is not ASCII is escaped, so lone surrogates do no harm."""
    text = value if isinstance(value, str) else json.dumps(value)
    return f"data: {text}\n\n".encode()


class Reply:
    """The objects of one answer."""

    prefix = ""
    whole_kind = ""
    chunk_kind = ""

    def __init__(self, model: str) -> None:
        self._model = model
        self._id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())

    def whole(self, text: str, done: Done) -> dict[str, Any]:
        """The answer in one piece."""
        return {
            **self._head(self.whole_kind),
            "choices": [{**self._text(text), **_end(FINISH[done.finish])}],
            "usage": usage(done),
        }

    def opening(self) -> list[dict[str, Any]]:
        """Chunks before the first piece."""
        return []

    def piece(self, text: str) -> dict[str, Any]:
        """A chunk with text."""
        return self._chunk({**self._delta(text), **_end(None)})

    def closing(self, done: Done, *, include_usage: bool) -> list[dict[str, Any]]:
        """Chunks after the last piece."""
        chunks = [self._chunk({**self._delta(""), **_end(FINISH[done.finish])})]
        if include_usage:
            chunks.append({**self._head(self.chunk_kind), "choices": [], "usage": usage(done)})
        return chunks

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
        }

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._head(self.chunk_kind), "choices": [choice]}

    def _text(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"text": text}


class CompletionReply(Reply):
    """Of ``/v1/completions``."""

    prefix = "cmpl"
    whole_kind = chunk_kind = "text_completion"


class ChatReply(Reply):
    """Of ``/v1/chat/completions``."""

    prefix = "chatcmpl"
    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def opening(self) -> list[dict[str, Any]]:
        """Says who speaks."""
        return [self._chunk({"delta": {"role": "assistant", "content": ""}, **_end(None)})]

    def _text(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}


def usage(done: Done) -> dict[str, Any]:
    """Tokens of prompt and answer, and how the drafts fared."""
    stats, made = done.stats, len(done.ids)
    return {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": made,
        "total_tokens": stats.prompt_tokens + made,
        "prompt_tokens_details": {"cached_tokens": stats.reused},
        "completion_tokens_details": {
            "accepted_prediction_tokens": stats.accepted,
            "rejected_prediction_tokens": stats.drafted - stats.accepted,
        },
    }


def _end(finish: str | None) -> dict[str, Any]:
    return {"index": 0, "logprobs": None, "finish_reason": finish}
