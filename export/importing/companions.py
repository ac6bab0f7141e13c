"""What stands beside the graphs: tokenizer files, limits, ends of text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from artifacts import ParseError, read_json
from export.bundles.graph_index import GraphIndex
from export.bundles.layout import BundleLayout, Exporter
from export.bundles.metadata import read_metadata
from export.checkpoint import COPIED, GENERATION_CONFIG
from export.config import MAX_POSITIONS, ConfigFields
from export.errors import BundleError
from export.safetensors_index import optional_file

__all__ = ["Companions", "companions"]

DEFAULT_LONGEST = 32768


@dataclass(frozen=True, slots=True)
class Companions:
    """What metadata and other files say."""

    family: str
    """Empty where nothing says it."""
    longest: int
    eos_token_ids: tuple[int, ...]
    files: dict[str, Path]


def companions(layout: BundleLayout, target: GraphIndex, vocab_size: int) -> Companions:
    """Read them; raises `BundleError` for files that do not say what they must."""
    try:
        return _companions(layout, target, vocab_size)
    except ParseError as e:
        raise BundleError(f"the files of {layout.folder.name} cannot be used: {e}") from e


def _companions(layout: BundleLayout, target: GraphIndex, vocab_size: int) -> Companions:
    found = {name: optional_file(layout.folder, name) for name in COPIED}
    files = {name: path for name, path in found.items() if path is not None}
    family, longest = "", 0
    ends: tuple[int, ...] = ()
    if layout.metadata is not None:
        fields = ConfigFields.of(read_metadata(layout.folder / layout.metadata))
        model = ConfigFields.of(fields.object("model"))
        if layout.exporter is Exporter.GENAI:
            family = model.text("type", default="")
            longest = model.integer("context_length", default=0, maximum=MAX_POSITIONS)
            ends = model.token_ids("eos_token_id", vocab_size)
        else:
            family = model.text("architecture", default="")
            longest = model.integer("max_sequence_length", default=0, maximum=MAX_POSITIONS)
    if GENERATION_CONFIG in files:
        said = ConfigFields.of(read_json(files[GENERATION_CONFIG]))
        ends = said.token_ids("eos_token_id", vocab_size) or ends
    return Companions(family, longest or _table_rows(target) or DEFAULT_LONGEST, ends, files)


def _table_rows(target: GraphIndex) -> int:
    """Rows of a rotary table, where one is called so."""
    rows = [
        t.dims[0] for t in target.graph.initializer if "cos" in t.name and len(t.dims) == 2
    ]
    return max(rows, default=0)
