"""Sampling inside the graph: the token that each row's own distribution and noise choose."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import PreconditionError
from onnxscript import GraphBuilder, OpBuilder

from artifacts import SAMPLED_RANKS
from passes.counted import CountedPass, input_named, output_named

__all__ = ["SamplePass"]

FLOAT, INT32, INT64 = ir.DataType.FLOAT, ir.DataType.INT32, ir.DataType.INT64
NEVER = np.float32(-3e38)
"""Score of a token that a limit leaves out: below every sum of a logit and noise."""


class SamplePass(CountedPass):
    """Let `best` be a sampled token of each row; run it after the pass that made `best`.

        before   best [1, M] = ArgMax(logits)
        after    best [1, M] = candidate with the largest score, of the R likeliest tokens

    With x the R largest logits of a row (R = 256, or the vocabulary if that is smaller):

        x      penalised where the token stands in the prompt, the output, or a draft before
               the row; then sorted again
        z      (x - x[0]) / temperature            rank r counts from 0 here
        keep   r < top_k;  p[0] + .. + p[r-1] < top_p;  p[r] >= min_p * p[0]
        score  z + noise[r] where kept

    `noise` is Gumbel noise from the host, so the choice is exactly a draw from the kept
    tokens' distribution, and the same noise gives the same token: a draft stands iff it is
    the token that this row samples. Nothing random is drawn inside a graph, where a replay
    would repeat it.

    Only kernels that ONNX Runtime has for CUDA are used, none with an input in the host's
    memory but constants. The flag `finite` looks at the row's largest logit as before.
    """

    def rewrite(self, model: ir.Model) -> int:
        """See the class."""
        graph = model.graph
        if any(value.name == "sample.noise" for value in graph.inputs):
            return 0
        logits, greedy = output_named(graph, "logits"), output_named(graph, "best")
        choice = greedy.producer()
        if choice is None or choice.op_type != "ArgMax":
            raise PreconditionError(
                f"best of graph {graph.name!r} is no ArgMax; run the pass that adds it before"
            )
        uses = list(greedy.uses())
        builder = GraphBuilder(graph)
        builder.push_module("sample")
        sampled, likeliest = _Sampler(builder, logits).write()
        builder.pop_module()
        for use in uses:
            looks = _feeds_gather_elements(use.node)
            use.node.replace_input_with(use.idx, likeliest if looks else sampled)
        outputs = graph.outputs
        outputs[list(outputs).index(greedy)] = sampled
        greedy.name, sampled.name = None, "best"
        return 1


def _feeds_gather_elements(node: ir.Node) -> bool:
    """Whether `node` hands tokens to a look-up of their logits: the flag `finite`."""
    return any(use.node.op_type == "GatherElements" for use in node.outputs[0].uses())


def _const(op: OpBuilder, values: object, dtype: ir.DataType = FLOAT) -> ir.Value:
    return op.Constant(value=ir.tensor(np.array(values, dtype.numpy())))


class _Sampler:
    """The nodes while they are written; all values are [1, M, R] unless they say otherwise."""

    def __init__(self, builder: GraphBuilder, logits: ir.Value) -> None:
        self.builder, self.op, self.logits = builder, builder.op, logits
        assert logits.shape is not None
        _, rows, vocab = logits.shape
        assert isinstance(rows, int) and isinstance(vocab, int)  # pinned before
        self.rows, self.vocab = rows, vocab
        self.ranks = min(SAMPLED_RANKS, vocab)

    def _input(self, name: str, shape: list[int], dtype: ir.DataType = FLOAT) -> ir.Value:
        return self.builder.input(f"sample.{name}", dtype, shape)

    def write(self) -> tuple[ir.Value, ir.Value]:
        """The sampled and the likeliest token of each row, both int64 [1, M]."""
        op = self.op
        ranks = _const(op, [self.ranks], INT64)
        top, tokens = op.TopK(self.logits, ranks, axis=2, _outputs=2)
        if top.dtype != FLOAT:
            top = op.Cast(top, to=FLOAT)
        likeliest = op.Squeeze(op.Gather(tokens, _const(op, [0], INT64), axis=2), self._two())
        x, order = op.TopK(self._penalised(top, tokens), ranks, axis=2, _outputs=2)
        score = op.ArgMax(self._scores(x), axis=2, keepdims=1)
        place = op.GatherElements(order, score, axis=2)
        sampled = op.Squeeze(op.GatherElements(tokens, place, axis=2), self._two())
        return sampled, likeliest

    def _two(self) -> ir.Value:
        return _const(self.op, [2], INT64)

    def _scores(self, x: ir.Value) -> ir.Value:
        """`x` is sorted, largest first."""
        op, zero = self.op, _const(self.op, [0], INT64)
        noise = self._input("noise", [1, self.rows, self.ranks])
        below = op.Sub(x, op.Gather(x, zero, axis=2))
        z = op.Div(below, self._input("temperature", [1]))
        rank = _const(op, [[list(range(self.ranks))]], INT32)
        near = op.Less(rank, self._input("top_k", [1], INT32))
        p = op.Softmax(op.Where(near, z, _const(op, NEVER)), axis=2)
        before = op.Sub(op.CumSum(p, _const(op, 2, INT64)), p)
        within = op.Less(before, self._input("top_p", [1]))
        floor = op.Mul(op.Gather(p, zero, axis=2), self._input("min_p", [1]))
        likely = op.GreaterOrEqual(p, floor)
        first = op.Equal(rank, _const(op, 0, INT32))
        keep = op.Or(first, op.And(near, op.And(within, likely)))
        return op.Where(keep, op.Add(z, noise), _const(op, NEVER))

    def _penalised(self, x: ir.Value, tokens: ir.Value) -> ir.Value:
        """Logits after the penalties: repetition on all tokens, the others on the output."""
        op, zero = self.op, _const(self.op, 0.0)
        prompt = op.Gather(self._input("prompt", [self.vocab]), tokens, axis=0)
        count = op.Gather(self._input("counts", [self.vocab]), tokens, axis=0)
        if self.rows > 1:
            count = op.Add(count, self._drafted(tokens))
        repeated = op.Greater(op.Add(prompt, count), zero)
        factor = self._input("repetition_penalty", [1])
        stretched = op.Where(op.Greater(x, zero), op.Div(x, factor), op.Mul(x, factor))
        x = op.Where(repeated, stretched, x)
        there = op.Cast(op.Greater(count, zero), to=FLOAT)
        x = op.Sub(x, op.Mul(there, self._input("presence_penalty", [1])))
        return op.Sub(x, op.Mul(count, self._input("frequency_penalty", [1])))

    def _drafted(self, tokens: ir.Value) -> ir.Value:
        """How often each candidate of row r stands among the drafts of rows 1..r."""
        op, m = self.op, self.rows
        ids = input_named(self.builder.graph, "input_ids")
        row = op.Reshape(ids, _const(op, [1, 1, 1, m], INT64))
        same = op.Equal(op.Unsqueeze(tokens, _const(op, [3], INT64)), row)
        before = np.tril(np.ones((m, m), np.float32))
        before[:, 0] = 0  # row 0 is the newest token, which the host has counted
        seen = op.Mul(op.Cast(same, to=FLOAT), _const(op, before[None, :, None, :]))
        return op.ReduceSum(seen, _const(op, [3], INT64), keepdims=0)
