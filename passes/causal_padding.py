"""Unused rows at the end of a fixed-size verify, made harmless."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import onnx_ir as ir
from onnx_ir.passes import PreconditionError
from onnxscript import GraphBuilder

from passes.contrib import DOMAIN
from passes.counted import CountedPass, input_named, output_named
from passes.own_kernels import OWN_DOMAIN

__all__ = ["CausalPaddingPass"]

INT32 = ir.DataType.INT32


class CausalPaddingPass(CountedPass):
    """Let M rows serve any smaller number: those after ``1 + draft_count`` are padding.

        before   input_ids [1, M]    x = Gather(embed, input_ids)
        after    draft_count [1]     ids = Where(row <= draft_count, input_ids, input_ids[0])
                                     x = Gather(embed, ids)

    Padding rows stand at the end and take the id of the first row, a real token: whatever a
    stale buffer holds there (an id outside the vocabulary, an all-zero row that a norm
    without epsilon turns into NaN) never enters. That they disturb no earlier row is proved
    here, not assumed: every operator between the ids and the outputs must work row by row,
    or be one that is causal by contract. An operator that mixes rows in any other way is
    refused, by name; so is one that reads a state or a cache which holds all rows.

    The states after the last row, padding included, are what `KeepRowStatesPass` replaces.
    """

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def rewrite(self, model: ir.Model) -> int:
        """See the class."""
        graph = model.graph
        if any(value.name == "draft_count" for value in graph.inputs):
            return 0
        ids = input_named(graph, "input_ids")
        if ids.shape is None or ids.shape != (1, self.rows):
            raise PreconditionError(
                f"input_ids is {ids.shape}; padding needs [1, {self.rows}]. Pin S first"
            )
        axes = _row_axes(graph, ids)
        for name in ("logits", "hidden"):
            if axes.get(output_named(graph, name)) != 1:
                raise PreconditionError(
                    f"{name} does not have the rows of input_ids on axis 1"
                )
        builder = GraphBuilder(graph)
        builder.push_module("padding")
        draft_count = builder.input("draft_count", INT32, [1])
        op = builder.op
        readers = list(ids.uses())
        first = op.Gather(ids, op.Constant(value_ints=[0]), axis=1)
        row = op.Constant(value=ir.tensor([list(range(self.rows))], INT32))
        counts = op.LessOrEqual(row, draft_count)
        kept = op.Where(counts, ids, first)
        for node, index in readers:
            node.replace_input_with(index, kept)
        return len(readers)


def _row_axes(graph: ir.Graph, ids: ir.Value) -> dict[ir.Value, int]:
    """For every value that has the rows of `ids`: on which axis.

    Raises:
        PreconditionError: An operator mixes rows and is not causal by contract.
    """
    axes: dict[ir.Value, int] = {ids: 1}
    mixed: set[ir.Value] = set()
    for node in graph:
        for value in _read(node):
            if value is not None and value in mixed:
                raise PreconditionError(
                    f"{node.op_type} {node.name!r} reads {value.name!r}, which padding rows "
                    "have entered: states and caches may only be outputs of a verify"
                )
        rowed = [(i, v) for i, v in enumerate(_read(node)) if v is not None and v in axes]
        if not rowed:
            continue
        rule = _RULES.get((node.domain, node.op_type))
        axis = None if rule is None else rule(node, {i: axes[v] for i, v in rowed})
        if axis is None:
            raise PreconditionError(
                f"{node.op_type} {node.name!r} may mix the rows of {rowed[0][1].name!r}: a "
                "padding row could change an earlier one. Rows must be worked on one by one "
                "or by a causal operator (" + ", ".join(sorted(CAUSAL)) + ")"
            )
        with_rows = _OUTPUTS_WITH_ROWS.get(node.op_type, (0,))
        for index, value in enumerate(node.outputs):
            if node.op_type == "Split" or index in with_rows:
                axes[value] = axis
            else:
                mixed.add(value)
    return axes


def _read(node: ir.Node) -> Iterator[ir.Value | None]:
    """What `node` reads: its inputs, then whatever its subgraphs capture."""
    yield from node.inputs
    for attribute in node.attributes.values():
        if attribute.type is ir.AttributeType.GRAPH:
            body = attribute.as_graph()
            yield from body.outputs
            for inner in body.all_nodes():
                yield from inner.inputs


Axes = dict[int, int]
Rule = Callable[[ir.Node, Axes], int | None]


def _rank(node: ir.Node, index: int) -> int:
    value = node.inputs[index]
    if value is None or value.shape is None:
        raise PreconditionError(f"{node.op_type} {node.name!r}: input {index} has no shape")
    return value.shape.rank()


def _elementwise(node: ir.Node, axes: Axes) -> int | None:
    """Broadcasting aligns from the right: rows must meet rows, or something without rows."""
    present = [i for i, value in enumerate(node.inputs) if value is not None]
    rank = max(_rank(node, i) for i in present)
    places = {rank - _rank(node, i) + axis for i, axis in axes.items()}
    return places.pop() if len(places) == 1 else None


def _last_axis(node: ir.Node, axes: Axes) -> int | None:
    """Works along the last axis only, and only its first input has rows."""
    axis = axes.get(0)
    if axis is None or set(axes) != {0} or axis == _rank(node, 0) - 1:
        return None
    return axis if node.attributes.get_int("axis", -1) in (-1, _rank(node, 0) - 1) else None


def _normalised(node: ir.Node, axes: Axes) -> int | None:
    """A norm over the last axis of inputs that all have rows on the same other one."""
    axis = _elementwise(node, axes)
    return None if axis is None or axis == _rank(node, 0) - 1 else axis


def _matmul(node: ir.Node, axes: Axes) -> int | None:
    """A plain matrix on the right; one with batch axes would move or meet the rows."""
    moved = any(node.attributes.get_int(name, 0) for name in _MOVING)
    if set(axes) != {0} or moved or (node.op_type == "FusedMatMul" and _rank(node, 1) != 2):
        return None
    return _last_axis(node, axes)


def _gather(node: ir.Node, axes: Axes) -> int | None:
    """Rows among the indices; the table has none."""
    if set(axes) != {1}:
        return None
    return node.attributes.get_int("axis", 0) % _rank(node, 0) + axes[1]


def _reshape(node: ir.Node, axes: Axes) -> int | None:
    """The leading axes up to the rows are copied (a 0) or stated alike."""
    if set(axes) != {0}:
        return None
    old, new = node.inputs[0], node.outputs[0]
    assert old is not None
    axis = axes[0]
    if old.shape is None or new.shape is None:
        return None
    kept = old.shape[: axis + 1]
    known = all(isinstance(size, int) for size in kept)  # two unknown sizes prove nothing
    return axis if known and kept == new.shape[: axis + 1] else None


def _other_axis(node: ir.Node, axes: Axes) -> int | None:
    """Split and Concat along another axis than the rows'."""
    axis = _elementwise(node, axes)
    along = node.attributes.get_int("axis", 0)
    return None if axis is None or along % _rank(node, min(axes)) == axis else axis


def _causal(node: ir.Node, axes: Axes) -> int | None:
    """Causal by contract along axis 1 of the inputs that may have rows."""
    if node.op_type == "GroupQueryAttention" and not node.attributes.get_int("causal", 1):
        return None
    if node.op_type == "CausalConvWithState" and not node.attributes.get_int(
        "channels_last", 0
    ):
        return None  # its time is axis 2
    return 1 if set(axes.values()) == {1} and set(axes) <= CAUSAL[node.op_type] else None


CAUSAL = {
    "CausalConvWithState": {0},
    "GroupQueryAttention": {0, 1, 2},
    "LinearAttention": {0, 1, 2, 4, 5},
}
"""The operators, and which of their inputs may have rows."""
_MOVING = ("transA", "transBatchA", "transBatchB")
_OUTPUTS_WITH_ROWS = {
    "LinearAttentionGate": (0, 1),
    "SkipSimplifiedLayerNormalization": (0, 3),
}
_RULES: dict[tuple[str, str], Rule] = {
    **{
        ("", name): _elementwise
        for name in ("Add", "Cast", "Identity", "Mul", "Sigmoid", "Softplus", "Sub")
    },
    ("", "Concat"): _other_axis,
    ("", "Gather"): _gather,
    ("", "RMSNormalization"): _last_axis,
    ("", "Reshape"): _reshape,
    ("", "Split"): _other_axis,
    (DOMAIN, "FusedMatMul"): _matmul,
    (DOMAIN, "GatedRMSNorm"): _normalised,
    (DOMAIN, "LinearAttentionGate"): _elementwise,
    (DOMAIN, "MatMulNBits"): _matmul,
    (OWN_DOMAIN, "MatMulW4"): _matmul,
    (DOMAIN, "QuickGelu"): _elementwise,
    (DOMAIN, "SkipSimplifiedLayerNormalization"): _normalised,
    **{(DOMAIN, name): _causal for name in CAUSAL},
}
