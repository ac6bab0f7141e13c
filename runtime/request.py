"""What a caller may ask of an artifact, checked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from artifacts import Manifest
from runtime.errors import RequestError

__all__ = ["AUTO", "Drafts", "check_prompt", "drafts_of"]

AUTO: Literal["auto"] = "auto"
"""Drafts a step: as it pays, step by step."""
Drafts = int | Literal["auto"] | None
"""How many drafts a step may have; None for what the artifact is built for."""


def drafts_of(manifest: Manifest, k: Drafts) -> int:
    """Most drafts a step: `k`, or what the artifact is built for; raises `RequestError`."""
    if k is None or k == AUTO:
        return manifest.k
    if not 0 <= k <= manifest.k:
        raise RequestError(
            f"k is {k}; this artifact is built for 0 to {manifest.k} drafts a step. Build one "
            "with a larger k: mtp-export build --k"
        )
    return k


def check_prompt(manifest: Manifest, ids: Sequence[int]) -> None:
    """Raise `RequestError` where the artifact cannot take `ids` as a prompt."""
    vocab, most = manifest.spec.vocab_size, manifest.capacity - 1
    if not len(ids):
        raise RequestError("the prompt is empty. Give at least one token")
    if len(ids) > most:
        raise RequestError(
            f"the prompt has {len(ids)} tokens; this artifact takes at most {most} (capacity "
            f"{manifest.capacity}, one for the answer). Shorten it, or build an artifact with "
            "a larger capacity"
        )
    for place, token in enumerate(ids):
        if not 0 <= token < vocab:
            raise RequestError(
                f"token {token} at place {place} of the prompt is outside the vocabulary of "
                f"{vocab}"
            )
