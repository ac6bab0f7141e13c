"""Chat templates: messages in, the text of a prompt out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from artifacts import Manifest
from runtime.errors import LoadError, RequestError
from runtime.load import check_file
from runtime.template_sandbox import FAULTS, SPENT, Sandbox, Spent

__all__ = ["CONFIG", "TEMPLATE", "ChatTemplate", "Message"]

TEMPLATE = "chat_template.jinja"
CONFIG = "tokenizer_config.json"

MAX_TEMPLATE_BYTES = 2**20
"""The largest public ones have some 20 kB."""
MAX_CONFIG_BYTES = 64 * 2**20

Message = Mapping[str, str]
"""``role`` and ``content``."""


class ChatTemplate:
    """Renders conversations."""

    def __init__(self, source: str, special: Mapping[str, str] | None = None) -> None:
        """Compile a template.

        Args:
            source: The jinja template.
            special: Special tokens by the name that templates use, such as ``bos_token``.

        Raises:
            LoadError: The template is too large, or is none.
        """
        size = len(source.encode(errors="replace"))
        if size > MAX_TEMPLATE_BYTES:
            raise LoadError(
                f"the chat template has {size} bytes; none is over {MAX_TEMPLATE_BYTES}"
            )
        self._special = dict(special or {})
        try:
            self._template = Sandbox().from_string(source)
        except FAULTS as e:
            raise LoadError(
                f"the chat template does not compile: {e}. Mend it in the checkpoint and "
                "build the artifact again"
            ) from e

    @classmethod
    def of(cls, folder: Path, manifest: Manifest) -> Self | None:
        """The artifact's chat template, None where it has none; raises `LoadError`."""
        config: dict[str, Any] = {}
        if CONFIG in manifest.files:
            config = _read_config(folder / CONFIG, manifest.files[CONFIG])
        source = _named(config.get("chat_template"))
        if TEMPLATE in manifest.files:
            path = folder / TEMPLATE
            check_file(path, manifest.files[TEMPLATE], limit=MAX_TEMPLATE_BYTES)
            source = path.read_bytes().decode(errors="replace")
        return None if source is None else cls(source, _special_tokens(config))

    def render(
        self,
        messages: Sequence[Message],
        *,
        opened: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The text that the model continues.

        Args:
            messages: The conversation.
            opened: Whether the assistant's turn is opened at the end.
            options: More variables for the template, such as ``enable_thinking``.

        Raises:
            RequestError: The template refuses the messages, or uses too much.
        """
        spent = Spent()
        variables = {
            **self._special,
            **(options or {}),
            "messages": [dict(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": opened,
            SPENT: spent,
        }
        parts = []
        try:
            for part in self._template.generate(variables):
                spent.output(len(part))
                parts.append(part)
        except FAULTS as e:
            reason = str(e) or type(e).__name__
            raise RequestError(f"the chat template refuses the conversation: {reason}") from e
        return "".join(parts)


def _read_config(path: Path, digest: str) -> dict[str, Any]:
    check_file(path, digest, limit=MAX_CONFIG_BYTES)
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as e:
        raise LoadError(f"{path.name} is not JSON: {e}. Build the artifact again") from e
    if not isinstance(values, dict):
        raise LoadError(f"{path.name} is no JSON object. Build the artifact again")
    return values


def _named(template: Any) -> str | None:
    """The template of ``tokenizer_config.json``: a text, or the default one of a list."""
    if isinstance(template, list):
        named = [
            entry.get("template")
            for entry in template
            if isinstance(entry, dict) and entry.get("name") == "default"
        ]
        template = named[0] if named else None
    return template if isinstance(template, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and the like; each is a text, or an object with its text."""
    found = {}
    for key, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            found[key] = content
    return found
