"""Variables for a chat template, as a command line gives them."""

from __future__ import annotations

import json
from collections.abc import Sequence

from runtime.errors import RequestError

__all__ = ["RESERVED", "OptionValue", "parse_options"]

OptionValue = bool | int | float | str | None

RESERVED = frozenset(["messages", "tools", "documents", "add_generation_prompt"])
"""Variables that the conversation itself sets."""


def parse_options(pairs: Sequence[str]) -> dict[str, OptionValue]:
    """``NAME=VALUE``; the value is JSON's true, false, null or number, else text.

    Raises:
        RequestError: A pair is none, or sets what the conversation sets.
    """
    found: dict[str, OptionValue] = {}
    for pair in pairs:
        name, joint, text = pair.partition("=")
        if not joint or not name.isidentifier() or name in RESERVED:
            raise RequestError(
                f"--template-option {pair!r}: give NAME=VALUE, such as enable_thinking=false; "
                f"not {', '.join(sorted(RESERVED))}"
            )
        found[name] = _value(text)
    return found


def _value(text: str) -> OptionValue:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, bool | int | float | str | None) else text
