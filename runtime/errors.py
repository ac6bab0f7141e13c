"""What can go wrong in a run.

    RunError
    ├── KernelError     the library of kernels cannot be built or is not there
    ├── LoadError       the artifact does not load: files, graphs and manifest disagree
    ├── RequestError    the caller asked for what the artifact cannot do
    ├── SlotError       a graph failed, or is not bound to what it was bound to
    ├── DeviceError     a GPU, its driver or its libraries are missing, full, or refuse
    └── FiniteError     a forward gave NaN or infinity

Files that do not say what they must raise `artifacts.ParseError` instead.
"""

from __future__ import annotations

__all__ = [
    "DeviceError",
    "FiniteError",
    "KernelError",
    "LoadError",
    "RequestError",
    "RunError",
    "SlotError",
]


class RunError(Exception):
    """Base of all errors of this room; the message says what to do."""


class KernelError(RunError):
    """The library of kernels cannot be built or is not there."""


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
