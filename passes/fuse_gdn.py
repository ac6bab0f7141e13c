"""A Gated DeltaNet layer between its projections as one node (this project's kernels)."""

from __future__ import annotations

import onnx_ir as ir

from passes.contrib import is_contrib
from passes.counted import CountedPass
from passes.gdn_layer import GdnLayer, find_layer
from passes.own_kernels import OWN_DOMAIN

__all__ = ["FuseGdnPass"]

MAX_ROWS = 16
HEAD_SIZES = (64, 128)


class FuseGdnPass(CountedPass):
    """Replace what lies between a layer's projections by `GdnRows`.

        before   f = Cast(mixed)   qkv, a, b, z = Split(f)   c, conv = CausalConvWithState(qkv)
                 q, k, v = Split(c)   decay, beta = LinearAttentionGate(a, b)
                 o, state = LinearAttention(norm(q), norm(k), v, ..)
                 y = Cast(GatedRMSNorm(o, z))
        after    y, conv, state = GdnRows(mixed, .., past_conv, past_state)

    Ten kernels become one, and a row gets the same bits whatever the number of rows. Layers
    that compute anything else (`passes.gdn_layer`), whose heads are neither 64 nor 128 wide,
    and graphs of more than `MAX_ROWS` rows (prefill) are left.
    """

    def rewrite(self, model: ir.Model) -> int:
        """See the class."""
        graph = model.graph
        layers = [
            layer
            for node in graph
            if is_contrib(node, "LinearAttention")
            and (layer := find_layer(node)) is not None
            and _fits(layer)
        ]
        for layer in layers:
            _fuse(graph, layer)
        if layers:
            graph.opset_imports[OWN_DOMAIN] = 1
        return len(layers)


def _fits(layer: GdnLayer) -> bool:
    state, mixed = layer.attention.inputs[3], layer.cast.inputs[0]
    if state is None or mixed is None or state.shape is None or mixed.shape is None:
        return False
    rows, (dk, dv) = mixed.shape[1], state.shape[-2:]
    if not isinstance(rows, int) or rows > MAX_ROWS or layer.window not in (0, rows):
        return False
    return dk == dv and dk in HEAD_SIZES


def _fuse(graph: ir.Graph, layer: GdnLayer) -> None:
    conv, attention, gate, norm = layer.conv, layer.attention, layer.gate, layer.norm
    offsets = layer.offsets
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
            "keep_rows": int(layer.window > 0),
            "sigmoid_gate": int(activation == "sigmoid"),
            "epsilon": layer.epsilon,
            "l2_epsilon": layer.l2_epsilon,
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
    for node in layer.nodes:
        graph.remove(node, safe=True)
