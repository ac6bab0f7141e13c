"""A gated full-attention layer, whichever operator does it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx

from artifacts import AttentionSpec
from export.bundles.graph_index import op_name
from export.errors import BundleError
from export.importing.columns import Columns, columns
from export.importing.parts import Parts
from export.importing.probe import bookkeeping, causal, probe
from export.importing.reader import Array
from export.importing.rope import theta_of
from passes.streamed import StreamedTensor

__all__ = ["ATTENTION_OPS", "Mixer", "attention"]

GROUPED = "com.microsoft.GroupQueryAttention"
ATTENTION_OPS = ("Attention", GROUPED)
TURNING = (
    "RotaryEmbedding",
    "com.microsoft.RotaryEmbedding",
    "com.microsoft.MRotaryEmbedding",
)
PLAIN_NORMS = ("RMSNormalization", "SimplifiedLayerNormalization")
PAST, ROWS = 3, 2
"""Sizes with which masks and lengths are tried."""


@dataclass(frozen=True, slots=True)
class Mixer:
    """What stands between a layer's two norms, without their weights."""

    normed: str
    """What it reads."""
    weights: dict[str, StreamedTensor]
    spec: object
    """`AttentionSpec` or `GdnSpec`."""
    states: tuple[tuple[str, str], tuple[str, str]]
    """Past and present, twice."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """A rotary embedding: what is turned, and by which tables."""

    value: str
    cos: str
    sin: str
    channels: int
    """0 where the operator does not state it."""


def attention(parts: Parts, gating: onnx.NodeProto, out: Columns) -> Mixer:
    """``o(attended * sigmoid(gate))``, `gating` being the multiplication."""
    reader, weights = parts.reader, parts.weights
    attended, gate_value = _gated(parts, gating)
    node = reader.made_by(attended, ATTENTION_OPS, "attention")
    grouped = op_name(node) == GROUPED
    said = reader.allow(
        node,
        softcap=(0.0,),
        local_window_size=(-1,),
        rotary_interleaved=(0,),
        smooth_softmax=(0, -1),
        qk_matmul_output_mode=(0,),
        softmax_precision=(0, 1),
    )
    heads = int(said.get("num_heads" if grouped else "q_num_heads", 0))
    kv_heads = int(said.get("kv_num_heads", 0))
    if heads < 1 or kv_heads < 1 or not all(node.input[:3]):
        reader.refuse(node, "its query, key and value must be apart and its heads stated")
    _rows_are_causal(parts, node, said)
    turns = _turns(parts, node, said)
    q_norm, q = _normed(parts, turns[0].value, "a query")
    k_norm, k = _normed(parts, turns[1].value, "a key")
    v = columns(reader, node.input[2], "values")
    gate = columns(reader, gate_value, "attention's gate")
    width = len(q.index) // heads
    _check_heads(parts, node, {"queries": (q, heads), "keys": (k, kv_heads)}, width)
    if (len(v.index), len(gate.index)) != (kv_heads * width, heads * width):
        reader.refuse(node, f"values or gate are not heads of {width}")
    scale = said.get("scale", 0.0) or width**-0.5
    if not math.isclose(scale * math.sqrt(width), 1.0, rel_tol=1e-3):
        reader.refuse(node, f"its scale is {scale}, not 1 / sqrt({width})")
    rotary_dim, theta = _rope(parts, turns, width)
    return Mixer(
        parts.same_input(q, k, v, gate),
        {
            "attention.q": weights.matrix(q),
            "attention.gate": weights.matrix(gate),
            "attention.k": weights.matrix(k),
            "attention.v": weights.matrix(v),
            "attention.o": weights.matrix(out),
            "attention.q_norm": parts.norm(q_norm, width, "the norm of queries"),
            "attention.k_norm": parts.norm(k_norm, width, "the norm of keys"),
        },
        AttentionSpec(
            query_heads=heads,
            kv_heads=kv_heads,
            head_dim=width,
            rotary_dim=rotary_dim,
            rope_theta=theta,
        ),
        _states(node, 3 if grouped else 4),
    )


def _states(node: onnx.NodeProto, first: int) -> tuple[tuple[str, str], tuple[str, str]]:
    pasts = (*node.input[first : first + 2], "", "")[:2]
    presents = (*node.output[1:3], "", "")[:2]
    return (pasts[0], presents[0]), (pasts[1], presents[1])


def _gated(parts: Parts, gating: onnx.NodeProto) -> tuple[str, str]:
    """What is gated, and the value that goes through the sigmoid."""
    reader = parts.reader
    for one, other in (gating.input, gating.input[::-1]):
        sigmoid = reader.maker(other)
        if sigmoid is not None and op_name(sigmoid) == "Sigmoid":
            reader.understood(gating, sigmoid)
            return one, sigmoid.input[0]
    reader.refuse(gating, "no operand is a sigmoid, which attention is gated by")


def _normed(parts: Parts, value: str, what: str) -> tuple[onnx.NodeProto, Columns]:
    node = parts.reader.made_by(value, PLAIN_NORMS, f"the norm of {what}")
    return node, columns(parts.reader, node.input[0], what)


def _check_heads(
    parts: Parts, node: onnx.NodeProto, found: dict[str, tuple[Columns, int]], width: int
) -> None:
    for what, (picked, heads) in found.items():
        if len(picked.index) != heads * width or picked.width != width:
            parts.reader.refuse(
                node,
                f"{len(picked.index)} columns of {what}, normed by {picked.width}, are not "
                f"{heads} heads of {width}",
            )


def _turns(parts: Parts, node: onnx.NodeProto, said: dict[str, object]) -> tuple[_Turn, _Turn]:
    """The rotary embedding of queries and of keys."""
    reader = parts.reader
    if op_name(node) == GROUPED and any(node.input[9:]):
        reader.refuse(node, f"its input '{next(filter(None, node.input[9:]))}' is not known")
    if op_name(node) == GROUPED and said.get("do_rotary", 0):
        cos, sin = node.input[7], node.input[8]
        return _Turn(node.input[0], cos, sin, 0), _Turn(node.input[1], cos, sin, 0)
    return _turn(parts, node.input[0], "queries"), _turn(parts, node.input[1], "keys")


def _turn(parts: Parts, value: str, what: str) -> _Turn:
    reader = parts.reader
    node = reader.made_by(value, TURNING, f"the rotary embedding of {what}")
    said = reader.allow(
        node, interleaved=(0,), scale=(1.0,), is_packed_batching=(0,), mrope_layout=(0, 1)
    )
    first = 1 if not node.domain else 2
    cos, sin = node.input[first : first + 2]
    positions = node.input[1] if node.domain else (*node.input, "", "")[3]
    if not positions:
        looked_up = [reader.made_by(value, ["Gather"], "a look-up of positions")
                     for value in (cos, sin)]  # fmt: skip
        (cos, positions), (sin, again) = (gather.input[:2] for gather in looked_up)
        if again != positions:
            reader.refuse(node, "its cosines and sines are of other positions")
    _positions_count(parts, node, positions)
    return _Turn(node.input[0], cos, sin, int(said.get("rotary_embedding_dim", 0)))


def _positions_count(parts: Parts, node: onnx.NodeProto, positions: str) -> None:
    try:
        (found,) = probe(parts.reader.index, [positions], _feeds(parts))
    except BundleError as e:
        parts.reader.refuse(node, str(e))
    if not (found.reshape(-1, ROWS) == np.arange(PAST, PAST + ROWS)).all():
        parts.reader.refuse(node, f"its positions '{positions}' do not count the rows")


def _rows_are_causal(parts: Parts, node: onnx.NodeProto, said: dict[str, object]) -> None:
    """Prove, by values, that each row attends to itself and all before it."""
    index, reader = parts.reader.index, parts.reader
    try:
        if op_name(node) == GROUPED:
            last, total = probe(index, list(node.input[5:7]), _feeds(parts))
            right = int(last.reshape(-1)[0]) == PAST + ROWS - 1
            right &= int(total.reshape(-1)[0]) == PAST + ROWS
        elif len(node.input) > 3 and node.input[3]:
            (mask,) = probe(index, [node.input[3]], _feeds(parts))
            right = causal(mask, PAST) or (bool(said.get("is_causal", 0)) and _open(mask))
        else:
            right = bool(said.get("is_causal", 0))
    except BundleError as e:
        reader.refuse(node, str(e))
    if not right:
        reader.refuse(node, "its mask or lengths do not make it causal")


def _open(mask: Array) -> bool:
    """Whether a mask hides nothing."""
    return bool(mask.all() if mask.dtype == bool else (mask == 0).all())


def _feeds(parts: Parts) -> dict[str, Array]:
    return bookkeeping(parts.reader.index, PAST, ROWS)


def _rope(parts: Parts, turns: tuple[_Turn, _Turn], width: int) -> tuple[int, float]:
    found = []
    for turn in turns:
        cos, sin = (parts.weights.open(parts.reader.source(name))()
                    for name in (turn.cos, turn.sin))  # fmt: skip
        if cos.ndim != 2 or turn.channels not in (0, 2 * cos.shape[1]):
            raise BundleError(f"the rotary table '{turn.cos}' is {list(cos.shape)}")
        found.append((2 * cos.shape[1], theta_of(cos, sin)))
    if found[0] != found[1] or found[0][0] > width:
        raise BundleError(f"queries and keys turn apart: {found[0]} and {found[1]} of {width}")
    return found[0]
