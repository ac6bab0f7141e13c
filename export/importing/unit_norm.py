"""The L2 norm of queries and keys, in the forms that exporters write it."""

from __future__ import annotations

import onnx

from export.bundles.graph_index import op_name
from export.importing.parts import Parts

__all__ = ["unit_norm"]

SMALL_EPSILON = 1e-3
"""Under the root, or as its least; a larger one is no guard."""


def unit_norm(parts: Parts, value: str, what: str, width: int) -> tuple[str, float]:
    """What an L2 norm reads, and what its result is multiplied with."""
    reader, factor = parts.reader, 1.0
    node = reader.maker(value)
    while node is not None and op_name(node) == "Mul":
        pair = [(one, reader.scalar(other)) for one, other in (node.input, node.input[::-1])]
        known = [(one, number) for one, number in pair if number is not None]
        if not known:
            break
        reader.understood(node)
        factor *= known[0][1] or 0.0
        node = reader.maker(known[0][0])
    if node is None or op_name(node) not in ("LpNormalization", "Div"):
        reader.refuse(node, f"no L2 norm over heads of {width} makes the {what}")
    if op_name(node) == "LpNormalization":
        reader.allow(node, p=(2,), axis=(-1, 3))
        reader.understood(node)
        _check_width(parts, node, node.input[0], width)
        return node.input[0], factor
    reader.understood(node)
    _root(parts, node)
    _check_width(parts, node, node.input[0], width)
    return node.input[0], factor


def _check_width(parts: Parts, node: onnx.NodeProto, value: str, width: int) -> None:
    """The norm is over one head: its input was reshaped to rows of `width`."""
    shaped = parts.reader.index.producers.get(value)
    while shaped is not None and op_name(shaped) in ("Cast", "CastLike", "Identity"):
        shaped = parts.reader.index.producers.get(shaped.input[0])
    size = None
    if shaped is not None and op_name(shaped) == "Reshape":
        size = parts.reader.last_size(shaped.input[1])
    if size is None or size[0] != width:
        parts.reader.refuse(node, f"it is not over heads of {width}")


def _root(parts: Parts, node: onnx.NodeProto) -> None:
    """The divisor is the root of the sum of squares, guarded or not."""
    reader = parts.reader
    root = reader.made_by(node.input[1], ["Sqrt", "Max", "ReduceL2"], "the root of an L2 norm")
    if op_name(root) == "Max":
        least = reader.scalar(root.input[1])
        if least is None or not 0 <= least < SMALL_EPSILON:
            reader.refuse(root, "its bound is no small constant")
        root = reader.made_by(root.input[0], ["Sqrt", "ReduceL2"], "the root of an L2 norm")
    total = root
    if op_name(root) == "Sqrt":
        total = reader.made_by(root.input[0], ["ReduceSumSquare", "Add"], "a sum of squares")
        if op_name(total) == "Add":
            epsilon = reader.scalar(total.input[1])
            if epsilon is None or not 0 <= epsilon < SMALL_EPSILON:
                reader.refuse(total, "what it adds is no small constant")
            total = reader.made_by(total.input[0], ["ReduceSumSquare"], "a sum of squares")
    axes = reader.constant(total.input[1]) if len(total.input) > 1 else None
    if (
        axes is None
        or axes.tolist() != [-1]
        or not reader.attributes(total).get("keepdims", 1)
    ):
        reader.refuse(total, "it is not over the last axis")
    if reader.source(total.input[0]) != reader.source(node.input[0]):
        reader.refuse(node, "it divides by the root of other values")
