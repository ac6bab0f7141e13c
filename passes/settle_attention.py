"""Makes causal `Attention` nodes with a mask in half precision agree inside."""

from __future__ import annotations

import logging

import numpy as np
import onnx_ir as ir

from passes.typed_graph import TypedModel

__all__ = ["SettleAttentionPass"]

logger = logging.getLogger(__name__)

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
LOWEST = -1e4
"""A mask's "never": whatever is below it is 0 after a softmax in every float type."""
HANDING_ON = ("Unsqueeze", "Cast", "Identity")


class SettleAttentionPass(ir.passes.InPlacePass):
    """Keep what such a node computes, in a form that loads where it is inlined.

        before   Attention<is_causal=1>(q, k, v, bf16 mask)   inlined: bf16 mask + f32
        after    Attention(q, k, v, bf16 mask)                when the mask is causal already
                 Attention<is_causal=1>(q, k, v, Cast<f32>(mask))                   otherwise

    A mask is causal already when it is 0 where a row's running count of tokens is no lower
    than the column's, and the column's token counts; then the triangle adds nothing. The
    second form is exact too, but a provider that has a kernel for a mask of q's type has
    none for it. Masks that are float32 or boolean are left.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Settle every such node of the main graph."""
        types = TypedModel(model).walk.values
        modified = False
        for node in [n for n in model.graph if n.op_type == "Attention" and n.domain == ""]:
            mask = node.inputs[3] if len(node.inputs) > 3 else None
            known = types.get(mask.name or "") if mask is not None else None
            causal = node.attributes.get_int("is_causal", 0)
            if mask is None or known is None or not causal:
                continue
            if known.sure in (None, "float", "bool"):
                continue
            modified = True
            if _is_causal(mask):
                del node.attributes["is_causal"]
                logger.debug("%s: its mask is causal already", node.name)
            else:
                _widen(node, mask)
        return ir.passes.PassResult(model, modified)


def _widen(node: ir.Node, mask: ir.Value) -> None:
    cast = ir.node("Cast", [mask], {"to": int(ir.DataType.FLOAT)}, name=f"{node.name}/mask")
    cast.outputs[0].name = f"{mask.name}_float_for_{node.outputs[0].name}"
    cast.outputs[0].dtype, cast.outputs[0].shape = ir.DataType.FLOAT, mask.shape
    assert node.graph is not None
    node.graph.insert_before(node, cast)
    node.replace_input_with(3, cast.outputs[0])


def _is_causal(mask: ir.Value) -> bool:
    """Whether `mask` is ``Where(counts[col] and row >= col, 0, lowest)`` of running counts."""
    where = _made_by(_source(mask), "Where")
    if where is None or not (_holds(where.inputs[1], 0, 0) and _below(where.inputs[2])):
        return False
    both = _made_by(where.inputs[0], "And")
    if both is None:
        return False
    for compare, counts in (both.inputs, both.inputs[::-1]):
        node = _made_by(compare, "GreaterOrEqual")
        attended = _source(counts)
        if node is not None and attended is not None and _rows_over_columns(node, attended):
            return True
    return False


def _rows_over_columns(node: ir.Node, attended: ir.Value) -> bool:
    """Whether a comparison is of the newest rows of the running count with all of it."""
    rows, columns = (_unsqueezed(value) for value in node.inputs)
    if rows is None or columns is None or (rows[1], columns[1]) != (2, 1):
        return False
    part, count = _made_by(rows[0], "Slice"), _made_by(columns[0], "CumSum")
    if part is None or count is None or part.inputs[0] is not columns[0]:
        return False
    start, end = _made_by(part.inputs[1], "Sub"), part.inputs[2]
    length = _made_by(end, "Shape")
    whole = length is not None and length.inputs[0] is attended and start is not None
    return whole and start is not None and start.inputs[0] is end and (
        count.inputs[0] is attended and _made_by(start.inputs[1], "Shape") is not None
        and _holds(count.inputs[1], 1, 1) and _holds(part.inputs[3], 1, 1)
    )  # fmt: skip


def _source(value: ir.Value | None) -> ir.Value | None:
    while value is not None:
        node = value.producer()
        if node is None or node.op_type not in HANDING_ON or node.domain != "":
            break
        value = node.inputs[0]
    return value


def _made_by(value: ir.Value | None, op: str) -> ir.Node | None:
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op and node.domain == "" else None


def _unsqueezed(value: ir.Value | None) -> tuple[ir.Value, int] | None:
    node = _made_by(value, "Unsqueeze")
    axes = _numbers(node.inputs[1]) if node is not None else None
    if node is None or node.inputs[0] is None or axes is None or axes.size != 1:
        return None
    return node.inputs[0], int(axes.reshape(-1)[0])


def _numbers(
    value: ir.Value | None,
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]] | None:
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    if tensor is None or isinstance(tensor, ir.ExternalTensor):
        return None
    return tensor.numpy().astype(np.float64)


def _holds(value: ir.Value | None, low: float, high: float) -> bool:
    numbers = _numbers(value)
    return numbers is not None and bool(((numbers >= low) & (numbers <= high)).all())


def _below(value: ir.Value | None) -> bool:
    numbers = _numbers(value)
    return numbers is not None and bool((numbers <= LOWEST).all())
