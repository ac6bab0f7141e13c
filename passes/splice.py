"""Copy the nodes of one graph into another, its inputs tied to values that are there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir

__all__ = ["splice"]


def splice(
    source: ir.Graph, into: ir.Graph, inputs: Mapping[str, ir.Value], *, prefix: str
) -> dict[str, ir.Value]:
    """Append a copy of `source`'s nodes to `into`.

    Args:
        source: Left as it is.
        into: Takes the nodes. Initializers are shared by name: one that `into` has already
            is used, another is added under its own name.
        inputs: For every input of `source`, the value of `into` that takes its place.
        prefix: Goes before the name of every copied node and value.

    Returns:
        The copies of `source`'s outputs by their old names.

    Raises:
        ValueError: An input is left untied, or an initializer of the same name differs in
            type or shape.
    """
    copy = source.clone()
    untied = [value.name for value in copy.inputs if value.name not in inputs]
    if untied:
        raise ValueError(
            f"inputs of {source.name!r} left untied: {', '.join(map(str, untied))}"
        )
    for value in copy.inputs:
        ir.convenience.replace_all_uses_with(value, inputs[value.name or ""])
    for name, value in list(copy.initializers.items()):
        ir.convenience.replace_all_uses_with(value, _shared(into, name, value))
    outputs = {value.name or "": value for value in copy.outputs}
    copy.outputs.clear()
    nodes = list(copy)
    copy.remove(nodes)
    _prefix_names(nodes, prefix)
    into.extend(nodes)
    return outputs


def _shared(into: ir.Graph, name: str, value: ir.Value) -> ir.Value:
    known = into.initializers.get(name)
    if known is None:
        known = ir.Value(
            name=name, type=value.type, shape=value.shape, const_value=value.const_value
        )
        into.initializers[name] = known
    elif (known.dtype, known.shape) != (value.dtype, value.shape):
        raise ValueError(
            f"initializer {name!r} is {known.dtype}{known.shape} in one graph and "
            f"{value.dtype}{value.shape} in the other"
        )
    return known


def _prefix_names(nodes: Iterable[ir.Node], prefix: str) -> None:
    for node in nodes:
        node.name = prefix + (node.name or "")
        for value in node.outputs:
            if value.name:  # the empty name of an unused optional output stays empty
                value.name = prefix + value.name
