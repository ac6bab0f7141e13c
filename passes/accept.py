"""The end of a verify, inside the graph: which drafts stand, and what is committed."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import PreconditionError
from onnxscript import GraphBuilder, OpBuilder

from passes.contrib import is_contrib
from passes.counted import CountedPass, input_named, output_named
from passes.row_states import ROWS_PREFIX

__all__ = ["AcceptPass", "GreedyTailPass"]

FLOAT, INT32, INT64 = ir.DataType.FLOAT, ir.DataType.INT32, ir.DataType.INT64


def _ints(op: OpBuilder, values: object, dtype: ir.DataType = INT64) -> ir.Value:
    return op.Constant(value=ir.tensor(np.array(values, dtype.numpy())))


class AcceptPass(CountedPass):
    """Append argmax, accepted count, commit and next length to a verify graph of M rows.

        best [1, M]     = ArgMax(logits)
        accepted [1]    = drafts in front that equal the argmax of the row before them
        present.*       = the state after row `accepted`, out of ``rows.*``
        next_length [1] = past_length + accepted + 1
        next_token      = best[accepted]
        result [2M + 2] = accepted, next_length, best, finite: all that the host reads

    ``past_length``, ``input_ids`` and the states may be updated in place: every output that
    goes onto them depends on `accepted`, and `accepted` on all that reads them.

    With `together`, the states of all layers are committed by one kernel each for the
    recurrent and the convolution states: the graph gets inputs ``rows.recurrent``
    [L, M, Hv, dk, dv] and ``rows.conv`` that are views of the memory that ``rows.{i}.*`` are
    written to, and outputs ``present.recurrent`` [L, Hv, dk, dv] and ``present.conv``.

    The count needs no cumulative product (no CUDA kernel): with c the running sum of
    matches, draft j stands when c[j] = j + 1.

    Refuses a graph of other than M rows, and one that gives out a state after the last row:
    padding and rejected drafts are in it.
    """

    def __init__(self, rows: int, *, together: bool = False) -> None:
        super().__init__()
        if rows < 2:
            raise ValueError(f"a verify has at least 2 rows, not {rows}; use GreedyTailPass")
        self.rows = rows
        self.together = together

    def rewrite(self, model: ir.Model) -> int:
        """See the class."""
        graph = model.graph
        if any(value.name == "accepted" for value in graph.outputs):
            return 0
        ids, past_length = (input_named(graph, name) for name in ("input_ids", "past_length"))
        draft_count = input_named(graph, "draft_count")
        logits = output_named(graph, "logits")
        if ids.shape != (1, self.rows) or logits.shape is None or logits.shape[1] != self.rows:
            raise PreconditionError(
                f"input_ids is {ids.shape} and logits {logits.shape}; a verify of {self.rows} "
                f"rows needs [1, {self.rows}] and [1, {self.rows}, V]. Pin S first"
            )
        for value in graph.outputs:
            node = value.producer()
            if node is not None and "state_window" in node.attributes:
                continue  # the kernel's own window: the states of all rows
            if node and is_contrib(node, "LinearAttention", "CausalConvWithState"):
                raise PreconditionError(
                    f"output {value.name!r} is the state after the last row, rejected drafts "
                    "included. Run KeepRowStatesPass first"
                )
        builder = GraphBuilder(graph)
        builder.push_module("accept")
        op = builder.op
        best = _best(op, logits)
        accepted = self._accepted(op, ids, best, draft_count)
        count = op.Squeeze(accepted, _ints(op, [0]))
        commit = self._commit_together if self.together else self._commit_each
        commits = commit(builder, count)
        next_token = op.Gather(best, accepted, axis=1)
        step = op.Cast(op.Add(accepted, _ints(op, [1])), to=INT32)
        next_length = op.Add(past_length, step)
        _finish(builder, logits, best, accepted, next_token, next_length)
        return commits + 1

    def _accepted(
        self, op: OpBuilder, ids: ir.Value, best: ir.Value, draft_count: ir.Value
    ) -> ir.Value:
        """int64 [1]: leading drafts that are right, of those that count."""
        k = self.rows - 1
        drafts = op.Slice(ids, _ints(op, [1]), _ints(op, [k + 1]), _ints(op, [1]))
        before = op.Slice(best, _ints(op, [0]), _ints(op, [k]), _ints(op, [1]))
        counts = op.Less(_ints(op, [list(range(k))], INT32), draft_count)
        right = op.And(op.Equal(drafts, before), counts)
        running = op.CumSum(op.Cast(right, to=INT32), _ints(op, 1))
        stands = op.Equal(running, _ints(op, [list(range(1, k + 1))], INT32))
        total = op.ReduceSum(op.Cast(stands, to=INT32), _ints(op, [1]), keepdims=0)
        return op.Cast(total, to=INT64)

    def _commit_each(self, builder: GraphBuilder, count: ir.Value) -> int:
        """``present.{i}.*`` in the place of ``rows.{i}.*``."""
        outputs, commits = builder.graph.outputs, 0
        for position, rows in enumerate(list(outputs)):
            name = rows.name or ""
            if name.startswith(ROWS_PREFIX):
                committed = self._commit(builder.op, name, rows, count)
                committed.name = "present." + name.removeprefix(ROWS_PREFIX)
                outputs[position] = committed
                commits += 1
        return commits

    def _commit_together(self, builder: GraphBuilder, count: ir.Value) -> int:
        """``present.recurrent`` and ``present.conv`` out of views of all layers' rows."""
        commits = 0
        for kind in ("recurrent", "conv"):
            layers = [
                value
                for value in builder.graph.outputs
                if (value.name or "").startswith(ROWS_PREFIX)
                and (value.name or "").endswith(f".{kind}")
            ]
            if not layers:
                continue
            shape = layers[0].shape
            assert shape is not None  # [M, 1, ..], from the kernel's contract
            dims = [len(layers), self.rows, *shape[2:]]
            view = builder.input(f"{ROWS_PREFIX}{kind}", layers[0].dtype, ir.Shape(dims))
            builder.add_output(builder.op.Gather(view, count, axis=1), f"present.{kind}")
            commits += 1
        return commits

    def _commit(self, op: OpBuilder, name: str, rows: ir.Value, count: ir.Value) -> ir.Value:
        """The state after ``count + 1`` rows; `count` is an int64 scalar."""
        if name.endswith(".recurrent"):
            return op.Gather(rows, count, axis=0)
        assert rows.shape is not None and isinstance(rows.shape[1], int)
        kept = rows.shape[1] - self.rows
        columns = op.Add(count, _ints(op, list(range(1, kept + 1))))
        return op.Gather(rows, columns, axis=1)


class GreedyTailPass(CountedPass):
    """Append the same outputs to a graph that has nothing to accept (decode, prefill).

        best [1, 1] = next_token = ArgMax(logits)     accepted [1] = 0
        next_length [1] = last_row + 1       result [4] = 0, next_length, best, finite

    `last_row` is what the attention layers read, so that a length updated in place is
    written after it was read. Refuses logits of more than one row.
    """

    def rewrite(self, model: ir.Model) -> int:
        """See the class."""
        graph = model.graph
        if any(value.name == "accepted" for value in graph.outputs):
            return 0
        logits = output_named(graph, "logits")
        if logits.shape is None or logits.shape[1] != 1:
            raise PreconditionError(
                f"logits is {logits.shape}; a greedy tail takes one row, [1, 1, V]. Pin S "
                "to 1 or run LastRowPass first"
            )
        last_row = _last_row(graph)
        builder = GraphBuilder(graph)
        builder.push_module("greedy")
        op = builder.op
        best = _best(op, logits)
        accepted = op.Mul(op.Squeeze(best, _ints(op, [0])), _ints(op, [0]))
        next_length = op.Add(last_row, _ints(op, [1], INT32))
        _finish(builder, logits, best, accepted, op.Identity(best), next_length)
        return 1


def _last_row(graph: ir.Graph) -> ir.Value:
    for node in graph:
        for value in node.outputs:
            if value.name == "last_row":
                return value
    raise PreconditionError(
        f"graph {graph.name!r} computes no last_row, which its attention layers should read"
    )


def _best(op: OpBuilder, logits: ir.Value) -> ir.Value:
    """int64 [1, rows]; ArgMax has no bfloat16 kernel."""
    if logits.dtype == ir.DataType.BFLOAT16:
        logits = op.Cast(logits, to=FLOAT)
    return op.ArgMax(logits, axis=2, keepdims=0)


def _finite(op: OpBuilder, logits: ir.Value, best: ir.Value) -> ir.Value:
    """int64 [1, rows, 1]: 1 where a row's highest logit is a number, 0 for NaN and infinity.

    A NaN in a row's hidden state makes all its logits NaN, an overflow makes the highest
    infinite, so the one logit is enough.
    """
    peak = op.GatherElements(logits, op.Unsqueeze(best, _ints(op, [2])), axis=2)
    if peak.dtype != FLOAT:
        peak = op.Cast(peak, to=FLOAT)
    zero = op.Constant(value=ir.tensor(np.zeros(1, np.float32)))
    return op.Cast(op.Equal(op.Sub(peak, peak), zero), to=INT64)


def _finish(
    builder: GraphBuilder,
    logits: ir.Value,
    best: ir.Value,
    accepted: ir.Value,
    next_token: ir.Value,
    next_length: ir.Value,
) -> None:
    op = builder.op
    flat = op.Reshape(best, _ints(op, [-1]))
    finite = op.Reshape(_finite(op, logits, best), _ints(op, [-1]))
    result = op.Concat(accepted, op.Cast(next_length, to=INT64), flat, finite, axis=0)
    builder.add_output(best, "best")
    builder.add_output(accepted, "accepted")
    builder.add_output(next_token, "next_token")
    builder.add_output(next_length, "next_length")
    builder.add_output(result, "result")
    builder.pop_module()
