"""A Gated DeltaNet layer between its projections, recognised node by node."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from passes.contrib import is_contrib

__all__ = ["GdnLayer", "find_layer"]

TAPS = 4
DEFAULT_EPSILON = 1e-5
"""Of GatedRMSNorm and of RMSNormalization where they say nothing."""


@dataclass(frozen=True, slots=True)
class GdnLayer:
    """The nodes of a layer, from the cast of its merged projections to the one behind it."""

    cast: ir.Node
    split: ir.Node
    conv: ir.Node
    parts: ir.Node
    query: tuple[ir.Node, ...]
    """Reshape, RMSNormalization, Reshape, the last one first."""
    key: tuple[ir.Node, ...]
    gate: ir.Node
    attention: ir.Node
    norm: ir.Node
    last: ir.Node

    @property
    def nodes(self) -> tuple[ir.Node, ...]:
        """All of them, each before those that it reads."""
        back = (self.last, self.norm, self.attention, self.gate, *self.query, *self.key)
        return (*back, self.parts, self.conv, self.split, self.cast)

    @property
    def offsets(self) -> dict[ir.Value | None, int]:
        """Where each part of the merged projections begins."""
        offsets: dict[ir.Value | None, int] = {}
        at = 0
        for part in self.split.outputs:
            offsets[part] = at
            at += _width(part)
        return offsets

    @property
    def key_dim(self) -> int:
        """dk; 0 where it is not known."""
        state = self.attention.inputs[3]
        width = None if state is None or state.shape is None else state.shape[-2]
        return width if isinstance(width, int) else 0

    @property
    def window(self) -> int:
        """Rows whose states are kept; 0 for the last one's alone."""
        return self.attention.attributes.get_int("state_window", 0)

    @property
    def epsilon(self) -> float:
        """Of the gated norm."""
        return self.norm.attributes.get_float("epsilon", DEFAULT_EPSILON)

    @property
    def l2_epsilon(self) -> float:
        """Of the sum of squares: that of the norm, which is of the mean, times dk."""
        norm = self.query[1]
        return norm.attributes.get_float("epsilon", DEFAULT_EPSILON) * self.key_dim


def find_layer(attention: ir.Node) -> GdnLayer | None:
    """The layer around a LinearAttention; None where it computes anything else."""
    if len(attention.inputs) != 6 or len(attention.outputs) != 2:
        return None
    query, key = (_norm_before(attention.inputs[i]) for i in (0, 1))
    parts, gate = _maker(attention.inputs[2]), _maker(attention.inputs[4])
    norm = _reader(attention.outputs[0])
    if None in (query, key, parts, gate, norm):
        return None
    assert query and key and parts and gate and norm
    if not is_contrib(gate, "LinearAttentionGate") or not is_contrib(norm, "GatedRMSNorm"):
        return None
    conv, last = _maker(parts.inputs[0]), _reader(norm.outputs[0])
    if conv is None or last is None or not is_contrib(conv, "CausalConvWithState"):
        return None
    if len(conv.inputs) != 4 or len(conv.outputs) != 2 or len(gate.inputs) != 4:
        return None
    split = _maker(conv.inputs[0])
    cast = None if split is None else _maker(split.inputs[0])
    if split is None or cast is None:
        return None
    layer = GdnLayer(cast, split, conv, parts, query, key, gate, attention, norm, last)
    fits = _is_wired(layer) and _is_closed(layer) and all(_conditions(layer))
    return layer if fits else None


def _maker(value: ir.Value | None) -> ir.Node | None:
    return None if value is None else value.producer()


def _reader(value: ir.Value) -> ir.Node | None:
    readers = value.consumers()
    return readers[0] if len(readers) == 1 else None


def _width(value: ir.Value | None) -> int:
    """Size of the last axis; 0 where it is not known."""
    width = None if value is None or value.shape is None else value.shape[-1]
    return width if isinstance(width, int) else 0


def _norm_before(value: ir.Value | None) -> tuple[ir.Node, ...] | None:
    """The nodes of ``Reshape(RMSNormalization(Reshape(x)))``."""
    found = []
    for op_type in ("Reshape", "RMSNormalization", "Reshape"):
        node = _maker(value)
        if node is None or node.op_type != op_type or node.domain != "":
            return None
        found.append(node)
        value = node.inputs[0]
    return tuple(found)


def _is_wired(layer: GdnLayer) -> bool:
    """Whether every value enters where it must."""
    gate, attention, split, parts = layer.gate, layer.attention, layer.split, layer.parts
    plain = [(layer.cast, "Cast"), (split, "Split"), (parts, "Split"), (layer.last, "Cast")]
    if any(node.domain != "" or node.op_type != op for node, op in plain):
        return False
    if len(parts.outputs) != 3 or len(gate.outputs) != 2:
        return False
    q, k, v = parts.outputs
    read = (layer.conv.inputs[0], gate.inputs[0], gate.inputs[3], layer.norm.inputs[2])
    return (
        layer.query[-1].inputs[0] is q
        and layer.key[-1].inputs[0] is k
        and attention.inputs[2] is v
        and attention.inputs[4] is gate.outputs[0]
        and attention.inputs[5] is gate.outputs[1]
        and layer.norm.inputs[0] is attention.outputs[0]
        and all(_maker(value) is split for value in read)
        and read[0] is split.outputs[0]  # the kernel finds q, k and v in front
    )


def _is_closed(layer: GdnLayer) -> bool:
    """Whether nobody else reads what lies in between."""
    states = (layer.attention.outputs[1], layer.conv.outputs[1], layer.last.outputs[0])
    return not any(
        value.is_graph_output() or set(value.consumers()) - set(layer.nodes)
        for node in layer.nodes
        for value in node.outputs
        if value not in states
    )


def _conditions(layer: GdnLayer) -> Iterator[bool]:
    """What the kernel takes for granted."""
    conv, attention, mixed = layer.conv.attributes, layer.attention.attributes, layer.cast
    half = None if mixed.inputs[0] is None else mixed.inputs[0].dtype
    yield half in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    yield mixed.attributes.get_int("to", 0) == ir.DataType.FLOAT
    yield layer.last.attributes.get_int("to", 0) == half
    yield conv.get_string("activation", "none") in ("silu", "swish")
    yield conv.get_int("channels_last", 0) == conv.get_int("ndim", 1) == 1
    yield conv.get_int("dilation", 1) == 1 and layer.conv.inputs[2] is None
    yield _width(layer.conv.inputs[1]) == TAPS
    yield attention.get_string("update_rule", "gated_delta") == "gated_delta"
    root = layer.key_dim**-0.5 if layer.key_dim else 0.0
    yield bool(np.isclose(attention.get_float("scale", 0.0) or root, root, rtol=1e-6))
    yield conv.get_int("state_window", 0) == layer.window
    yield all(s.attributes.get_int("axis", -1) in (2, -1) for s in (layer.split, layer.parts))
    yield all(map(_width, layer.split.outputs))
    keys = attention.get_int("q_num_heads", 0) * layer.key_dim
    yield [_width(part) for part in layer.parts.outputs[:2]] == [keys, keys]
    norms = (layer.query[1], layer.key[1])
    yield all(_is_l2(norm, layer.key_dim) for norm in norms)
    yield len({norm.attributes.get_float("epsilon", DEFAULT_EPSILON) for norm in norms}) == 1
    yield layer.norm.attributes.get_string("activation", "silu") in (
        "silu",
        "swish",
        "sigmoid",
    )


def _constant(value: ir.Value | None) -> ir.TensorProtocol | None:
    """What a value always is; ``ir.convenience`` would name the tensor, which is a change."""
    made = _maker(value)
    if made is None:
        return None if value is None else value.const_value
    is_tensor = made.op_type == "Constant" and "value" in made.attributes
    return made.attributes["value"].as_tensor() if is_tensor else None


def _is_l2(norm: ir.Node, width: int) -> bool:
    """Whether an RMS norm over `width` channels divides by the root of the *sum*."""
    tensor = _constant(norm.inputs[1])
    if tensor is None or tuple(tensor.shape.numpy()) != (width,):
        return False
    return bool(np.allclose(tensor.numpy(), width**-0.5, rtol=1e-6, atol=0))
