"""A Gated DeltaNet layer between its projections as one node (this project's kernels)."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from passes.contrib import is_contrib
from passes.counted import CountedPass
from passes.own_kernels import OWN_DOMAIN

__all__ = ["FuseGdnPass"]

MAX_ROWS = 16
HEAD_SIZES = (64, 128)


@dataclass(frozen=True, slots=True)
class _Layer:
    """The nodes of a layer, from the cast of its merged projections to the one behind it."""

    cast: ir.Node
    split: ir.Node
    conv: ir.Node
    parts: ir.Node
    gate: ir.Node
    attention: ir.Node
    norm: ir.Node
    last: ir.Node


class FuseGdnPass(CountedPass):
    """Replace what lies between a layer's projections by `GdnRows`.

        before   f = Cast(mixed)   qkv, a, b, z = Split(f)   c, conv = CausalConvWithState(qkv)
                 q, k, v = Split(c)   decay, beta = LinearAttentionGate(a, b)
                 o, state = LinearAttention(norm(q), norm(k), v, ..)
                 y = Cast(GatedRMSNorm(o, z))
        after    y, conv, state = GdnRows(mixed, .., past_conv, past_state)

    Ten kernels become one, and a row gets the same bits whatever the number of rows. Layers
    that look otherwise, whose heads are neither 64 nor 128 wide, or graphs of more than
    `MAX_ROWS` rows (prefill) are left.
    """

    def rewrite(self, model: ir.Model) -> int:
        """See the class."""
        graph = model.graph
        layers = [
            layer
            for node in graph
            if is_contrib(node, "LinearAttention")
            and (layer := _layer(node)) is not None
            and _fits(layer)
        ]
        for layer in layers:
            _fuse(graph, layer)
        if layers:
            graph.opset_imports[OWN_DOMAIN] = 1
        return len(layers)


def _maker(value: ir.Value | None) -> ir.Node | None:
    return None if value is None else value.producer()


def _reader(value: ir.Value) -> ir.Node | None:
    readers = value.consumers()
    return readers[0] if len(readers) == 1 else None


def _through_norm(value: ir.Value | None) -> ir.Node | None:
    """The node behind ``Reshape(RMSNormalization(Reshape(x)))``."""
    for op_type in ("Reshape", "RMSNormalization", "Reshape"):
        node = _maker(value)
        if node is None or node.op_type != op_type:
            return None
        value = node.inputs[0]
    return _maker(value)


def _layer(attention: ir.Node) -> _Layer | None:
    """The layer around a LinearAttention; None where it looks otherwise."""
    parts = _maker(attention.inputs[2])
    gate = _maker(attention.inputs[4])
    norm = _reader(attention.outputs[0])
    if parts is None or gate is None or norm is None or parts.op_type != "Split":
        return None
    if {_through_norm(attention.inputs[i]) for i in (0, 1)} != {parts}:
        return None
    conv = _maker(parts.inputs[0])
    last = _reader(norm.outputs[0])
    shaped = is_contrib(gate, "LinearAttentionGate") and is_contrib(norm, "GatedRMSNorm")
    if conv is None or last is None or not shaped or last.op_type != "Cast":
        return None
    if not is_contrib(conv, "CausalConvWithState"):
        return None
    split = _maker(conv.inputs[0])
    read = (conv.inputs[0], gate.inputs[0], gate.inputs[3], norm.inputs[2])
    if split is None or {_maker(value) for value in read} != {split}:
        return None
    cast = _maker(split.inputs[0])
    if split.op_type != "Split" or cast is None or cast.op_type != "Cast":
        return None
    return _Layer(cast, split, conv, parts, gate, attention, norm, last)


def _fits(layer: _Layer) -> bool:
    state, mixed = layer.attention.inputs[3], layer.cast.inputs[0]
    if state is None or mixed is None or state.shape is None or mixed.shape is None:
        return False
    rows, (dk, dv) = mixed.shape[1], state.shape[-2:]
    return isinstance(rows, int) and rows <= MAX_ROWS and dk == dv and dk in HEAD_SIZES


def _fuse(graph: ir.Graph, layer: _Layer) -> None:
    conv, attention, gate, norm = layer.conv, layer.attention, layer.gate, layer.norm
    offsets = _offsets(layer)
    window = conv.attributes.get_int("state_window", 0)
    activation = norm.attributes.get_string("activation", "silu")
    made = ir.node(
        "GdnRows",
        [
            layer.cast.inputs[0],
            conv.inputs[1],
            gate.inputs[1],
            gate.inputs[2],
            norm.inputs[1],
            conv.inputs[3],
            attention.inputs[3],
        ],
        {
            "key_heads": attention.attributes.get_int("q_num_heads", 0),
            "value_heads": attention.attributes.get_int("kv_num_heads", 0),
            "a_offset": offsets[gate.inputs[0]],
            "b_offset": offsets[gate.inputs[3]],
            "z_offset": offsets[norm.inputs[2]],
            "keep_rows": int(window > 0),
            "sigmoid_gate": int(activation == "sigmoid"),
            "epsilon": norm.attributes.get_float("epsilon", 1e-6),
            "l2_epsilon": _l2_epsilon(layer),
        },
        domain=OWN_DOMAIN,
        num_outputs=3,
        name=attention.name,
    )
    graph.insert_before(attention, made)
    old = (layer.last.outputs[0], conv.outputs[1], attention.outputs[1])
    for before, after in zip(old, made.outputs, strict=True):
        after.name, after.type, after.shape = before.name, before.type, before.shape
        if before.is_graph_output():
            graph.outputs[list(graph.outputs).index(before)] = after
        ir.convenience.replace_all_uses_with(before, after)
    for node in (layer.last, norm, attention, gate):
        graph.remove(node, safe=True)
    _remove_norms(graph, layer)
    for node in (layer.parts, conv, layer.split, layer.cast):
        graph.remove(node, safe=True)


def _offsets(layer: _Layer) -> dict[ir.Value | None, int]:
    """Where each part of the merged projections begins."""
    offsets: dict[ir.Value | None, int] = {}
    at = 0
    for part in layer.split.outputs:
        offsets[part] = at
        assert part.shape is not None
        width = part.shape[2]
        assert isinstance(width, int)
        at += width
    return offsets


def _l2_epsilon(layer: _Layer) -> float:
    """Of the sum of squares: the norm's epsilon, which is of the mean, times dk."""
    outer = _maker(layer.attention.inputs[0])
    norm = None if outer is None else _maker(outer.inputs[0])
    state = layer.attention.inputs[3]
    assert norm is not None and state is not None and state.shape is not None
    width = state.shape[-2]
    assert isinstance(width, int)
    return norm.attributes.get_float("epsilon", 0.0) * width


def _remove_norms(graph: ir.Graph, layer: _Layer) -> None:
    """The two L2 norms and their reshapes, unread by now."""
    for part in layer.parts.outputs[:2]:
        inner = _reader(part)
        norm = None if inner is None else _reader(inner.outputs[0])
        outer = None if norm is None else _reader(norm.outputs[0])
        for node in (outer, norm, inner):
            if node is not None:
                graph.remove(node, safe=True)
