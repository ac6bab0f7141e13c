"""What a folder is, and the model it gives to a build."""

from __future__ import annotations

from pathlib import Path

from artifacts import Source
from export.build import Model
from export.checkpoint import read_checkpoint

__all__ = ["read_source"]


def read_source(folder: Path) -> Model:
    """Read the checkpoint in `folder`; raises `CheckpointError` that says what is wrong."""
    checkpoint = read_checkpoint(folder)
    return Model(
        spec=checkpoint.spec,
        weights=checkpoint.weights,
        source=Source(
            kind="checkpoint",
            name=folder.resolve().name,
            config_sha256=checkpoint.config_sha256,
            left_out=checkpoint.left_out,
        ),
        eos_token_ids=checkpoint.eos_token_ids,
        files=checkpoint.files,
    )
