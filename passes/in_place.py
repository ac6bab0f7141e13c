"""Which ops may write an output over the input they read: a table."""

from __future__ import annotations

import onnx_ir as ir

from passes.node_place import place

__all__ = ["appends", "refuses_in_place"]

ELEMENTWISE = frozenset(
    ("", op)
    for op in (
        *("Abs", "Add", "And", "Cast", "Ceil", "Clip", "Div", "Exp", "Floor", "Identity"),
        *("Log", "Mul", "Neg", "Not", "Or", "Reciprocal", "Relu", "Sigmoid", "Sqrt", "Sub"),
        *("Tanh", "Where"),
    )
)
"""Element i of the output needs element i of the input only, if the two have one shape.
Only ops that were tried on the CPU provider: over their input they give the same bits."""
COPIES = frozenset(("", op) for op in ("Flatten", "Reshape", "Squeeze", "Unsqueeze"))
"""Ops that hand the elements on in their order: over themselves they change nothing."""

STATEFUL = {
    ("com.microsoft", "GroupQueryAttention"): frozenset({(3, 1), (4, 2)}),
    ("com.microsoft", "LinearAttention"): frozenset({(3, 1)}),
    ("com.microsoft", "CausalConvWithState"): frozenset({(3, 1)}),
    ("onnx_mtp", "CachedAttention"): frozenset({(1, 1), (2, 2)}),
    ("onnx_mtp", "GdnRows"): frozenset({(6, 2)}),
}
"""(domain, op) -> (input, output) that may share memory. Attention appends to a shared cache;
each thread of the linear attention reads its part of the state before it writes it."""
CONVOLUTION = ("com.microsoft", "CausalConvWithState")
"""On CUDA, over several rows, one block writes the state that another still reads."""
APPENDING = frozenset(
    {("com.microsoft", "GroupQueryAttention"), ("onnx_mtp", "CachedAttention")}
)


def appends(node: ir.Node) -> bool:
    """Whether `node` writes new rows of a cache and leaves those that lie there."""
    return (node.domain, node.op_type) in APPENDING


def refuses_in_place(
    node: ir.Node, operand: ir.Value, position: int | None, output: int, convolves: bool
) -> str | None:
    """Why `node` cannot write its output over the memory of `operand`; None when it can.

    Args:
        node: Writes the output and reads the operand.
        operand: What it reads of the shared memory.
        position: Which input that is; None where a subgraph of the node reads it.
        output: Which output is written there.
        convolves: Whether `CausalConvWithState` works in place here.
    """
    key, pair = (node.domain, node.op_type), f"input {position} and output {output}"
    if position is None:
        return f"a subgraph of {place(node)} reads it; give the output its own memory"
    if key in STATEFUL:
        if (position, output) not in STATEFUL[key]:
            return f"{pair} of {node.op_type} cannot share memory; bind each state to its own"
        if key == CONVOLUTION and not convolves:
            return (
                f"{node.op_type} works in place on the CPU or for one row only; give the "
                "output its own memory and swap the two"
            )
        return None
    if key in COPIES and position == 0:
        return None
    if key not in ELEMENTWISE:
        return (
            f"{node.op_type} reads it at input {position} while it writes; give the output "
            "its own memory and swap the two"
        )
    shape = node.outputs[output].shape
    if operand.shape is None or shape is None or operand.shape != shape:
        return (
            f"{node.op_type} reads {operand.shape} and writes {shape}; in place both must "
            "have one known shape. Infer the shapes, or give the output its own memory"
        )
    return None
