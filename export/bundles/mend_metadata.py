"""Edits of another exporter's metadata: single lines and blocks, the rest byte for byte."""

from __future__ import annotations

import re
from collections.abc import Iterator

from export.bundles.data_files import dtype_name
from export.bundles.graph_index import GraphIndex
from export.bundles.layout import Declared
from export.bundles.states import shape_of
from export.bundles.wiring import HiddenKind, hidden_outputs

__all__ = ["mend_metadata"]

HIDDEN_KEYS = "hidden_output|target_hidden_output|main_hidden_states"
NAMED_INPUTS = ("position_ids",)
"""Inputs that ``model.io`` also names by a key of their own: ``position_ids_input``."""


def mend_metadata(text: str, declared: Declared, target: GraphIndex) -> tuple[str, list[str]]:
    """The text with what can be mended in it, and in words what was.

    `target` is the target's graph as it will be written beside the metadata.
    """
    done = []
    kinds = hidden_outputs(target)
    right = next((n for n, kind in kinds.items() if kind is HiddenKind.POST_NORM), None)
    named = declared.hidden_output
    if named and right and kinds.get(named) is not HiddenKind.POST_NORM:
        mended = _renamed(text, named, right)
        if mended != text:
            done.append(f"the head starts from {right}, after the final norm")
            text = mended
    for name in _unlisted(declared, target):
        mended = _listed(text, name, target)
        if mended != text:
            done.append(f"{name} listed among the target's inputs")
            text = mended
    return text, done


def _renamed(text: str, wrong: str, right: str) -> str:
    return re.sub(
        rf"^(\s*\"?(?:{HIDDEN_KEYS})\"?\s*:\s*\"?){re.escape(wrong)}(\"?,?\s*)$",
        lambda match: f"{match[1]}{right}{match[2]}",
        text,
        flags=re.MULTILINE,
    )


def _unlisted(declared: Declared, target: GraphIndex) -> Iterator[str]:
    if declared.inputs is not None:
        plain = re.compile(r"[A-Za-z_][\w.]*")  # such a name needs no quotes in YAML
        yield from (
            n for n in target.inputs if n not in declared.inputs and plain.fullmatch(n)
        )


def _listed(text: str, name: str, target: GraphIndex) -> str:
    """The entry before the one of the first state, or the text as it was."""
    value = target.inputs[name]
    first = re.search(r"^( *)- name: past[\w.]*$", text, flags=re.MULTILINE)
    if first is None:
        return text
    shape = shape_of(value)
    indent = first[1]
    entry = [
        f"- name: {name}",
        f"  dtype: {dtype_name(value.type.tensor_type.elem_type)}",
        f"  rank: {len(shape)}",
        "  shape:",
        *(f"  - {size}" for size in shape),
    ]
    block = "".join(f"{indent}{line}\n" for line in entry)
    text = text[: first.start()] + block + text[first.start() :]
    if name not in NAMED_INPUTS or f"{name}_input:" in text:
        return text
    return re.sub(
        r"^( *)attention_mask_input: .*$",
        lambda match: f"{match[0]}\n{match[1]}{name}_input: {name}",
        text,
        count=1,
        flags=re.MULTILINE,
    )
