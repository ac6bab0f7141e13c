"""Bodies within a graph: what a call or a loop hands to the body that it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import onnx

from artifacts.types.values import Known, element_name, quoted

__all__ = ["calls", "fed_to_body", "opsets_of", "stored", "with_attributes"]


def calls(function: onnx.FunctionProto, node: onnx.NodeProto) -> bool:
    """Whether `node` calls the model-local `function`."""
    same = (function.domain, function.name) == (node.domain, node.op_type)
    return same and function.overload == node.overload


def opsets_of(imports: Iterable[onnx.OperatorSetIdProto]) -> dict[str, int]:
    """Versions by domain, ``ai.onnx`` being another name of ``""``."""
    return {"" if o.domain == "ai.onnx" else o.domain: o.version for o in imports}


def stored(name: str, element: int) -> Known:
    """What is known of an initializer."""
    kind = element_name(element)
    return Known(frozenset({kind}) if kind else None, f"initializer '{name}'")


def fed_to_body(
    node: onnx.NodeProto, inputs: Sequence[Known | None]
) -> tuple[int, list[Known | None]]:
    """How many states a loop carries, and what the inputs of its body get."""
    if node.op_type == "Loop":
        own = [Known(frozenset({kind}), f"Loop {quoted(node)}") for kind in ("int64", "bool")]
        return len(inputs) - 2, [*own, *inputs[2:]]
    if node.op_type == "Scan":
        scanned = next((int(a.i) for a in node.attribute if a.name == "num_scan_inputs"), 0)
        return max(0, len(inputs) - scanned), list(inputs)
    return 0, []


def with_attributes(
    node: onnx.NodeProto, given: Mapping[str, onnx.AttributeProto]
) -> onnx.NodeProto:
    """The node with the caller's values in the place of references to them."""
    if not any(a.ref_attr_name for a in node.attribute):
        return node
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    del copy.attribute[:]
    for attribute in node.attribute:
        value = given.get(attribute.ref_attr_name) if attribute.ref_attr_name else attribute
        if value is not None:
            copy.attribute.add().CopyFrom(value)
            copy.attribute[-1].name = attribute.name
    return copy
