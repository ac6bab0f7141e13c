"""A Hugging Face folder as a `ModelSpec` and named weights, read lazily.

Every tensor of the decoder and its head becomes a canonical weight or stops the build by
name: a tensor that nobody reads is the mark of a model that is not the one built.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from artifacts import HeadSpec, ModelSpec, ParseError, read_json
from export.config import ConfigFields, TextConfig, parse_config
from export.errors import CheckpointError
from export.family import HEAD, HEAD_GATE_PROJ, Piece, Source, sources
from export.safetensors_index import StoredTensor, file_within, optional_file, read_index
from export.stored_weights import is_same, weight
from passes.streamed import StreamedTensor

__all__ = ["Checkpoint", "read_checkpoint"]

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    GENERATION_CONFIG,
)
WRAPPED_PREFIX = "model.language_model."
PREFIX = "model."
LM_HEAD = "lm_head.weight"
VISION = ("model.visual.", "visual.")
BUFFER = ".rotary_emb.inv_freq"
"""Computed from `rope_theta`; old savers stored it all the same."""
EXPERTS = (".mlp.experts.", ".mlp.shared_expert", ".mlp.gate.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a build takes from a checkpoint folder."""

    spec: ModelSpec
    weights: dict[str, StreamedTensor]
    """By canonical name, such as ``layers.3.attention.q``; `export.family` lists them."""
    eos_token_ids: tuple[int, ...]
    left_out: tuple[str, ...]
    """Tensors (and whole files) that are not of the text model or its head."""
    config_sha256: str
    """Of the bytes of ``config.json``, in hexadecimal."""
    files: dict[str, Path]
    """Tokenizer and generation files that exist, by name, to be copied into an artifact."""


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read the configuration and the headers; matrices are read when they are written.

    Raises:
        CheckpointError: the folder is damaged, incomplete or hostile, or holds a model that
            cannot be built; the message names the file, key or tensor.
    """
    try:
        return _read(folder)
    except ParseError as e:
        raise CheckpointError(f"{folder} is no checkpoint to build from: {e}") from e
    except RecursionError as e:
        raise CheckpointError(f"{folder} holds a JSON file that is nested too deeply") from e
    except OSError as e:
        raise CheckpointError(f"{folder} cannot be read: {e.strerror or e}") from e


def _read(folder: Path) -> Checkpoint:
    config_path = file_within(folder, CONFIG)
    config = parse_config(read_json(config_path))
    stored, files_left_out = read_index(folder)
    prefix = _prefix(config, stored)
    spec = dataclasses.replace(config.spec, head=_head(config, stored))
    weights: dict[str, StreamedTensor] = {}
    consumed = set()
    for source in sources(spec, prefix):
        tensor = _checked(source, stored, folder)
        consumed.add(source.name)
        for piece in source.pieces:
            weights[piece.name] = weight(tensor, piece)
    if spec.tied_embedding and LM_HEAD in stored:
        _compare_tied(stored[LM_HEAD], weights["embed"])
        consumed.add(LM_HEAD)
    left_out = _left_out((name for name in stored if name not in consumed), folder)
    found = {name: optional_file(folder, name) for name in COPIED}
    files = {name: path for name, path in found.items() if path is not None}
    return Checkpoint(
        spec=spec,
        weights=weights,
        eos_token_ids=_generation_eos(files, spec) or config.eos_token_ids,
        left_out=left_out + files_left_out,
        config_sha256=hashlib.sha256(config_path.read_bytes()).hexdigest(),
        files=files,
    )


def _prefix(config: TextConfig, stored: dict[str, StoredTensor]) -> str:
    """What the tensors say, since repacked files keep either; else what the config says."""
    for prefix in (WRAPPED_PREFIX, PREFIX):
        if f"{prefix}embed_tokens.weight" in stored:
            return prefix
    return WRAPPED_PREFIX if config.is_wrapped else PREFIX


def _head(config: TextConfig, stored: dict[str, StoredTensor]) -> HeadSpec | None:
    """The head of the tensors present; a file that announces one may lack it."""
    names = [name for name in stored if name.startswith(HEAD)]
    if not names:
        return None
    _refuse_experts(names)
    further = [n for n in names if n.startswith("mtp.layers.") and n.split(".")[2] != "0"]
    if further or config.announced_head_layers > 1:
        found = f"{further[0]!r} is one" if further else f"{CONFIG} announces more than one"
        raise CheckpointError(
            f"an MTP head of several layers cannot be built, and {found}; remove the mtp.* "
            "tensors to build without a head"
        )
    gate = stored.get(HEAD_GATE_PROJ)
    has_own_width = gate is not None and len(gate.shape) == 2 and gate.shape[0] > 0
    width = gate.shape[0] if gate and has_own_width else config.spec.intermediate_size
    return HeadSpec(
        layers=1,
        hidden_source="post_norm",
        feedback="post_norm",
        concat="embed_first",
        cache="own",
        intermediate_size=width,
    )


def _checked(source: Source, stored: dict[str, StoredTensor], folder: Path) -> StoredTensor:
    tensor = stored.get(source.name)
    if tensor is None:
        _refuse_experts(stored)  # says more than that a dense matrix is missing
        raise CheckpointError(
            f"{source.name!r} {list(source.shape)} is missing from {folder}; fetch the whole "
            f"checkpoint, and one that {CONFIG} describes"
        )
    if tensor.shape != source.shape:
        raise CheckpointError(
            f"{source.name!r} in {tensor.path} is {list(tensor.shape)}; by {CONFIG} it must "
            f"be {list(source.shape)}"
        )
    return tensor


def _compare_tied(lm_head: StoredTensor, embed: StreamedTensor) -> None:
    is_matrix = lm_head.shape == tuple(embed.shape.numpy())
    if not (is_matrix and is_same(weight(lm_head, Piece("lm_head")), embed)):
        raise CheckpointError(
            f"{LM_HEAD!r} in {lm_head.path} differs from the embedding, though {CONFIG} ties "
            "the two; set tie_word_embeddings to false there if the matrix is meant"
        )


def _refuse_experts(names: Iterable[str]) -> None:
    for name in names:
        if any(part in name for part in EXPERTS):
            raise CheckpointError(
                f"{name!r} belongs to a mixture of experts; only dense feed-forwards can be "
                "built"
            )


def _left_out(names: Iterable[str], folder: Path) -> tuple[str, ...]:
    """The unread names, if each may be left out."""
    unread = sorted(names)
    unknown = [n for n in unread if not (n.startswith(VISION) or n.endswith(BUFFER))]
    if unknown:
        _refuse_experts(unknown)
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise CheckpointError(
            f"{unknown[0]!r}{more} in {folder} is no tensor of the model that {CONFIG} "
            "describes; building without it would give another model"
        )
    return tuple(unread)


def _generation_eos(files: dict[str, Path], spec: ModelSpec) -> tuple[int, ...]:
    if GENERATION_CONFIG not in files:
        return ()
    fields = ConfigFields.of(read_json(files[GENERATION_CONFIG]))
    return fields.token_ids("eos_token_id", spec.vocab_size)
