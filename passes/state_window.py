"""The recurrent state after every row, by the kernels' own state window (CUDA)."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import PreconditionError

from passes.contrib import infer_outputs, is_contrib
from passes.counted import CountedPass
from passes.row_states import ROWS_PREFIX

__all__ = ["MAX_WINDOW", "StateWindowPass"]

MAX_WINDOW = 8
"""Most states that ONNX Runtime's kernels keep (`state_window`)."""


class StateWindowPass(CountedPass):
    """Let LinearAttention and CausalConvWithState keep the states after all M rows.

        before   o, present [1, ..] = LinearAttention(q[1,M,..], .., past [1, ..])
        after    o, rows [M, 1, ..] = LinearAttention<state_window=M>(.., past [M, 1, ..])

    Of `past` the kernel reads the last slot alone, so a port of M slots may be laid over
    memory in such a way that only its last one is a state of this layer. Slot j of `rows` is
    the state after row j. ``rows.{i}.*`` takes the place of ``present.{i}.*``.

    Refuses more rows than `MAX_WINDOW`, and a graph whose rows are not M.
    """

    def __init__(self, rows: int) -> None:
        super().__init__()
        if not 1 <= rows <= MAX_WINDOW:
            raise ValueError(
                f"{rows} rows: the kernels keep at most {MAX_WINDOW} states, so k is at most "
                f"{MAX_WINDOW - 1} on CUDA"
            )
        self.rows = rows

    def rewrite(self, model: ir.Model) -> int:
        """See the class."""
        graph = model.graph
        nodes = [
            node
            for node in graph
            if is_contrib(node, "LinearAttention", "CausalConvWithState")
            and len(node.outputs) > 1
            and node.outputs[1].is_graph_output()
            and (node.outputs[1].name or "").startswith("present.")
        ]
        for node in nodes:
            self._check(node)
        for node in nodes:
            past, rows = node.inputs[3], node.outputs[1]
            assert past is not None and past.shape is not None
            past.shape = ir.Shape([self.rows, *past.shape.dims])
            node.attributes["state_window"] = ir.AttrInt64("state_window", self.rows)
            infer_outputs(node)
            rows.name = ROWS_PREFIX + (rows.name or "").removeprefix("present.")
        return len(nodes)

    def _check(self, node: ir.Node) -> None:
        value, past = (
            node.inputs[2 if node.op_type == "LinearAttention" else 0],
            node.inputs[3],
        )
        rows = None if value is None or value.shape is None else value.shape[1]
        if rows != self.rows:
            raise PreconditionError(
                f"{node.op_type} {node.name!r} has {rows} rows; the states of {self.rows} are "
                f"to be kept. Pin S to {self.rows} first"
            )
        if past is None or not past.is_graph_input():
            raise PreconditionError(
                f"{node.op_type} {node.name!r} does not take its state from a graph input"
            )
