"""Where an artifact's device memory goes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["DeviceMemory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Bytes on one device after loading."""

    device: str
    """What the card is called."""
    total: int
    """Of the card."""
    weights: int
    """Held once for all graphs."""
    buffers: int
    """Caches, states and what graphs hand on."""
    sessions: int
    """What ONNX Runtime took on top: kernels' code, workspaces, captures. Measured as the
    card's free memory before and after, so another process can blur it."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        parts = (("weights", self.weights), ("buffers", self.buffers), ("rest", self.sessions))
        shown = ", ".join(f"{what} {size / 1e6:,.1f} MB" for what, size in parts)
        return f"{shown} of {self.total / 1e9:,.1f} GB on {self.device}"
