"""A Gated DeltaNet layer, its recurrences as operators or written out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx

from artifacts import GdnSpec
from export.bundles.graph_index import op_name
from export.importing.attention import Mixer
from export.importing.columns import Columns, columns
from export.importing.parts import GATED_NORM, Parts, silu
from export.importing.recurrence import (
    ROWS,
    Convolution,
    Recurrence,
    convolution,
    proven_scale,
    recurrence,
)
from export.importing.unit_norm import unit_norm

__all__ = ["delta_net"]

GATES = "com.microsoft.LinearAttentionGate"
PLAIN_NORMS = ("RMSNormalization", "SimplifiedLayerNormalization")
ACTIVATIONS = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}


@dataclass(frozen=True, slots=True)
class _Output:
    """The gated norm: what it reads, its norm's node, and z."""

    read: str
    norm: onnx.NodeProto
    z: str
    activation: str


@dataclass(frozen=True, slots=True)
class _Gates:
    a: Columns
    b: Columns
    dt_bias: str
    decay_scale: str


def delta_net(
    parts: Parts, gating: onnx.NodeProto, out: Columns, presents: Mapping[str, str]
) -> Mixer:
    """``out(norm(read) * gate(z))``, `gating` making what `out` multiplies."""
    reader, weights = parts.reader, parts.weights
    output = _output(parts, gating)
    rule = recurrence(reader, output.read, presents)
    value_heads, dk, dv = _state_sizes(parts, rule)
    split, factors = _split(parts, rule, dk)
    conv = convolution(reader, split.input[0], presents)
    qkv = columns(reader, conv.input, "queries, keys and values")
    keys = (len(qkv.index) - value_heads * dv) // 2
    key_heads = keys // dk
    if len(qkv.index) != 2 * key_heads * dk + value_heads * dv or key_heads < 1:
        reader.refuse(rule.node, f"{len(qkv.index)} channels are not queries, keys and values")
    _check_split(parts, split, [keys, keys, value_heads * dv])
    scale = _scale(parts, rule, (key_heads, value_heads), (dk, dv)) * factors
    if not math.isclose(scale * math.sqrt(dk), 1.0, rel_tol=1e-3):
        reader.refuse(rule.node, f"its queries are scaled by {scale:.6g}, not 1 / sqrt({dk})")
    gates = _gates(parts, rule)
    z = columns(reader, output.z, "the output gate z")
    widths = {"a": gates.a, "b": gates.b, "z": z}
    wanted = {"a": value_heads, "b": value_heads, "z": value_heads * dv}
    for name, picked in widths.items():
        if len(picked.index) != wanted[name]:
            reader.refuse(rule.node, f"{name} has {len(picked.index)} columns, not "
                                     f"{wanted[name]}")  # fmt: skip
    spec = GdnSpec(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=dk,
        value_dim=dv,
        conv_kernel=_taps(parts, conv),
        output_gate=output.activation,
    )
    return Mixer(
        parts.same_input(qkv, z, gates.a, gates.b),
        {
            "gdn.qkv": weights.matrix(qkv),
            "gdn.z": weights.matrix(z),
            "gdn.b": weights.matrix(gates.b),
            "gdn.a": weights.matrix(gates.a),
            "gdn.conv": weights.whole(
                reader.source(conv.weight), (spec.conv_dim, 1, spec.conv_kernel)
            ),
            "gdn.decay_scale": weights.vector(gates.decay_scale, value_heads, "the decay"),
            "gdn.dt_bias": weights.vector(gates.dt_bias, value_heads, "dt_bias"),
            "gdn.norm": parts.norm(output.norm, dv, "the output's norm"),
            "gdn.out": weights.matrix(out),
        },
        spec,
        ((conv.past, conv.present), (rule.past, rule.present)),
    )


def _output(parts: Parts, gating: onnx.NodeProto) -> _Output:
    reader = parts.reader
    if op_name(gating) == GATED_NORM:
        said = reader.allow(gating, activation=tuple(ACTIVATIONS))
        reader.understood(gating)
        activation = ACTIVATIONS[said.get("activation", "silu")]
        return _Output(gating.input[0], gating, gating.input[2], activation)
    for one, other in (gating.input, gating.input[::-1]):
        norm = reader.maker(one)
        if norm is None or op_name(norm) not in PLAIN_NORMS:
            continue
        reader.understood(gating)
        z = silu(reader, other)
        if z is not None:
            return _Output(norm.input[0], norm, z, "silu")
        sigmoid = reader.made_by(other, ["Sigmoid"], "the output's gate")
        return _Output(norm.input[0], norm, sigmoid.input[0], "sigmoid")
    reader.refuse(gating, "no operand is the norm of what the recurrence gave")


def _state_sizes(parts: Parts, rule: Recurrence) -> tuple[int, int, int]:
    """Hv, dk, dv, as the recurrent state's input states them."""
    value = parts.reader.index.inputs.get(parts.reader.source(rule.past))
    sizes = [d.dim_value for d in value.type.tensor_type.shape.dim][-3:] if value else []
    if len(sizes) != 3 or min(sizes) < 1:
        parts.reader.refuse(rule.node, f"its state '{rule.past}' is no input of known size")
    heads, dk, dv = sizes
    if rule.heads is not None and rule.heads[1] != heads:
        parts.reader.refuse(rule.node, f"it has {rule.heads[1]} heads, its state {heads}")
    return heads, dk, dv


def _split(parts: Parts, rule: Recurrence, dk: int) -> tuple[onnx.NodeProto, float]:
    """The split into queries, keys, values, and what scales the queries outside the rule."""
    reader, nodes, factors = parts.reader, [], 1.0
    for at, (value, what) in enumerate(
        ((rule.queries, "queries"), (rule.keys, "keys"), (rule.values, "values"))
    ):
        if at < 2:
            value, factor = unit_norm(parts, value, what, dk)
            factors *= factor
        node = reader.made_by(value, ["Split"], f"the {what} out of the convolution")
        if list(node.output).index(reader.source(value)) != at:
            reader.refuse(node, f"the {what} are not its output {at}")
        nodes.append(node)
    if any(node is not nodes[0] for node in nodes):
        reader.refuse(nodes[0], "queries, keys and values are not split together")
    return nodes[0], factors


def _check_split(parts: Parts, split: onnx.NodeProto, wanted: list[int]) -> None:
    said = parts.reader.attributes(split)
    sizes = parts.reader.constant(split.input[1]) if len(split.input) > 1 else None
    if said.get("axis", 0) not in (-1, 2) or sizes is None or sizes.tolist() != wanted:
        parts.reader.refuse(split, f"it does not part the last axis into {wanted}")


def _scale(
    parts: Parts, rule: Recurrence, heads: tuple[int, int], dims: tuple[int, int]
) -> float:
    (key_heads, value_heads), (dk, dv) = heads, dims
    if rule.scale is not None:
        if rule.heads != heads:
            parts.reader.refuse(
                rule.node, f"its heads are {rule.heads}, its channels' {heads}"
            )
        return rule.scale or dk**-0.5
    return proven_scale(
        parts.reader,
        rule,
        {
            rule.queries: (1, ROWS, key_heads, dk),
            rule.keys: (1, ROWS, key_heads, dk),
            rule.values: (1, ROWS, value_heads * dv),
            rule.decay: (1, ROWS, value_heads),
            rule.beta: (1, ROWS, value_heads),
            rule.past: (1, value_heads, dk, dv),
        },
    )


def _gates(parts: Parts, rule: Recurrence) -> _Gates:
    """``decay = scale * softplus(a + dt_bias)``, ``beta = sigmoid(b)``."""
    reader = parts.reader
    node = reader.maker(rule.decay)
    if node is not None and op_name(node) == GATES:
        reader.understood(node)
        beta = reader.source(rule.beta)
        if reader.source(rule.decay) != node.output[0] or beta not in node.output[1:]:
            reader.refuse(node, "decay and beta are not its two outputs")
        a, bias, scale, b = node.input[:4]
        return _Gates(columns(reader, a, "a"), columns(reader, b, "b"), bias, scale)
    product = reader.made_by(rule.decay, ["Mul"], "the decay")
    sigmoid = reader.made_by(rule.beta, ["Sigmoid"], "beta")
    b = columns(reader, sigmoid.input[0], "b")
    for one, other in (product.input, product.input[::-1]):
        softplus = reader.maker(one)
        if softplus is not None and op_name(softplus) == "Softplus":
            reader.understood(softplus)
            total = reader.made_by(softplus.input[0], ["Add"], "a + dt_bias")
            a, bias = total.input
            if reader.source(a) in reader.index.initializers:
                a, bias = bias, a
            return _Gates(columns(reader, a, "a"), b, bias, other)
    reader.refuse(product, "no operand is a softplus")


def _taps(parts: Parts, conv: Convolution) -> int:
    """Taps of the convolution, whose bias must be zero."""
    reader = parts.reader
    tensor = reader.index.initializers.get(reader.source(conv.weight))
    if tensor is None or len(tensor.dims) != 3 or tensor.dims[1] != 1:
        reader.refuse(conv.node, "its weight is no stored [channels, 1, taps]")
    if conv.bias:
        bias = parts.weights.open(reader.source(conv.bias))()
        if np.asarray(bias).astype(np.float32).any():
            reader.refuse(conv.node, "it has a bias that is not zero")
    return int(tensor.dims[2])
