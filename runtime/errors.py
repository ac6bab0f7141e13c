"""What can go wrong in a run.

    RunError
    ├── LoadError       the artifact does not load: files, graphs and manifest disagree
    ├── RequestError    the caller asked for what the artifact cannot do
    ├── SlotError       a graph failed, or is not bound to what it was bound to
    ├── DeviceError     a GPU, its driver or its libraries are missing, full, or refuse
    └── FiniteError     a forward gave NaN or infinity

Files that do not say what they must raise `artifacts.ParseError` instead.
"""

from __future__ import annotations

__all__ = ["DeviceError", "FiniteError", "LoadError", "RequestError", "RunError", "SlotError"]


class RunError(Exception):
    """Base of all errors of this room; the message says what to do."""


class LoadError(RunError):
    """The artifact does not load: files, graphs and manifest disagree."""


class RequestError(RunError, ValueError):
    """The caller asked for what the artifact cannot do."""


class SlotError(RunError):
    """A graph failed, or is not bound to what it was bound to."""


class DeviceError(RunError):
    """A GPU, its driver or its libraries are missing, full, or refuse."""


class FiniteError(RunError):
    """A forward gave NaN or infinity."""
