"""Which kernels an artifact runs with on this machine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from artifacts import Manifest
from runtime.errors import KernelError
from runtime.kernels.cache import kernel_library
from runtime.session import require_library

__all__ = ["KernelChoice", "choose_kernels"]

logger = logging.getLogger(__name__)

CAPABILITY = (9, 0)
"""Hopper: the library holds code for nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChoice:
    """What runs, and why it is not what the artifact was built for."""

    in_use: str
    """``own`` or ``stock``, as `Target.kernels`."""
    built_for: str
    reason: str = ""
    """Of a fallback."""
    library: Path | None = None

    def __str__(self) -> str:
        if self.in_use == self.built_for:
            return self.in_use
        return f"{self.in_use}, although built for {self.built_for}: {self.reason}"

    def to_json(self) -> dict[str, str]:
        """As plain JSON values."""
        return {"in_use": self.in_use, "built_for": self.built_for, "reason": self.reason}

    def running(self, manifest: Manifest) -> Manifest:
        """The artifact with the graphs that are to be loaded."""
        return manifest if self.in_use == self.built_for else manifest.in_stock()


def choose_kernels(
    manifest: Manifest, capability: tuple[int, int], progress: Callable[[str], None]
) -> KernelChoice:
    """This project's kernels where `manifest` has them and the machine too, else stock ones.

    A fallback is told once, as a warning.

    Args:
        manifest: Of the artifact.
        capability: Of the card.
        progress: Told that something is compiled.

    Raises:
        KernelError: The kernels are not to be had, and the artifact has nothing to fall
            back to.
    """
    built_for = manifest.target.kernels
    if built_for != "own":
        return KernelChoice(in_use=built_for, built_for=built_for)
    try:
        _require_hopper(capability)
        library = kernel_library(progress)
        require_library(library)
    except KernelError as e:
        if not manifest.has_fallback:
            raise
        logger.warning(
            "this project's kernels, which the artifact is built for, are not to be had: %s. "
            "Stock operators run in their place, with the same weights and slower",
            e,
        )
        return KernelChoice(in_use="stock", built_for=built_for, reason=str(e))
    return KernelChoice(in_use=built_for, built_for=built_for, library=library)


def _require_hopper(capability: tuple[int, int]) -> None:
    if capability != CAPABILITY:
        wanted, found = (".".join(map(str, pair)) for pair in (CAPABILITY, capability))
        raise KernelError(
            f"they are built for compute capability {wanted}, and this GPU has {found}: use a "
            "Hopper GPU, or an artifact with stock kernels"
        )
