"""Gives a target graph the output that a head starts from."""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["ExposeHiddenPass"]

HANDING_ON = ("Cast", "Identity", "Reshape")
PRODUCTS = ("MatMul", "Gemm", "FusedMatMul", "MatMulNBits")


class ExposeHiddenPass(ir.passes.InPlacePass):
    """Make what the LM head reads an output: the state after the final norm.

        before   n = RMSNormalization(...)   logits = MatMul(n, w)
        after    the same, and   hidden_states = Identity(n)   as an output

    The LM head is the product that makes ``logits``, whatever its width. A graph without
    one, or with that state among its outputs, is left.
    """

    def __init__(self, name: str = "hidden_states") -> None:
        self._name = name

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Add the output."""
        graph = model.graph
        logits = next((o for o in graph.outputs if "logits" in (o.name or "")), None)
        product = _source(logits).producer() if logits is not None else None
        if product is None or product.op_type not in PRODUCTS or product.inputs[0] is None:
            return ir.passes.PassResult(model, False)
        hidden = product.inputs[0]
        if any(_source(output) is _source(hidden) for output in graph.outputs):
            return ir.passes.PassResult(model, False)
        taken = {value.name for node in graph for value in node.outputs}
        name = self._name
        while name in taken:
            name += "_post_norm"
        node = ir.node("Identity", [hidden], name=f"expose_{name}")
        node.outputs[0].name = name
        dtype = hidden.dtype or (logits.dtype if logits is not None else None)
        if dtype is not None:
            node.outputs[0].dtype = dtype
        rows = logits.shape if logits is not None else None
        like_logits = ir.Shape([*rows[:-1], None]) if rows is not None else None
        node.outputs[0].shape = hidden.shape or like_logits
        graph.append(node)
        graph.outputs.append(node.outputs[0])
        return ir.passes.PassResult(model, True)


def _source(value: ir.Value) -> ir.Value:
    while True:
        node = value.producer()
        first = node.inputs[0] if node is not None and node.inputs else None
        if node is None or node.op_type not in HANDING_ON or first is None:
            return value
        value = first
