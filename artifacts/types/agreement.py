"""Where two statements about a type must agree: branches, states, declarations."""

from __future__ import annotations

import onnx

from artifacts.types.values import Clash, Known, Mistyped, Operand, declared_type

__all__ = ["BodyOutput", "contradiction", "disagreement", "either"]

BodyOutput = tuple[onnx.GraphProto, int]
"""A body of a branch or a loop, and the index of one of its outputs."""


def either(one: Known, other: Known) -> Known:
    """What is known of a value that one of two branches gives."""
    first, second = one.types or other.types, other.types or one.types
    if first is None or second is None:
        return Known(None, one.origin)
    return Known(first & second or first | second, one.origin)


def disagreement(
    place: str,
    node: onnx.NodeProto,
    one: Known,
    other: Known,
    body: BodyOutput,
) -> Clash | None:
    """A body whose output `other` is not of the type `one` that it must have."""
    if not one.types or not other.types or one.types & other.types:
        return None
    first = Operand("first", 0, "", one.types, one.origin)
    second = Operand("second", 1, "", other.types, other.origin)
    allowed = one.types | other.types
    return Clash(place, node.op_type, "V", (first, second), allowed, None, node, body=body)


def contradiction(
    value: onnx.ValueInfoProto,
    known: Known | None,
    path: str,
    output: bool,
    graph: onnx.GraphProto,
) -> list[Mistyped]:
    """A declaration of another type than the value has; at most one."""
    declared = declared_type(value)
    if declared is None or known is None or not known.types or declared in known.types:
        return []
    place = f"{path}{value.name}"
    return [Mistyped(place, value.name, declared, known.types, known.origin, output, graph)]
