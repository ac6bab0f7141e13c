"""The recurrent state after every row of a verify, so that any of them can be committed.

Two lowerings of one idea. ONNX Runtime's CPU kernels give the state after the last row only,
so there M one-row nodes stand in a row; its CUDA kernels give all of them (`state_window`).
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import PreconditionError
from onnxscript import GraphBuilder, OpBuilder

from passes.contrib import DOMAIN, infer_outputs, is_contrib
from passes.counted import CountedPass

__all__ = ["ROWS_PREFIX", "KeepRowStatesPass"]

ROWS_PREFIX = "rows."
"""``rows.{i}.recurrent`` [M, 1, Hv, dk, dv] takes the place of ``present.{i}.recurrent``,
``rows.{i}.conv`` [1, K-1+M, conv_dim] that of ``present.{i}.conv``."""


class KeepRowStatesPass(CountedPass):
    """Keep the recurrent state after each of M rows, and the columns of the convolution.

        before   o, present = LinearAttention(q[1,M,..], .., past)
        after    q0, .. = Split(q)   o0, s0 = LinearAttention(q0, .., past)
                                     o1, s1 = LinearAttention(q1, .., s0)   ..
                 o = Concat(o0, o1, ..)     rows = stack(s0, s1, ..)

    A convolution's state after row j is a piece of ``past | x``, which is kept whole:
    ``rows = Concat(past, x)``. On the CPU all of it is exact: the kernels give the same bits
    for M rows at once and one by one.

    Refuses a graph whose rows are not M, and a recurrent node whose states are not an input
    ``past.*`` and an output that nothing else reads.
    """

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def rewrite(self, model: ir.Model) -> int:
        """See the class."""
        graph = model.graph
        names = [value.name or "" for value in graph.outputs]
        if "accepted" in names or any(name.startswith(ROWS_PREFIX) for name in names):
            return 0
        nodes = [n for n in graph if is_contrib(n, "LinearAttention", "CausalConvWithState")]
        for node in nodes:
            self._check(node)
        builder = GraphBuilder(graph)
        for node in nodes:
            past = node.inputs[3]
            assert past is not None
            name = (past.name or "").removeprefix("past.")
            builder.push_module(f"rows.{name}")
            if node.op_type == "LinearAttention":
                rows = self._unroll(builder.op, node)
            else:
                rows = self._window(builder.op, node)
            builder.pop_module()
            position = list(graph.outputs).index(node.outputs[1])
            rows.name = ROWS_PREFIX + name
            graph.outputs[position] = rows
            if node.op_type == "LinearAttention":
                graph.remove(node, safe=True)
            else:
                node.outputs[1].name = f"last.{name}"  # required by the operator, unread
        return len(nodes)

    def _check(self, node: ir.Node) -> None:
        value = node.inputs[2 if node.op_type == "LinearAttention" else 0]
        rows = None if value is None or value.shape is None else value.shape[1]
        if rows != self.rows:
            raise PreconditionError(
                f"{node.op_type} {node.name!r} has {rows} rows; the states of {self.rows} are "
                f"to be kept. Pin S to {self.rows} first"
            )
        needed = (0, 1, 2, 3, 4, 5) if node.op_type == "LinearAttention" else (0, 3)
        for index in needed:
            if index >= len(node.inputs) or node.inputs[index] is None:
                raise PreconditionError(
                    f"{node.op_type} {node.name!r} has no input {index}; of every recurrent "
                    "node the state before it, and of LinearAttention decay and beta, are used"
                )
        past, present = node.inputs[3], node.outputs[1]
        assert past is not None
        if not past.is_graph_input() or not (past.name or "").startswith("past."):
            raise PreconditionError(
                f"{node.op_type} {node.name!r} starts from {past.name!r}; a state that is to "
                "be selected afterwards must be an input named past.*"
            )
        if not present.is_graph_output() or present.uses():
            raise PreconditionError(
                f"{node.op_type} {node.name!r} ends in {present.name!r}; a state that is to "
                "be selected afterwards must be an output that no other node reads"
            )

    def _unroll(self, op: OpBuilder, node: ir.Node) -> ir.Value:
        """M one-row nodes in the place of `node`; gives the stacked states."""
        sizes = op.Constant(value_ints=[1] * self.rows)
        pieces = {
            index: op.Split(node.inputs[index], sizes, axis=1, _outputs=self.rows)
            if self.rows > 1
            else [node.inputs[index]]
            for index in (0, 1, 2, 4, 5)
        }
        state, reads, states = node.inputs[3], [], []
        for row in range(self.rows):
            q, k, v, decay, beta = (pieces[index][row] for index in (0, 1, 2, 4, 5))
            read, state = op.LinearAttention(
                q, k, v, state, decay, beta,
                _domain=DOMAIN, _version=1, _outputs=2,
                **{name: attr.value for name, attr in node.attributes.items()},
            )  # fmt: skip
            infer_outputs(read.producer())
            reads.append(read)
            states.append(op.Unsqueeze(state, op.Constant(value_ints=[0])))
        ir.convenience.replace_all_uses_with(node.outputs[0], op.Concat(*reads, axis=1))
        return op.Concat(*states, axis=0)

    def _window(self, op: OpBuilder, node: ir.Node) -> ir.Value:
        """``past | x`` along the rows."""
        return op.Concat(node.inputs[3], node.inputs[0], axis=1)
