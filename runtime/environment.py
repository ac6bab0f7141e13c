"""Environment variables that change which kernels ONNX Runtime takes.

Its C++ code reads them when it makes a session's kernels, so they must be in place before
the first session, for the whole process.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

__all__ = ["SETTINGS", "apply_settings"]

logger = logging.getLogger(__name__)

SETTINGS: tuple[tuple[str, str], ...] = ()
"""``(name, value)`` of what the CUDA graphs rely on."""


def apply_settings(settings: Iterable[tuple[str, str]]) -> None:
    """Set what is not set; what the user set stays, with a warning where it differs."""
    for name, value in settings:
        found = os.environ.setdefault(name, value)
        if found != value:
            logger.warning(
                "%s is %r in the environment, where %r is expected; kernels may be slower or "
                "differ",
                name,
                found,
                value,
            )
