"""Other forms of an operand: stepped over, converted, stored, dropped."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from passes.typed_graph import dtype_of

__all__ = ["RANK", "converted_constant", "drop_unread", "stepped_over", "store_beside"]

CONSTANT_ELEMENTS = 4096
"""Up to here a stored operand is converted; a larger one is a weight, which is cast."""
RANK = {"double": 4, "float": 3, "bfloat16": 2, "float16": 1}
"""Wider floats keep the values of narrower ones; anything else ranks below."""
LOSSLESS = {
    ("float16", "float"), ("bfloat16", "float"), ("float", "double"), ("int32", "int64"),
    ("float16", "double"), ("bfloat16", "double"), ("int32", "double"),
}  # fmt: skip


def stepped_over(value: ir.Value, goal: str) -> ir.Value | None:
    """What a lossless Cast to the wrong type was made from, if that is of type `goal`."""
    node = value.producer()
    if node is None or node.op_type != "Cast" or node.domain != "":
        return None
    source, made = node.inputs[0], node.attributes.get_int("to")
    if source is None or source.dtype is None or made is None:
        return None
    kinds = source.dtype.name.lower(), ir.DataType(made).name.lower()
    return source if kinds[0] == goal and kinds in LOSSLESS else None


def converted_constant(value: ir.Value, goal: str) -> ir.TensorProtocol | None:
    """A small stored operand in the type `goal`; None when its values would not survive."""
    tensor = value.const_value
    producer = value.producer()
    if tensor is None and producer is not None and producer.op_type == "Constant":
        tensor = ir.convenience.get_const_tensor(value)
    if tensor is None or isinstance(tensor, ir.ExternalTensor):
        return None
    if math.prod(tensor.shape.numpy()) > CONSTANT_ELEMENTS or goal not in RANK:
        return None
    dtype = dtype_of(goal)
    before = tensor.numpy().astype(np.float64)
    with np.errstate(over="ignore"):
        after = tensor.numpy().astype(dtype.numpy())
    kept = after.astype(np.float64)
    lost = (np.isfinite(before) & ~np.isfinite(kept)) | ((before != 0) & (kept == 0))
    return None if lost.any() else ir.Tensor(after, dtype=dtype)


def store_beside(
    graph: ir.Graph, value: ir.Value, tensor: ir.TensorProtocol, goal: str
) -> ir.Value:
    """An initializer called after `value`; one that was made already is taken again."""
    name = f"{value.name}_{goal}"
    if name in graph.initializers:
        return graph.initializers[name]
    tensor.name = name
    kind, sizes = ir.TensorType(tensor.dtype), ir.Shape(tensor.numpy().shape)
    stored = ir.Value(name=name, shape=sizes, type=kind, const_value=tensor)
    graph.register_initializer(stored)
    return stored


def drop_unread(value: ir.Value) -> None:
    """Remove a cast, a constant or a stored tensor that lost its last reader."""
    if value.uses() or value.is_graph_output():
        return
    node, graph = value.producer(), value.graph
    if node is not None and node.op_type in ("Cast", "Constant") and node.graph is not None:
        node.graph.remove(node, safe=True)
    elif value.is_initializer() and not value.is_graph_input() and graph is not None:
        del graph.initializers[value.name or ""]
