"""Which files of a folder belong together, whoever wrote them.

    mobius, onnx-genai      model.onnx, mtp/model.onnx, inference_metadata.yaml
    onnxruntime-genai       model.onnx, mtp.onnx, genai_config.json

Nothing is read here but the metadata. What the metadata declares and what stands there are
kept apart: a declared head whose file is gone is `missing`, never "no head".
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath

from artifacts import Fields, ParseError
from export.bundles.metadata import read_metadata
from export.errors import BundleError

__all__ = ["BundleLayout", "Declared", "Exporter", "find_layout"]


class Exporter(StrEnum):
    """Whose layout a folder follows."""

    MOBIUS = "mobius"
    """mobius and onnx-genai: ``inference_metadata.yaml``."""
    GENAI = "onnxruntime-genai"
    """onnxruntime-genai's model builder: ``genai_config.json``."""
    BARE = "bare"
    """Graphs alone, no metadata."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """What the metadata says about the head; None where it says nothing."""

    hidden_output: str | None = None
    """Output of the target that starts the head."""
    head_output: str | None = None
    """Output of the head that feeds its next draft."""
    embedding: str | None = None
    """Initializer of the target that embeds the head's tokens."""
    lm_head: str | None = None
    """Initializer of the target that turns the head's output into logits."""
    kv_mode: str | None = None
    vocab_size: int | None = None
    layers: int | None = None
    inputs: tuple[str, ...] | None = None
    """Inputs of the target by name, where the metadata lists them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleLayout:
    """The files of one bundle, as paths relative to `folder`, ``/`` between their parts."""

    folder: Path
    exporter: Exporter
    target: str
    head: str | None
    metadata: str | None
    declared: Declared
    others: tuple[str, ...]
    """Tokenizer and the like: copied along, never looked into."""
    missing: tuple[str, ...]
    """Declared and not there."""

    @property
    def graphs(self) -> dict[str, str]:
        """File by role: ``target`` and, where there is one, ``head``."""
        return {"target": self.target} | ({"head": self.head} if self.head else {})


METADATA = {
    "inference_metadata.yaml": Exporter.MOBIUS,
    "genai_config.json": Exporter.GENAI,
}
HEADS = ("mtp/model.onnx", "mtp.onnx")


def find_layout(folder: Path) -> BundleLayout:
    """Find the files that belong together.

    Raises `BundleError` when there is no target graph, when the metadata cannot be read, or
    when it names a file outside of the folder.
    """
    if not folder.is_dir():
        raise BundleError(f"{folder} is not a folder; give the one that holds model.onnx")
    found = next((name for name in METADATA if (folder / name).exists()), None)
    exporter = METADATA[found] if found else Exporter.BARE
    try:
        fields = read_metadata(folder / found) if found else None
        target, head, declared = _declared(exporter, fields)
    except ParseError as e:
        raise BundleError(f"the metadata of {folder.name} cannot be used: {e}") from e
    present = [name for name in HEADS if (folder / name).is_file()]
    missing = (head,) if head and not (folder / head).is_file() else ()
    head = head or (present[0] if present else None)
    if not (folder / target).is_file():
        raise BundleError(f"{folder} holds no {target}, the target's graph")
    return BundleLayout(
        folder=folder,
        exporter=exporter,
        target=target,
        head=None if missing else head,
        metadata=found,
        declared=declared,
        others=_others(folder, {target, head, found}),
        missing=missing,
    )


def inside(path: str) -> bool:
    """Whether a path out of a file stays in the folder that it is relative to."""
    parts = PurePosixPath(path).parts
    return (
        bool(parts) and parts[0] != "/" and ".." not in parts and not set(path) & set("\\:\0")
    )


def _declared(exporter: Exporter, fields: Fields | None) -> tuple[str, str | None, Declared]:
    if fields is None:
        return "model.onnx", None, Declared()
    if exporter is Exporter.GENAI:
        return _from_genai(fields)
    return _from_mobius(fields)


def _from_mobius(fields: Fields) -> tuple[str, str | None, Declared]:
    """The ``speculative:`` block, or the ``speculator:`` one of its first months."""
    block = fields.optional_object("speculative") or fields.optional_object("speculator")
    model = fields.optional_object("model")
    io = model.optional_object("io") if model else None
    inputs = tuple(i.text("name") for i in io.objects("inputs")) if io else None
    if block is None:
        return "model.onnx", None, Declared(inputs=inputs)
    head = _path(block, "model" if "model" in block else "model_path")
    return "model.onnx", head, Declared(
        hidden_output=_text(block, "target_hidden_output") or "hidden_states",
        head_output=_text(block, "mtp_hidden_output") or "mtp_hidden",
        embedding=_weight(block, "embedding"),
        lm_head=_weight(block, "lm_head"),
        kv_mode=_text(block, "kv_mode"),
        vocab_size=block.integer("vocab_size", default=0) or None,
        inputs=inputs,
    )  # fmt: skip


def _from_genai(fields: Fields) -> tuple[str, str | None, Declared]:
    model = fields.object("model")
    decoder, mtp = model.object("decoder"), model.optional_object("mtp")
    target = _path(decoder, "filename") or "model.onnx"
    layers = decoder.integer("num_hidden_layers", default=0) or None
    vocab = model.integer("vocab_size", default=0) or None
    if mtp is None or not mtp.boolean("enabled", default=True):
        return target, None, Declared(vocab_size=vocab, layers=layers)
    outputs = mtp.optional_object("outputs")
    return target, _path(mtp, "filename") or "mtp.onnx", Declared(
        hidden_output=_text(mtp, "main_hidden_states") or "hidden_states",
        head_output=_text(outputs, "hidden_states") if outputs else None,
        vocab_size=vocab,
        layers=layers,
    )  # fmt: skip


def _text(fields: Fields, key: str) -> str | None:
    return fields.text(key, default="") or None


def _weight(fields: Fields, key: str) -> str | None:
    """``{source, name}``, or the bare name of older files."""
    if key not in fields:
        return None
    try:
        block = fields.optional_object(key)
    except ParseError:
        return _text(fields, key)
    return _text(block, "name") if block else None


def _path(fields: Fields, key: str) -> str | None:
    path = fields.text(key, default="")
    if path and not inside(path):
        raise fields.refuse(key, "a path inside of the bundle's folder")
    return path or None


def _others(folder: Path, taken: set[str | None]) -> tuple[str, ...]:
    names = (path.name for path in folder.iterdir() if path.is_file())
    kinds = (".json", ".jinja", ".txt", ".yaml", ".model")
    return tuple(sorted(n for n in names if n.endswith(kinds) and n not in taken))
