"""Folds the 1 that zero-centred norms add to their weights at every run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from passes.operands import drop_unread

__all__ = ["FoldOffsetsPass", "Read"]

Read = Callable[[ir.Value], np.ndarray[Any, np.dtype[Any]] | None]
"""Gives the numbers of a stored value, None where they cannot be had."""
NORMS = frozenset(
    {"RMSNormalization", "SimplifiedLayerNormalization", "LayerNormalization"}
    | {"SkipSimplifiedLayerNormalization", "GatedRMSNorm"}
)
HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


class FoldOffsetsPass(ir.passes.InPlacePass):
    """Store ``1 + w`` where a norm's half-precision weight is added to 1 at run time.

        before   s = Add(w, 1)           y = RMSNormalization(x, s)
        after    w_plus_one = stored     y = RMSNormalization(x, w_plus_one)

    The sum is computed in float32 and rounded once, to the type that the addition gave; a
    cast of `w` before it is folded too. The stored `w` is never rewritten: where it lies in
    a data file, its bytes stay there unread.
    """

    def __init__(self, read: Read) -> None:
        self._read = read

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Fold each such addition of the main graph whose numbers can be read."""
        modified = False
        for node in [n for n in model.graph if n.op_type == "Add" and n.domain == ""]:
            users = [user for user, _ in node.outputs[0].uses()]
            is_norm = bool(users) and all(user.op_type in NORMS for user in users)
            weight = self._offset(node) if is_norm else None
            if weight is None or node.outputs[0].is_graph_output():
                continue
            stored = _stored(weight)
            dtype = node.outputs[0].dtype or weight.dtype
            values = self._read(stored) if stored is not None else None
            if stored is None or values is None or dtype is None or stored.dtype not in HALF:
                continue
            folded = (np.float32(1) + values.astype(np.float32)).astype(dtype.numpy())
            self._replace(model.graph, node, stored, ir.Tensor(folded, dtype=dtype))
            modified = True
        return ir.passes.PassResult(model, modified)

    def _offset(self, node: ir.Node) -> ir.Value | None:
        """The operand that is not the constant 1."""
        for one, other in (node.inputs, node.inputs[::-1]):
            tensor = ir.convenience.get_const_tensor(other) if other is not None else None
            if tensor is None or isinstance(tensor, ir.ExternalTensor) or tensor.size != 1:
                continue
            if float(tensor.numpy().reshape(-1)[0]) == 1.0:
                return one
        return None

    def _replace(
        self, graph: ir.Graph, node: ir.Node, stored: ir.Value, tensor: ir.TensorProtocol
    ) -> None:
        name, made = f"{stored.name}_plus_one", node.outputs[0]
        while name in graph.initializers and graph.initializers[name].shape != tensor.shape:
            name += "_"
        if name not in graph.initializers:
            tensor.name = name
            kind = ir.TensorType(tensor.dtype)
            sizes = ir.Shape(tensor.shape.numpy())
            value = ir.Value(name=name, shape=sizes, type=kind, const_value=tensor)
            graph.register_initializer(value)
        for user, index in list(made.uses()):
            user.replace_input_with(index, graph.initializers[name])
        operands = [value for value in node.inputs if value is not None]
        graph.remove(node, safe=True)
        for value in operands:
            producer = value.producer()
            before = producer.inputs[0] if producer is not None and producer.inputs else None
            drop_unread(value)
            if before is not None:
                drop_unread(before)


def _stored(value: ir.Value) -> ir.Value | None:
    """The initializer behind `value`, a cast stepped over."""
    node = value.producer()
    if node is not None and node.op_type == "Cast" and node.inputs[0] is not None:
        value = node.inputs[0]
    return value if value.is_initializer() and not value.is_graph_input() else None
