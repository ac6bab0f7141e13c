"""Proof that a ``Scan`` or ``Loop`` runs its body once, and what that one trip binds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

__all__ = [
    "NotProvenError",
    "SingleTrip",
    "constant_scalar",
    "default_opset",
    "prove_single_trip",
]

FIRST_SCAN_OPSET = 9
"""Scan-8 had a batch axis and sequence lengths: another op under the same name."""


class NotProvenError(ValueError):
    """It may not run its body exactly once; the message says what stands against it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleTrip:
    """What the one trip of a node binds; every value of `body` is still the body's own."""

    body: ir.Graph
    carried: tuple[tuple[ir.Value, ir.Value], ...]
    """Body input -> the value that it is."""
    sliced: tuple[tuple[ir.Value, ir.Value, int], ...]
    """Body input -> the value of which it is the only slice, and along which axis."""
    numbers: tuple[tuple[ir.Value, int | bool], ...]
    """Body input -> the iteration number or the condition of a ``Loop``."""
    results: tuple[tuple[ir.Value, int | None], ...]
    """For each output of the node: the body's value, and the axis it is stacked along."""


def prove_single_trip(node: ir.Node, opset: int) -> SingleTrip:
    """What `node`, a ``Scan`` or ``Loop`` of default opset `opset`, binds in its only trip.

    Raises:
        NotProvenError: It does not provably run once, or is malformed.
    """
    return _prove_scan(node, opset) if node.op_type == "Scan" else _prove_loop(node)


def default_opset(imports: Mapping[str, int]) -> int:
    """Version of ONNX's own ops, by either spelling of their domain; 0 where not imported."""
    return imports.get("", imports.get("ai.onnx", 0))


def _prove_scan(node: ir.Node, opset: int) -> SingleTrip:
    if opset < FIRST_SCAN_OPSET:
        raise NotProvenError(
            f"Scan of opset {opset} has a batch axis; convert to {FIRST_SCAN_OPSET} or later"
        )
    attribute = node.attributes.get("num_scan_inputs")
    if attribute is None or attribute.is_ref() or attribute.type != ir.AttributeType.INT:
        raise NotProvenError("its 'num_scan_inputs' is not given as a number")
    scanned, inputs = attribute.as_int(), _given(node, node.inputs, 0)
    if not 1 <= scanned <= len(inputs):
        raise NotProvenError(f"'num_scan_inputs' is {scanned}, of {len(inputs)} inputs")
    states = len(inputs) - scanned
    body = _body(node, inputs=len(inputs), outputs=states)
    axes = _axes(node, "scan_input_axes", scanned)
    for value, axis in zip(inputs[states:], axes, strict=True):
        _require_extent_one(value, axis)
    stacked = _axes(node, "scan_output_axes", len(body.outputs) - states)
    for value, axis in zip(body.outputs[states:], stacked, strict=True):
        if value.shape is not None and not -len(value.shape) - 1 <= axis <= len(value.shape):
            raise NotProvenError(f"its scan output {value.name!r} has no axis {axis}")
    return SingleTrip(
        body=body,
        carried=tuple(zip(body.inputs[:states], inputs[:states], strict=True)),
        sliced=tuple(zip(body.inputs[states:], inputs[states:], axes, strict=True)),
        numbers=(),
        results=tuple(zip(body.outputs, (None,) * states + stacked, strict=True)),
    )


def _prove_loop(node: ir.Node) -> SingleTrip:
    trips, condition = (*node.inputs, None, None)[:2]
    carried = _given(node, node.inputs[2:], 2)
    body = _body(node, inputs=2 + len(carried), outputs=1 + len(carried))
    if condition is not None and constant_scalar(condition) is not True:
        raise NotProvenError(f"its condition {condition.name!r} is not the constant true")
    count = None if trips is None else constant_scalar(trips)
    if trips is not None and count is None:
        raise NotProvenError(
            f"its trip count {trips.name!r} is not a constant; pin the shapes it comes from"
        )
    if count is not None and count < 1:
        raise NotProvenError(f"its trip count is {count}, it must be 1")
    if count != 1 and constant_scalar(body.outputs[0]) is not False:
        trips_said = "not given" if count is None else str(count)
        raise NotProvenError(
            f"its trip count is {trips_said} and the body's condition "
            f"{body.outputs[0].name!r} is not the constant false"
        )
    stacked = len(body.outputs) - 1 - len(carried)
    return SingleTrip(
        body=body,
        carried=tuple(zip(body.inputs[2:], carried, strict=True)),
        sliced=(),
        numbers=((body.inputs[0], 0), (body.inputs[1], True)),
        results=tuple(
            zip(body.outputs[1:], (None,) * len(carried) + (0,) * stacked, strict=True)
        ),
    )


def constant_scalar(value: ir.Value) -> int | float | bool | None:
    """The number that `value` always is; None where it may vary or is no single number."""
    seen: set[ir.Value] = set()  # a malformed graph may turn in a circle
    while (maker := value.producer()) is not None and value not in seen:
        seen.add(value)
        source = maker.inputs[0] if len(maker.inputs) == 1 else None
        if (maker.domain, maker.op_type) != ("", "Identity") or source is None:
            break
        value = source
    if value.is_graph_input():  # an initializer of that name is only a default
        return None
    if maker is not None and (len(maker.attributes) != 1 or len(maker.outputs) != 1):
        return None
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.size != 1 or tensor.dtype == ir.DataType.STRING:
        return None
    number: int | float | bool = tensor.numpy().reshape(-1)[0].item()
    return number


def _given(node: ir.Node, inputs: Sequence[ir.Value | None], first: int) -> list[ir.Value]:
    missing = [first + index for index, value in enumerate(inputs) if value is None]
    if missing:
        raise NotProvenError(f"its input {missing[0]} is left out")
    return [value for value in inputs if value is not None]


def _body(node: ir.Node, *, inputs: int, outputs: int) -> ir.Graph:
    attribute = node.attributes.get("body")
    if attribute is None or attribute.is_ref() or attribute.type != ir.AttributeType.GRAPH:
        raise NotProvenError("its 'body' is not given as a graph")
    body = attribute.as_graph()
    if len(body.inputs) != inputs:
        raise NotProvenError(f"its body takes {len(body.inputs)} inputs, it gives {inputs}")
    state_outputs = outputs if node.op_type == "Scan" else outputs - 1
    given = len(body.outputs) - (outputs - state_outputs)
    if len(body.outputs) < outputs or given < len(node.outputs):
        raise NotProvenError(
            f"its body has {len(body.outputs)} outputs, too few for {state_outputs} states "
            f"and {len(node.outputs)} outputs of the node"
        )
    for output in body.outputs:
        made = output.producer() is not None or output.is_graph_input()
        if not made and not output.is_initializer():
            raise NotProvenError(f"its body does not make its output {output.name!r}")
    return body


def _axes(node: ir.Node, name: str, count: int) -> tuple[int, ...]:
    attribute = node.attributes.get(name)
    if attribute is None:
        return (0,) * count
    if attribute.is_ref() or attribute.type != ir.AttributeType.INTS:
        raise NotProvenError(f"its '{name}' are not given as numbers")
    axes = tuple(attribute.as_ints())
    if len(axes) != count:
        raise NotProvenError(f"'{name}' has {len(axes)} axes, it must have {count}")
    return axes


def _require_extent_one(value: ir.Value, axis: int) -> None:
    if value.shape is None:
        raise NotProvenError(
            f"the shape of its scan input {value.name!r} is unknown; infer shapes first"
        )
    if not -len(value.shape) <= axis < len(value.shape):
        raise NotProvenError(f"axis {axis} of its scan input {value.name!r} does not exist")
    extent = value.shape[axis]
    if extent != 1:
        raise NotProvenError(
            f"its scan input {value.name!r} has extent {extent} on axis {axis}, it must be 1; "
            "pin the graph to one row first"
        )
