"""An attention layer between its projections as one node (this project's kernels)."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from passes.contrib import is_contrib
from passes.counted import CountedPass
from passes.fuse_gates import is_sigmoid_gate
from passes.fuse_qk_norm import K_NORM, Q_NORM
from passes.own_kernels import OWN_DOMAIN

__all__ = ["FuseAttentionPass"]

MAX_ROWS = 16
MAX_QUERIES = 64
"""Rows times query heads of a kv head."""
HEAD_SIZES = (64, 128, 256)
ALIGNED = 8
"""What widths, offsets and angles are a multiple of: 16 bytes are read at once."""
KEY, VALUE, LAST_ROW, COS, SIN = 3, 4, 5, 7, 8
READ = frozenset({0, 1, 2, KEY, VALUE, LAST_ROW, 6, COS, SIN, Q_NORM, K_NORM})
"""Inputs of GroupQueryAttention whose meaning is kept; 6 only bounds what the device holds."""
KEPT = frozenset(
    (
        "num_heads",
        "kv_num_heads",
        "do_rotary",
        "rotary_interleaved",
        "scale",
        "qk_norm_epsilon",
    )
)
"""Attributes that are looked at; any other may change what is computed."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """The nodes of a layer, from the split of its merged projections to its gate."""

    split: ir.Node
    attention: ir.Node
    gate: ir.Node
    offsets: dict[ir.Value | None, int]
    width: int
    """Channels of a head."""


class FuseAttentionPass(CountedPass):
    """Replace what lies between a layer's projections by `CachedAttention`.

        before   q, k, v, g = Split(mixed)
                 a, key, value = GroupQueryAttention(q, k, v, past_key, past_value, ..)
                 y = GatedRMSNorm(a, 2^14, g)           the sigmoid gate of `FuseGatesPass`
        after    y, key, value = CachedAttention(mixed, past_key, past_value, last_row, ..)

    The stock kernel gives one block the whole cache as soon as there are two rows. This one
    spreads the cache over the card whatever the number of rows; it writes its caches in
    place. Norms of queries and keys must have been fused (`FuseQkNormPass`).

    Nodes that look otherwise, whose heads are none of `HEAD_SIZES` wide, or of more than
    `MAX_ROWS` rows or `MAX_QUERIES` queries a kv head (prefill) are left.
    """

    def rewrite(self, model: ir.Model) -> int:
        """See the class."""
        graph = model.graph
        layers = [
            layer
            for node in graph
            if is_contrib(node, "GroupQueryAttention") and (layer := _layer(node)) is not None
        ]
        for layer in layers:
            _fuse(graph, layer)
        if layers:
            graph.opset_imports[OWN_DOMAIN] = 1
        return len(layers)


def _layer(attention: ir.Node) -> _Layer | None:
    """The layer around a GroupQueryAttention; None where the kernel cannot take its place."""
    width = _head_width(attention)
    attended = attention.outputs[0]
    readers = attended.consumers()
    if width is None or len(readers) != 1 or attended.is_graph_output():
        return None
    gate = readers[0]
    if not is_sigmoid_gate(gate) or gate.inputs[0] is not attended:
        return None
    parts = (*attention.inputs[:3], gate.inputs[2])
    makers = {None if part is None else part.producer() for part in parts}
    split = makers.pop()
    if makers or split is None or split.op_type != "Split" or split.domain != "":
        return None
    offsets = _offsets(split)
    whole = offsets is not None and all(
        offsets[part] % ALIGNED == 0 and _last(part) == heads * width
        for part, heads in zip(parts, _heads(attention), strict=True)
    )
    if offsets is None or not whole or not _fits(attention, split.inputs[0]):
        return None
    return _Layer(split, attention, gate, offsets, width)


def _heads(attention: ir.Node) -> tuple[int, int, int, int]:
    """Heads of q, k, v and the gate."""
    heads = attention.attributes.get_int("num_heads", 0)
    kv = attention.attributes.get_int("kv_num_heads", 0)
    return heads, kv, kv, heads


def _head_width(attention: ir.Node) -> int | None:
    """Channels of a head, where the node computes what `CachedAttention` does."""
    inputs, known = attention.inputs, attention.attributes
    there = {index for index, value in enumerate(inputs) if value is not None}
    if there != READ or not known.keys() <= KEPT:
        return None
    rotated = known.get_int("do_rotary", 0) == 1
    if not rotated or known.get_int("rotary_interleaved", 0) != 0:
        return None
    key, cos = inputs[KEY], inputs[COS]
    if key is None or cos is None or key.shape is None or cos.shape is None:
        return None
    if key.shape.rank() != 4 or cos.shape.rank() != 2:
        return None
    (batch, kv, rows, width), (angles, half) = key.shape, cos.shape
    sizes = all(isinstance(size, int) for size in (rows, width, angles, half))
    if not sizes or (batch, kv) != (1, known.get_int("kv_num_heads", 0)):
        return None
    assert isinstance(rows, int) and isinstance(width, int)
    assert isinstance(angles, int) and isinstance(half, int)
    turned = angles >= rows and 2 * half <= width and half % ALIGNED == 0
    return width if width in HEAD_SIZES and turned else None


def _fits(attention: ir.Node, mixed: ir.Value | None) -> bool:
    """Whether the rows of `mixed` are few enough, and as wide as whole reads."""
    if mixed is None or mixed.shape is None or mixed.shape.rank() != 3:
        return False
    heads, kv = _heads(attention)[:2]
    batch, rows, width = mixed.shape
    if batch != 1 or not isinstance(rows, int) or not isinstance(width, int):
        return False
    if kv < 1 or heads % kv or width % ALIGNED:
        return False
    return rows <= MAX_ROWS and rows * (heads // kv) <= MAX_QUERIES


def _last(value: ir.Value | None) -> int | None:
    shape = None if value is None else value.shape
    size = None if shape is None or shape.rank() == 0 else shape[-1]
    return size if isinstance(size, int) else None


def _offsets(split: ir.Node) -> dict[ir.Value | None, int] | None:
    """Where each part of the merged projections begins; None where that is not known."""
    if split.attributes.get_int("axis", 0) not in (2, -1):
        return None
    offsets: dict[ir.Value | None, int] = {}
    at = 0
    for part in split.outputs:
        size = _last(part)
        if size is None:
            return None
        offsets[part] = at
        at += size
    return offsets


def _fuse(graph: ir.Graph, layer: _Layer) -> None:
    attention, gate, offsets = layer.attention, layer.gate, layer.offsets
    inputs = attention.inputs
    heads, kv = _heads(attention)[:2]
    made = ir.node(
        "CachedAttention",
        [
            layer.split.inputs[0],
            *(inputs[i] for i in (KEY, VALUE, LAST_ROW, COS, SIN, Q_NORM, K_NORM)),
        ],
        {
            "num_heads": heads,
            "kv_num_heads": kv,
            "q_offset": offsets[inputs[0]],
            "k_offset": offsets[inputs[1]],
            "v_offset": offsets[inputs[2]],
            "gate_offset": offsets[gate.inputs[2]],
            "epsilon": attention.attributes.get_float("qk_norm_epsilon", 1e-6),
            "scale": attention.attributes.get_float("scale", 0.0) or layer.width**-0.5,
        },
        domain=OWN_DOMAIN,
        num_outputs=3,
        name=attention.name,
    )
    graph.insert_before(attention, made)
    old = (gate.outputs[0], *attention.outputs[1:3])
    for before, after in zip(old, made.outputs, strict=True):
        after.name, after.type, after.shape = before.name, before.type, before.shape
        if before.is_graph_output():
            graph.outputs[list(graph.outputs).index(before)] = after
        ir.convenience.replace_all_uses_with(before, after)
    graph.remove(gate, safe=True)
    graph.remove(attention, safe=True)
    if not any(part.uses() or part.is_graph_output() for part in layer.split.outputs):
        graph.remove(layer.split, safe=True)
