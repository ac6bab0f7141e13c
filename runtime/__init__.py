"""Runs artifacts: sessions, buffers, slots, and the decoding loop.

`Decoder` and `stream` are what most callers need. They are loaded when first asked for, so
importing this package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.decode import Decoder
    from runtime.streaming import stream

__all__ = ["Decoder", "stream"]

_HOMES = {"Decoder": "runtime.decode", "stream": "runtime.streaming"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
