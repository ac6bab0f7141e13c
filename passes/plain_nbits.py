"""Brings quantised products to the form that the fast kernels take, bit for bit."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from passes.contrib import is_contrib
from passes.fold_offsets import Read
from passes.operands import drop_unread
from passes.streamed import Array

__all__ = ["PlainNBitsPass"]

ZERO_POINTS, BIAS = 3, 5
MIDDLE = {4: 8, 8: 128}
"""The zero point that stands where none is stored, by bits."""


class PlainNBitsPass(ir.passes.InPlacePass):
    """Drop zero points that say nothing; add a bias behind the product.

        before   y = MatMulNBits(x, w, scales, zero_points of 8, , bias)
        after    y_product = MatMulNBits(x, w, scales)      y = Add(y_product, bias)

    ONNX Runtime's fast four-bit kernels take scales alone, and pass by nodes with more.
    """

    def __init__(self, read: Read) -> None:
        self._read = read

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Simplify each such node of the main graph."""
        modified = False
        for node in list(model.graph):
            if is_contrib(node, "MatMulNBits"):
                modified |= self._drop_zero_points(node)
                modified |= _split_bias(model.graph, node)
        return ir.passes.PassResult(model, modified)

    def _drop_zero_points(self, node: ir.Node) -> bool:
        stored = node.inputs[ZERO_POINTS] if len(node.inputs) > ZERO_POINTS else None
        bits = node.attributes.get_int("bits", 4)
        if stored is None or not stored.is_initializer() or bits not in MIDDLE:
            return False
        values = self._read(stored)
        if values is None or not _all_middle(values, node, bits):
            return False
        node.replace_input_with(ZERO_POINTS, None)
        _trim(node)
        drop_unread(stored)
        return True


def _all_middle(values: Array, node: ir.Node, bits: int) -> bool:
    middle = MIDDLE[bits]
    if values.dtype != np.uint8:
        return bool((values.astype(np.float32) == middle).all())
    if bits == 8:
        return bool((values == middle).all())
    rows, width = node.attributes.get_int("N", 0), node.attributes.get_int("K", 0)
    block = node.attributes.get_int("block_size", 0)
    blocks = -(-width // block) if block > 0 else 0
    if rows < 1 or values.size != rows * ((blocks + 1) // 2):
        return False
    packed = values.reshape(rows, -1)
    both = np.stack([packed & 15, packed >> 4], axis=-1).reshape(rows, -1)
    return bool((both[:, :blocks] == middle).all())  # beyond them, a row is padded


def _split_bias(graph: ir.Graph, node: ir.Node) -> bool:
    bias = node.inputs[BIAS] if len(node.inputs) > BIAS else None
    if bias is None:
        return False
    node.replace_input_with(BIAS, None)
    _trim(node)
    product, label = node.outputs[0], node.name or node.outputs[0].name
    added = ir.node("Add", [product, bias], name=f"{label}/bias")
    made = added.outputs[0]
    made.type, made.shape = product.type, product.shape
    graph.insert_after(node, added)
    for user, index in list(product.uses()):
        if user is not added:
            user.replace_input_with(index, made)
    name = product.name
    if product.is_graph_output():
        graph.outputs[list(graph.outputs).index(product)] = made
        product.name, made.name = f"{name}_product", name
    else:
        made.name = f"{name}_with_bias"
    return True


def _trim(node: ir.Node) -> None:
    """No optional inputs that are not there at the end of the list."""
    count = len(node.inputs)
    while count and node.inputs[count - 1] is None:
        count -= 1
    if count != len(node.inputs):
        node.resize_inputs(count)
