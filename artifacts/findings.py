"""What a check found: a stable code, a place, what is wrong, what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

__all__ = ["Finding", "Severity"]


class Severity(StrEnum):
    """How much a finding weighs."""

    ERROR = "error"
    """It does not run, or not rightly."""
    WARNING = "warning"
    """It runs, worse than it could."""
    NOTE = "note"
    """Worth knowing; never changes an exit code."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding of a check."""

    code: str
    """Stable, such as ``files.missing``: family and rule."""
    severity: Severity
    place: str
    """Where: a file, or ``graph:node(Op):input``."""
    message: str
    """What is wrong: the thing, what it is, what it must be."""
    remedy: str
    """What to do about it."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "code": self.code,
            "severity": str(self.severity),
            "place": self.place,
            "message": self.message,
            "remedy": self.remedy,
        }
