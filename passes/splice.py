"""Copy the nodes of one graph into another, its inputs tied to values that are there."""

from __future__ import annotations

from collections.abc import Mapping

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
        ValueError: An input is left untied or tied to a value of another type or shape, an
            initializer of the same name differs, or a prefixed name is taken. `into` is as
            it was.
    """
    _check(source, into, inputs, prefix)
    copy = source.clone()
    places: dict[ir.Value, ir.Value] = {}
    for value in copy.inputs:
        places[value] = inputs[value.name or ""]
    for name, value in list(copy.initializers.items()):
        if value not in places:
            places[value] = _shared(into, name, value)
    outputs = {value.name or "": places.get(value, value) for value in copy.outputs}
    copy.outputs.clear()
    for old, new in places.items():
        ir.convenience.replace_all_uses_with(old, new)
    nodes = list(copy)
    copy.remove(nodes)
    for node in nodes:
        _prefix_names(node, prefix)
    into.extend(nodes)
    return outputs


def _check(
    source: ir.Graph, into: ir.Graph, inputs: Mapping[str, ir.Value], prefix: str
) -> None:
    untied = [value.name for value in source.inputs if value.name not in inputs]
    if untied:
        raise ValueError(
            f"inputs of {source.name!r} left untied: {', '.join(map(str, untied))}"
        )
    for value in source.inputs:
        tie = inputs[value.name or ""]
        if (tie.dtype, tie.shape) != (value.dtype, value.shape):
            raise ValueError(
                f"input {value.name!r} of {source.name!r} is {value.dtype}{value.shape}; it "
                f"cannot be tied to {tie.name!r}, {tie.dtype}{tie.shape}"
            )
    for name, value in source.initializers.items():
        known = into.initializers.get(name)
        if known is not None:
            _check_same(name, known, value)
    taken = {value.name for value in into.inputs} | set(into.initializers)
    for node in into.all_nodes():
        taken.update(value.name for value in node.outputs)
    for node in source.all_nodes():
        for value in node.outputs:
            if value.name and prefix + value.name in taken:
                raise ValueError(
                    f"{into.name!r} has a value {prefix + value.name!r} already; give the "
                    f"copy of {source.name!r} another prefix than {prefix!r}"
                )


def _check_same(name: str, known: ir.Value, value: ir.Value) -> None:
    """Values in memory are compared, too; those that lie in files are not read."""
    if (known.dtype, known.shape) != (value.dtype, value.shape):
        raise ValueError(
            f"initializer {name!r} is {known.dtype}{known.shape} in one graph and "
            f"{value.dtype}{value.shape} in the other"
        )
    one, other = known.const_value, value.const_value
    if one is None or other is None or one is other:
        return
    in_files = ir.ExternalTensor, ir.LazyTensor
    if isinstance(one, in_files) or isinstance(other, in_files):
        return
    if one.tobytes() != other.tobytes():
        raise ValueError(f"initializer {name!r} has other values in one graph than the other")


def _shared(into: ir.Graph, name: str, value: ir.Value) -> ir.Value:
    known = into.initializers.get(name)
    if known is None:
        known = ir.Value(
            name=name, type=value.type, shape=value.shape, const_value=value.const_value
        )
        into.initializers[name] = known
    return known


def _prefix_names(node: ir.Node, prefix: str) -> None:
    """Names of `node`, of what it gives, and of all that its subgraphs hold."""
    if node.name:  # unnamed nodes stay so: ONNX Runtime refuses two of one name
        node.name = prefix + node.name
    bodies = [
        attribute.as_graph()
        for attribute in node.attributes.values()
        if attribute.type is ir.AttributeType.GRAPH
    ]
    values = [*node.outputs]
    for body in bodies:
        values += [*body.inputs, *body.initializers.values()]
        for inner in body:
            _prefix_names(inner, prefix)
    for value in values:
        if value.name:  # the empty name of an unused optional output stays empty
            value.name = prefix + value.name
