"""One node: which types its inputs bind, and what its outputs get from that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx

from artifacts.types.table import Formal, Signature
from artifacts.types.values import Clash, Known, Operand, Scope, element_name

__all__ = ["Bindings", "bind", "output_types", "sure_types"]

TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype", "output_datatype")
Bindings = dict[str, frozenset[str] | None]
"""Possible types by type parameter; mixed variadics have one entry an input."""


def bind(
    node: onnx.NodeProto,
    sig: Signature,
    inputs: Sequence[Known | None],
    place: str,
) -> tuple[Bindings, list[Clash]]:
    """Types by type parameter, and where operands clash; then all of their types stay open."""
    groups: dict[str, list[Operand]] = {}
    for i, known in enumerate(inputs):
        formal = sig.input(i)
        if known is None or not known.types or formal is None:
            continue
        key = f"{formal.name}#{i}" if formal.kind == "m" else formal.type
        operand = Operand(formal.name, i, node.input[i], known.types, known.origin)
        groups.setdefault(key, []).append(operand)
    bindings: Bindings = {}
    clashes = []
    for key, operands in groups.items():
        formal = sig.input(operands[0].index)
        parameter = formal.type if formal else key
        allowed = sig.types.get(parameter, frozenset({parameter}))
        fitting = frozenset.intersection(*(o.types for o in operands)) & allowed
        if not fitting:
            odd = _odd_one(operands, allowed)
            where = f"{place}:{_formal_name(sig, odd)}"
            told = tuple(operands)
            clashes.append(
                Clash(where, node.op_type, parameter, told, allowed, None, node, odd=odd.index)
            )
            fitting = frozenset.union(*(o.types for o in operands)) & allowed
        bindings[key] = fitting or None
    return bindings, clashes


def _formal_name(sig: Signature, operand: Operand) -> str:
    formal = sig.input(operand.index)
    several = formal is not None and formal.kind in "vm"
    return f"{operand.formal}[{operand.index - len(sig.inputs) + 1}]" if several else (
        operand.formal
    )  # fmt: skip


def _odd_one(operands: Sequence[Operand], allowed: frozenset[str]) -> Operand:
    """The operand to point at: one of a type that the fewest have, the last of those."""

    def company(operand: Operand) -> tuple[bool, int]:
        alike = sum(bool(other.types & operand.types) for other in operands)
        return bool(operand.types & allowed), alike

    return min(reversed(operands), key=company)


def output_types(
    node: onnx.NodeProto,
    sig: Signature,
    index: int,
    bindings: Mapping[str, frozenset[str] | None],
) -> frozenset[str] | None:
    """The possible types of an output; None where nothing tells."""
    formal = sig.output(index)
    if formal is None or formal.kind == "m":
        return None
    if formal.type not in sig.types:
        return frozenset({formal.type})
    if formal.type in bindings:
        return bindings[formal.type]
    allowed = sig.types[formal.type]
    told = _from_attributes(node)
    if told is not None and told in allowed:
        return frozenset({told})
    if node.op_type == "CastLike":
        return bindings.get("T2")
    if node.op_type == "DequantizeLinear" and "T2" in bindings:
        return bindings["T2"]
    return allowed if len(allowed) == 1 else None


def _from_attributes(node: onnx.NodeProto) -> str | None:
    """The type that an attribute gives an output: a cast's, a constant's."""
    for attribute in node.attribute:
        if attribute.name in TYPE_ATTRIBUTES and attribute.i:
            return element_name(attribute.i)
        if attribute.type == onnx.AttributeProto.TENSOR:
            return element_name(attribute.t.data_type)
        if node.op_type == "Constant" and attribute.name.startswith("value_"):
            word: str = attribute.name.removeprefix("value_").removesuffix("s")
            return "int64" if word == "int" else word
    return "float" if node.op_type == "ConstantOfShape" else None


def sure_types(
    node: onnx.NodeProto,
    sig: Signature,
    bindings: Mapping[str, frozenset[str] | None],
    scope: Scope,
) -> dict[str, str]:
    """Sure types by parameter and formal, inputs and outputs."""
    found = {
        name: next(iter(types))
        for name, types in bindings.items()
        if types and len(types) == 1
    }
    sides: tuple[tuple[Sequence[str], Callable[[int], Formal | None]], ...] = (
        (node.input, sig.input),
        (node.output, sig.output),
    )
    for names, formal_of in sides:
        for i, name in enumerate(names):
            formal, known = formal_of(i), scope.get(name)
            if name and formal and known and known.sure:
                found.setdefault(formal.type, known.sure)
                found.setdefault(formal.name, known.sure)
    return found
