"""The two recurrences of a Gated DeltaNet layer: as operators, or written out.

A portable export holds a Scan and a Conv where others have LinearAttention and
CausalConvWithState. What was written out is run on small numbers and compared with the rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx

from export.bundles.graph_index import op_name
from export.importing.parts import silu
from export.importing.probe import nodes_between, probe
from export.importing.reader import Array, Reader

__all__ = ["Convolution", "Recurrence", "convolution", "proven_scale", "recurrence"]

OPERATORS = ("com.microsoft.LinearAttention", "LinearAttention")
CONVOLUTIONS = ("com.microsoft.CausalConvWithState", "CausalConvWithState")
PLUMBING = frozenset(
    {"Transpose", "Reshape", "Unsqueeze", "Squeeze", "Tile", "Expand", "Cast", "CastLike"}
    | {"Identity", "Mul"}
)
ROWS, TOLERANCE = 3, 1e-4


@dataclass(frozen=True, slots=True)
class Recurrence:
    """The gated delta rule over rows; values by name."""

    node: onnx.NodeProto
    queries: str
    keys: str
    values: str
    decay: str
    beta: str
    past: str
    present: str
    read: str
    scale: float | None
    """Of the queries; 0 for the operator's default, None where it has to be found out."""
    heads: tuple[int, int] | None
    """Of keys and of values, where the operator states them."""


@dataclass(frozen=True, slots=True)
class Convolution:
    """A causal convolution with silu over channels."""

    node: onnx.NodeProto
    input: str
    """[B, S, C]"""
    weight: str
    bias: str
    past: str
    present: str


def recurrence(reader: Reader, read: str, presents: Mapping[str, str]) -> Recurrence:
    """The recurrence that makes `read`, the rows it gives."""
    node = reader.maker(read)
    if node is not None and op_name(node) in OPERATORS:
        reader.understood(node)
        said = reader.allow(node, update_rule=("gated_delta",))
        if len(node.input) < 6 or not all(node.input[:6]) or len(node.output) < 2:
            reader.refuse(node, "a state, a decay and a beta are not all there")
        q, k, v, past, decay, beta = node.input[:6]
        heads = int(said.get("q_num_heads", 0)), int(said.get("kv_num_heads", 0))
        scale = float(said.get("scale", 0.0))
        return Recurrence(node, q, k, v, decay, beta, past, node.output[1], read, scale, heads)
    value, seen = read, []
    while node is not None and op_name(node) in PLUMBING:
        seen.append(node)
        value = node.input[0]
        node = reader.index.producers.get(value)
    if node is None or op_name(node) != "Scan":
        reader.refuse(node, f"no recurrence makes '{read}', as LinearAttention or Scan would")
    if reader.attributes(node).get("num_scan_inputs") != 5 or len(node.input) != 6:
        reader.refuse(node, "it is no scan over queries, keys, values, decays and betas")
    past = reader.source(node.input[0])
    ends = [_before(reader, name, seen) for name in node.input[1:]]
    reader.understood(node, *seen)
    present = presents.get(past, "")
    queries, keys, values, decay, beta = ends
    return Recurrence(
        node, queries, keys, values, decay, beta, past, present, read, None, None
    )


def _before(reader: Reader, value: str, seen: list[onnx.NodeProto]) -> str:
    """`value` before what only moves or scales it."""
    while True:
        node = reader.index.producers.get(value)
        if node is None or op_name(node) not in PLUMBING:
            return value
        if op_name(node) == "Mul" and reader.scalar(node.input[1]) is None:
            return value
        seen.append(node)
        value = node.input[0]


def proven_scale(
    reader: Reader, rule: Recurrence, feeds_of: Mapping[str, tuple[int, ...]]
) -> float:
    """The scale of a scan's queries, once it is proved to be the gated delta rule.

    Args:
        reader: Of the graph.
        rule: A scan.
        feeds_of: Shapes of queries ``[1, rows, Hk, dk]``, keys, values ``[1, rows, Hv * dv]``,
            decay and beta ``[1, rows, Hv]``, past ``[1, Hv, dk, dv]``, by name.
    """
    rng = np.random.default_rng(7)
    feeds = {name: rng.standard_normal(shape).astype(np.float32)
             for name, shape in feeds_of.items()}  # fmt: skip
    feeds[rule.decay] = -np.abs(feeds[rule.decay])
    sizes = _asked(reader, frozenset(feeds))
    ends = [rule.read, rule.present]
    read, present = probe(reader.index, ends, feeds | sizes)
    reader.understood(*nodes_between(reader.index, ends, frozenset(feeds) | sizes.keys()))
    expected, state = _delta_rule(rule, feeds)
    got = read.reshape(ROWS, *expected.shape[1:])
    scale = float((got * expected).sum() / (expected * expected).sum())
    if not (
        np.allclose(got, scale * expected, atol=TOLERANCE)
        and np.allclose(present.reshape(state.shape), state, atol=TOLERANCE)
    ):
        reader.refuse(rule.node, "what it computes is not the gated delta rule")
    return scale


def _asked(reader: Reader, known: frozenset[str]) -> dict[str, Array]:
    """Batch and rows, where a Shape node asks a value for them that is not made of `known`."""
    made, sizes = set(known), {}
    for node in reader.index.graph.node:
        if made & set(node.input):
            made.update(node.output)
        elif op_name(node) == "Shape":
            said = reader.attributes(node)
            part = said.get("start", 0), said.get("end")
            if part in ((0, 1), (1, 2)):
                sizes[node.output[0]] = np.array([1 if part == (0, 1) else ROWS], np.int64)
    return sizes


def _delta_rule(rule: Recurrence, feeds: Mapping[str, Array]) -> tuple[Array, Array]:
    """``[rows, Hv, dv]`` and the state after them, queries not scaled."""
    state = feeds[rule.past][0].astype(np.float64)
    heads, _, dv = state.shape
    q, k = (feeds[name][0].astype(np.float64) for name in (rule.queries, rule.keys))
    q, k = (np.repeat(x, heads // x.shape[1], axis=1) for x in (q, k))
    values = feeds[rule.values][0].reshape(ROWS, heads, dv).astype(np.float64)
    decay, beta = (feeds[name][0].astype(np.float64) for name in (rule.decay, rule.beta))
    rows = []
    for t in range(ROWS):
        state = state * np.exp(decay[t])[:, None, None]
        miss = values[t] - np.einsum("hkv,hk->hv", state, k[t])
        state = state + np.einsum("hk,hv->hkv", k[t], miss * beta[t][:, None])
        rows.append(np.einsum("hkv,hk->hv", state, q[t]))
    return np.stack(rows), state


def convolution(reader: Reader, value: str, presents: Mapping[str, str]) -> Convolution:
    """The convolution whose channels, last, are `value`."""
    node, turned = reader.maker(value), False
    if node is not None and op_name(node) == "Transpose":
        node, turned = _transposed(reader, node), True
    if node is None or op_name(node) not in CONVOLUTIONS:
        return _written_out(reader, node, presents)
    reader.understood(node)
    said = reader.allow(node, activation=("silu", "swish"), ndim=(1,), dilation=(1,))
    if "activation" not in said or len(node.input) < 4 or len(node.output) < 2:
        reader.refuse(node, "it has no activation, or no state")
    source, weight, bias, past = node.input[:4]
    if bool(said.get("channels_last", 0)) == turned:
        reader.refuse(node, "its channels are not where the layer's are")
    if turned:
        transposed = reader.made_by(source, ["Transpose"], "channels brought to the front")
        _transposed(reader, transposed)
        source = transposed.input[0]
    return Convolution(node, source, weight, bias, past, node.output[1])


def _written_out(
    reader: Reader, node: onnx.NodeProto | None, presents: Mapping[str, str]
) -> Convolution:
    """``silu(Conv(Concat(past, x)) + bias)``, the present being its newest columns."""
    inner = silu(reader, node.output[0]) if node is not None else None
    if node is None or inner is None:
        reader.refuse(node, "no causal convolution with silu makes the layer's channels")
    summed, bias = reader.maker(inner), ""
    if summed is not None and op_name(summed) == "Add":
        reader.understood(summed)
        stored = [reader.source(name) in reader.index.initializers for name in summed.input]
        inner, bias = summed.input if stored[1] else summed.input[::-1]
        bias = reader.source(bias)
    conv = reader.made_by(inner, ["Conv"], "a convolution")
    reader.allow(conv, pads=([0, 0],), dilations=([1],), strides=([1],), auto_pad=("NOTSET",))
    joined = reader.made_by(conv.input[0], ["Concat"], "the past before the new columns")
    reader.allow(joined, axis=(2, -1))
    past, source = reader.source(joined.input[0]), joined.input[1]
    weight, present = conv.input[1], presents.get(past, "")
    _check_present(reader, joined, past, source, present)
    transposed = reader.made_by(source, ["Transpose"], "channels brought to the front")
    _transposed(reader, transposed)
    bias = bias or (conv.input[2] if len(conv.input) > 2 else "")
    return Convolution(conv, transposed.input[0], weight, bias, past, present)


def _check_present(
    reader: Reader, joined: onnx.NodeProto, past: str, source: str, present: str
) -> None:
    sizes = [d.dim_value for d in reader.index.inputs[past].type.tensor_type.shape.dim][-2:] \
        if past in reader.index.inputs else []  # fmt: skip
    if len(sizes) != 2 or min(sizes) < 1 or not present:
        reader.refuse(joined, f"'{past}' is no state of known size")
    rng = np.random.default_rng(3)
    feeds = {past: rng.standard_normal((1, *sizes)).astype(np.float32)}
    feeds[source] = rng.standard_normal((1, sizes[0], ROWS)).astype(np.float32)
    nodes = nodes_between(reader.index, [present], frozenset(feeds))
    (found,) = probe(reader.index, [present], feeds)
    both = np.concatenate([feeds[past], feeds[source]], axis=2)
    if not np.array_equal(found, both[:, :, -sizes[1] :]):
        reader.refuse(joined, f"'{present}' is not the newest {sizes[1]} columns")
    reader.understood(*nodes)


def _transposed(reader: Reader, node: onnx.NodeProto) -> onnx.NodeProto | None:
    reader.allow(node, perm=([0, 2, 1],))
    reader.understood(node)
    return reader.maker(node.input[0])
