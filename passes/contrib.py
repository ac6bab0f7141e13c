"""ONNX Runtime's own operators (``com.microsoft``) as this project uses them.

ONNX cannot infer their types and shapes, and a graph with unknown types is one that no
checker checks, so every node made here carries the types of its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

__all__ = ["DOMAIN", "infer_outputs", "is_contrib", "is_projection"]

DOMAIN = "com.microsoft"

Rule = Callable[[ir.Node], None]


def is_contrib(node: ir.Node, *op_types: str) -> bool:
    """Whether `node` is one of these operators of ONNX Runtime's."""
    return node.domain == DOMAIN and node.op_type in op_types


def is_projection(node: ir.Node) -> bool:
    """Whether `node` is a FusedMatMul that computes ``x @ w.T`` and nothing more."""
    others = ("transA", "transBatchA", "transBatchB")
    return (
        is_contrib(node, "FusedMatMul")
        and node.attributes.get_int("transB", 0) == 1
        and not any(node.attributes.get_int(name, 0) for name in others)
        and node.attributes.get_float("alpha", 1.0) == 1.0
    )


def infer_outputs(node: ir.Node) -> None:
    """Set type and shape of the outputs of a ``com.microsoft`` node from its inputs.

    Raises:
        KeyError: The operator is none that this project writes.
        ValueError: An input that decides a shape has none.
    """
    _RULES[node.op_type](node)


def _shape(node: ir.Node, index: int) -> Sequence[int | ir.SymbolicDim]:
    value = node.inputs[index]
    if value is None or value.shape is None or value.dtype is None:
        raise ValueError(
            f"{node.op_type} {node.name!r}: input {index} has no shape or no type yet"
        )
    return value.shape.dims


def _set(
    node: ir.Node, index: int, shape: Sequence[int | ir.SymbolicDim], source: int
) -> None:
    """Output `index` gets `shape` and the element type of input `source`."""
    if index < len(node.outputs) and node.outputs[index].name != "":
        value, like = node.outputs[index], node.inputs[source]
        if like is None or like.dtype is None:
            raise ValueError(f"{node.op_type} {node.name!r}: input {source} has no type yet")
        value.type = ir.TensorType(like.dtype)
        value.shape = ir.Shape(shape)


def _like(*pairs: tuple[int, int]) -> Rule:
    """Outputs that look like an input: pairs of output and input."""

    def rule(node: ir.Node) -> None:
        for output, source in pairs:
            _set(node, output, _shape(node, source), source)

    return rule


def _fused_matmul(node: ir.Node) -> None:
    a, b = _shape(node, 0), _shape(node, 1)
    moved = node.attributes.get_int("transA", 0)
    if len(b) != 2 or moved:
        raise ValueError(
            f"FusedMatMul {node.name!r}: only a plain matrix on the right of rows is written "
            f"here, not {node.inputs[1]}"
        )
    transposed = node.attributes.get_int("transB", 0)
    _set(node, 0, (*a[:-1], b[0] if transposed else b[1]), 0)


def _linear_attention(node: ir.Node) -> None:
    _set(node, 0, _shape(node, 2), 2)
    window = node.attributes.get_int("state_window", 0)
    past = _shape(node, 3)
    state = past if len(past) == 5 or not window else (window, *past)
    _set(node, 1, state, 3)


def _group_query_attention(node: ir.Node) -> None:
    _set(node, 0, _shape(node, 0), 0)
    _set(node, 1, _shape(node, 3), 3)
    _set(node, 2, _shape(node, 4), 4)


def _matmul_nbits(node: ir.Node) -> None:
    _set(node, 0, (*_shape(node, 0)[:-1], node.attributes.get_int("N", 0)), 0)


_RULES: dict[str, Rule] = {
    "CausalConvWithState": _like((0, 0), (1, 3)),
    "FusedMatMul": _fused_matmul,
    "GatedRMSNorm": _like((0, 0)),
    "GroupQueryAttention": _group_query_attention,
    "LinearAttention": _linear_attention,
    "LinearAttentionGate": _like((0, 0), (1, 3)),
    "MatMulNBits": _matmul_nbits,
    "MatMulW4": _matmul_nbits,
    "QuickGelu": _like((0, 0)),
    "SkipSimplifiedLayerNormalization": _like((0, 0), (3, 0)),
}
