"""What a folder is, and the model it gives to a build."""

from __future__ import annotations

from pathlib import Path

from artifacts import Source
from artifacts.manifest import MANIFEST
from export.build import Model
from export.bundles.layout import METADATA
from export.checkpoint import CONFIG, read_checkpoint
from export.errors import BundleError
from export.importing import import_bundle

__all__ = ["is_bundle", "read_source"]

TARGET = "model.onnx"


def read_source(folder: Path) -> Model:
    """Read the checkpoint or the bundle in `folder`.

    Raises:
        CheckpointError: It is no bundle and cannot be built from; the message says why.
        BundleError: It is a bundle that cannot be built from, or an artifact.
    """
    if (folder / MANIFEST).is_file():
        raise BundleError(
            f"{folder} is an artifact already; name the source that it was made of"
        )
    return import_bundle(folder) if is_bundle(folder) else _from_checkpoint(folder)


def is_bundle(folder: Path) -> bool:
    """Whether `folder` holds graphs; beside weights that a checkpoint stores, those count."""
    if (folder / CONFIG).exists() and any(folder.glob("*.safetensors")):
        return False
    return any((folder / name).exists() for name in (TARGET, *METADATA))


def _from_checkpoint(folder: Path) -> Model:
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
