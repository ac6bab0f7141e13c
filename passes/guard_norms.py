"""Keeps an L2 norm of zeros from dividing by zero."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from passes.operands import RANK
from passes.typed_graph import TypedModel, dtype_of

__all__ = ["GuardNormsPass"]

SMALLEST_ROOT = {"float": 1e-12, "bfloat16": 1e-12, "float16": 6.2e-5, "double": 1e-12}
"""Below any root that the type gives of a row that is not zeros; 6.2e-5 is float16's
smallest normal number, which devices that flush subnormals still hold."""


class GuardNormsPass(ir.passes.InPlacePass):
    """Bound the root in ``x / sqrt(sum(x * x))`` from below.

        before   r = Sqrt(ReduceSumSquare(x))                         y = Div(x, r)
        after    r = Sqrt(ReduceSumSquare(x))   g = Max(r, smallest)  y = Div(x, g)

    A row of zeros gives zeros instead of NaN; every other row keeps its value bit for bit,
    which an epsilon under the root would not do.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Guard each such division of the main graph whose type is known."""
        types = TypedModel(model).walk.values
        modified = False
        for node in [n for n in model.graph if n.op_type == "Div" and n.domain == ""]:
            root = node.inputs[1]
            known = types.get(root.name or "") if root is not None else None
            if root is None or known is None or known.sure not in RANK or not _bare(root):
                continue
            guard = ir.node("Max", [root, _smallest(model.graph, known.sure)])
            guard.name = f"{node.name or node.outputs[0].name}/guard"
            made = guard.outputs[0]
            made.name = f"{root.name}_guarded_for_{node.outputs[0].name}"
            made.dtype, made.shape = dtype_of(known.sure), root.shape
            model.graph.insert_before(node, guard)
            node.replace_input_with(1, made)
            modified = True
        return ir.passes.PassResult(model, modified)


def _bare(root: ir.Value) -> bool:
    """Whether a value is the root of a sum of squares with nothing added to it."""
    node = root.producer()
    if node is None or node.op_type != "Sqrt" or node.inputs[0] is None:
        return False
    total = node.inputs[0].producer()
    return total is not None and total.op_type == "ReduceSumSquare"


def _smallest(graph: ir.Graph, kind: str) -> ir.Value:
    name = f"smallest_root_{kind}"
    if name not in graph.initializers:
        dtype = dtype_of(kind)
        number = np.array(SMALLEST_ROOT[kind], dtype.numpy())
        tensor = ir.Tensor(number, dtype=dtype, name=name)
        value = ir.Value(name=name, shape=ir.Shape([]), type=ir.TensorType(dtype))
        value.const_value = tensor
        graph.register_initializer(value)
    return graph.initializers[name]
