"""What a graph carries from step to step: each past with its present."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

import onnx

from export.bundles.data_files import dtype_name
from export.bundles.graph_index import GraphIndex, attribute, op_name

__all__ = ["CacheKind", "State", "StateKind", "cache_kind", "find_states", "shape_of"]


class StateKind(StrEnum):
    """What a state holds."""

    KEY = "key"
    VALUE = "value"
    CONV = "conv"
    RECURRENT = "recurrent"
    UNKNOWN = "unknown"


class CacheKind(StrEnum):
    """How key and value caches grow."""

    CONCATENATING = "concatenating"
    """The present is the past with the new rows behind it."""
    STATIC = "static"
    """Past and present have one fixed size; a length says what counts."""
    PAGED = "paged"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A past and its present."""

    kind: StateKind
    layer: int | None
    past: str
    present: str | None
    """None: nothing gives the next step this state."""
    dtype: str
    present_dtype: str | None
    shape: tuple[int | str, ...]
    present_shape: tuple[int | str, ...]
    window: int
    """`state_window` of the op: how many rows' states the present holds; 0 for one."""
    structural: bool
    """Paired by the op that reads one and writes the other, not by name."""


_KEY_VALUE = ((3, 1, StateKind.KEY), (4, 2, StateKind.VALUE))
PORTS: dict[str, tuple[tuple[int, int, StateKind], ...]] = {
    "Attention": ((4, 1, StateKind.KEY), (5, 2, StateKind.VALUE)),
    "com.microsoft.GroupQueryAttention": _KEY_VALUE,
    "com.microsoft.PagedAttention": _KEY_VALUE,
    "com.microsoft.MultiHeadAttention": ((6, 1, StateKind.KEY), (7, 2, StateKind.VALUE)),
    "com.microsoft.LinearAttention": ((3, 1, StateKind.RECURRENT),),
    "LinearAttention": ((3, 1, StateKind.RECURRENT),),
    "com.microsoft.GatedDeltaNet": ((6, 1, StateKind.RECURRENT),),
    "com.microsoft.CausalConvWithState": ((3, 1, StateKind.CONV),),
    "CausalConvWithState": ((3, 1, StateKind.CONV),),
    "TensorScatter": ((0, 0, StateKind.UNKNOWN),),
}
"""Input and output of each op that are one state."""
_WORDS = {"key": StateKind.KEY, "value": StateKind.VALUE, "conv": StateKind.CONV}
_WORDS |= {"recurrent": StateKind.RECURRENT}


def shape_of(value: onnx.ValueInfoProto) -> tuple[int | str, ...]:
    """Sizes, names for those that a run chooses, ``?`` where the file says nothing."""
    sizes = value.type.tensor_type.shape.dim
    return tuple(
        d.dim_value if d.HasField("dim_value") else (d.dim_param or "?") for d in sizes
    )


def find_states(index: GraphIndex) -> tuple[State, ...]:
    """Pasts in the order of the inputs, each with its present."""
    outputs = {output.name: output for output in index.graph.output}
    wired = _by_structure(index, outputs)
    states = []
    for name, value in index.inputs.items():
        if name not in wired and not name.startswith("past"):
            continue
        by_name = _present_name(name, outputs)
        present, window, kind = wired.get(name, (by_name, 0, StateKind.UNKNOWN))
        after = outputs.get(present) if present else None
        states.append(
            State(
                kind=kind if kind is not StateKind.UNKNOWN else _kind_by_name(name),
                layer=_layer(name),
                past=name,
                present=present,
                dtype=dtype_name(value.type.tensor_type.elem_type),
                present_dtype=dtype_name(after.type.tensor_type.elem_type) if after else None,
                shape=shape_of(value),
                present_shape=shape_of(after) if after else (),
                window=window,
                structural=name in wired,
            )
        )
    return tuple(states)


def cache_kind(index: GraphIndex, states: tuple[State, ...]) -> CacheKind:
    """How the key caches of a graph grow."""
    ops = {op_name(node) for node in index.graph.node}
    keys = [state for state in states if state.kind is StateKind.KEY]
    if not keys:
        return CacheKind.NONE
    if "com.microsoft.PagedAttention" in ops:
        return CacheKind.PAGED
    fixed = all(s.shape == s.present_shape and isinstance(s.shape[2], int) for s in keys)
    return CacheKind.STATIC if fixed or "TensorScatter" in ops else CacheKind.CONCATENATING


def _by_structure(
    index: GraphIndex, outputs: dict[str, onnx.ValueInfoProto]
) -> dict[str, tuple[str | None, int, StateKind]]:
    made = {index.source(name): name for name in outputs}
    found: dict[str, tuple[str | None, int, StateKind]] = {}
    for node in index.graph.node:
        for read, written, kind in PORTS.get(op_name(node), ()):
            past = index.source(node.input[read]) if read < len(node.input) else ""
            if past in index.inputs and written < len(node.output):
                present = made.get(node.output[written])
                found[past] = (present, attribute(node, "state_window"), kind)
    return found


def _present_name(past: str, outputs: dict[str, onnx.ValueInfoProto]) -> str | None:
    ending = past.partition(".")[2]
    wanted = (f"present.{ending}", f"present_key_values.{ending}")
    return next((name for name in wanted if name in outputs), None)


def _kind_by_name(name: str) -> StateKind:
    last = name.rpartition(".")[2]
    return next((kind for word, kind in _WORDS.items() if last.startswith(word)),
                StateKind.UNKNOWN)  # fmt: skip


def _layer(name: str) -> int | None:
    number = re.search(r"\.(\d{1,6})\.", name)
    return int(number[1]) if number else None
