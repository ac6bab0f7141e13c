"""Gates in one kernel: ``x * silu(gate)`` and ``x * sigmoid(gate)`` (CUDA)."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnxscript import GraphBuilder

from passes.contrib import DOMAIN, infer_outputs, is_contrib
from passes.counted import CountedPass

__all__ = ["FuseGatesPass", "is_sigmoid_gate"]

SCALE = 2.0**14
"""Norm weight and root of the epsilon; representable in float16, where 2^16 is not."""
EPSILON = SCALE**2
WIDTH = 128
"""Channels that share a norm: any divisor serves, a warp's worth runs best."""


class FuseGatesPass(CountedPass):
    """Write gates as GatedRMSNorm with an epsilon so large that nothing is normalised.

        before   y = Mul(QuickGelu<alpha=1>(g), x)          y = Mul(x, Sigmoid(g))
        after    y = GatedRMSNorm<epsilon=2^28, activation>(x, 2^14, g)

    GatedRMSNorm computes ``x / sqrt(mean(x^2) + e) * w * f(g)`` in float32. With e = 2^28 and
    w = 2^14 the norm's factor is ``1 / sqrt(1 + mean(x^2) / 2^28)``: it differs from 1 by
    less than half of float16's rounding while the root mean square of 128 channels stays
    below 360, and by less than half of bfloat16's while it stays below 1000. In return the
    gate is not rounded in between, and two kernels become one. There is no operator in ONNX
    Runtime that multiplies by an activation alone.

    Gates whose width is no multiple of `WIDTH`, or whose shape is not that of `x`, are left.
    """

    def rewrite(self, model: ir.Model) -> int:
        """See the class."""
        graph = model.graph
        muls = [node for node in graph if node.op_type == "Mul" and node.domain == ""]
        return sum(_fuse(graph, mul) for mul in muls)


def is_sigmoid_gate(node: ir.Node) -> bool:
    """Whether `node` is ``x * sigmoid(gate)`` as `FuseGatesPass` writes it."""
    if not is_contrib(node, "GatedRMSNorm") or len(node.inputs) != 3:
        return False
    weight = ir.convenience.get_const_tensor(node.inputs[1]) if node.inputs[1] else None
    if weight is None or not (weight.numpy() == SCALE).all():
        return False
    known = node.attributes
    return (
        known.get_float("epsilon", 0.0) == EPSILON
        and known.get_string("activation", "silu") == "sigmoid"
    )


def _gate(value: ir.Value, x: ir.Value) -> ir.Node | None:
    """The activation that makes `value` and nothing else reads; None where there is none."""
    node = value.producer()
    if node is None or len(value.uses()) != 1 or value.is_graph_output():
        return None
    if x.dtype is None or x.shape != value.shape:
        return None
    silu = is_contrib(node, "QuickGelu") and node.attributes.get_float("alpha", 1.702) == 1.0
    sigmoid = node.op_type == "Sigmoid" and node.domain == ""
    shape = value.shape
    width = None if shape is None or shape.rank() < 2 else shape[-1]
    fits = isinstance(width, int) and width % WIDTH == 0
    return node if (silu or sigmoid) and fits else None


def _gate_and_value(mul: ir.Node) -> tuple[ir.Node, ir.Value] | None:
    first, second = mul.inputs
    if first is None or second is None:
        return None
    for value, x in ((first, second), (second, first)):
        gate = _gate(value, x)
        if gate is not None:
            return gate, x
    return None


def _fuse(graph: ir.Graph, mul: ir.Node) -> int:
    found = _gate_and_value(mul)
    if found is None:
        return 0
    gate, x = found
    assert x.dtype is not None
    builder = GraphBuilder(graph)
    builder.push_module("gates")
    op = builder.op
    weight = op.Constant(value=ir.tensor(np.full(WIDTH, SCALE, x.dtype.numpy())))
    activation = "silu" if gate.op_type == "QuickGelu" else "sigmoid"
    fused = op.GatedRMSNorm(
        x,
        weight,
        gate.inputs[0],
        epsilon=EPSILON,
        activation=activation,
        _domain=DOMAIN,
        _version=1,
    )
    producer = fused.producer()
    assert producer is not None
    infer_outputs(producer)
    builder.pop_module()
    old = mul.outputs[0]
    if old.is_graph_output():
        graph.outputs[list(graph.outputs).index(old)] = fused
    ir.convenience.replace_all_uses_with(old, fused)
    graph.remove(mul, safe=True)
    graph.remove(gate, safe=True)
    fused.name = old.name
    return 1
