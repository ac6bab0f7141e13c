"""The draft graph: the head over the verified rows, then k guesses of its own."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import FunctionalPass, PassResult, PreconditionError
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnxscript import GraphBuilder

from passes.contrib import infer_outputs
from passes.counted import input_named, output_named
from passes.pin_shapes import PinShapesPass
from passes.splice import splice

__all__ = ["DraftPass"]

INT32, INT64 = ir.DataType.INT32, ir.DataType.INT64


class DraftPass(FunctionalPass):
    """From the canonical head, the graph that drafts k tokens after a verify of k + 1 rows.

        inputs   best [1, M], hidden [1, M, D], accepted [1], length [1], past.0.*
        outputs  ids [1, M] = the newest token, then k guesses: the next verify's input_ids
                 present.0.* and, for each further guess, present.0.*.{j}

        r      = min(row, accepted)
        rows   = head(best[r], hidden[r], past)                  at length - accepted - 1 ..
        m      = rows[accepted]           d1 = argmax(lm_head(m))
        m, d2  = head(d1, m), ..                                 at length, length + 1, ..

    The catch-up runs over all M rows with the *target's* hidden states, since the token
    after row r is ``best[r]``; rows after `accepted` are padding and are overwritten by the
    next catch-up. So no row made from the head's own states stays in its cache. Padding
    repeats row `accepted`: after a prefill nothing has been written behind it yet, and what
    a buffer holds there may be no token at all, or NaN, which a masked score of zero does
    not stop.

    Every copy of the head reads ``past.0.*`` itself and all its outputs are meant for that
    same memory: each guess depends on the one before, so they run in order, and no cache is
    copied from copy to copy.

    Refuses a model that is not a canonical head: its inputs and outputs by name, and logits
    made from `hidden_out` by one node.
    """

    def __init__(self, k: int) -> None:
        super().__init__()
        if k < 1:
            raise ValueError(f"k = {k}: a draft graph makes at least one guess")
        self.k = k
        self.changes = 0

    def call(self, model: ir.Model) -> PassResult:
        """Build the draft graph; `model` is left as it is."""
        graph = ir.Graph(
            [], [], nodes=[], opset_imports=dict(model.graph.opset_imports), name="draft"
        )
        draft = ir.Model(graph, ir_version=model.ir_version, producer_name=model.producer_name)
        _Draft(GraphBuilder(graph), model, self.k).write()
        RemoveUnusedNodesPass()(draft)
        graph.sort()
        self.changes = self.k
        return PassResult(draft, modified=True)


class _Draft:
    """The graph while it is written."""

    def __init__(self, builder: GraphBuilder, head: ir.Model, k: int) -> None:
        self.builder, self.op, self.k = builder, builder.op, k
        _check(head.graph)
        self.rows_head = head.clone()
        PinShapesPass({"S": k + 1})(self.rows_head)
        self.row_head = head.clone()
        PinShapesPass({"S": 1})(self.row_head)
        source = head.graph
        hidden = input_named(source, "hidden")
        assert hidden.dtype is not None and hidden.shape is not None
        self.best = builder.input("best", INT64, [1, k + 1])
        width = hidden.shape[2]
        assert isinstance(width, int)
        self.hidden = builder.input("hidden", hidden.dtype, [1, k + 1, width])
        self.accepted = builder.input("accepted", INT64, [1])
        self.length = builder.input("length", INT32, [1])
        self.caches = {
            value.name or "": builder.input(value.name or "", value.dtype, value.shape)
            for value in source.inputs
            if (value.name or "").startswith("past.")
        }

    def write(self) -> None:
        """See `DraftPass`."""
        op = self.op
        one = op.Constant(value=ir.tensor([1], INT32))
        accepted = op.Cast(self.accepted, to=INT32)
        start = op.Sub(op.Sub(self.length, accepted), one)
        presents: list[ir.Value] = []
        row = op.Constant(value=ir.tensor(list(range(self.k + 1)), INT64))
        row = op.Min(row, self.accepted)
        best, hidden = (op.Gather(rows, row, axis=1) for rows in (self.best, self.hidden))
        rows = self._head(self.rows_head, "catch-up", best, hidden, start)
        presents += self._caches(rows, "")
        state = op.Gather(rows["hidden_out"], self.accepted, axis=1)
        guesses = [op.Gather(self.best, self.accepted, axis=1)]
        guesses.append(self._guess(rows["logits"], state))
        length = self.length
        for j in range(2, self.k + 1):
            row = self._head(self.row_head, f"guess-{j}", guesses[-1], state, length)
            presents += self._caches(row, f".{j}")
            state = row["hidden_out"]
            guesses.append(self._guess(row["logits"], state))
            length = op.Add(length, one)
        self.builder.add_output(op.Concat(*guesses, axis=1), "ids")
        for value in presents:
            self.builder.add_output(value, value.name)

    def _head(
        self, model: ir.Model, name: str, ids: ir.Value, hidden: ir.Value, length: ir.Value
    ) -> dict[str, ir.Value]:
        ties = {"next_ids": ids, "hidden": hidden, "past_length": length, **self.caches}
        return splice(model.graph, self.builder.graph, ties, prefix=f"{name}/")

    def _caches(self, outputs: dict[str, ir.Value], suffix: str) -> list[ir.Value]:
        caches = []
        for name, value in outputs.items():
            if name.startswith("present."):
                value.name = name + suffix
                caches.append(value)
        return caches

    def _guess(self, logits: ir.Value, state: ir.Value) -> ir.Value:
        """int64 [1, 1]: the LM head's first choice for one row `state` [1, 1, D].

        `logits` are what a copy of the head would give for all its rows; the same node is
        written again for the one row, and the old one falls away unread.
        """
        wide = logits.producer()
        assert wide is not None
        graph = self.builder.graph
        node = ir.node(
            wide.op_type,
            [state, *wide.inputs[1:]],
            {name: attribute.value for name, attribute in wide.attributes.items()},
            domain=wide.domain,
            name=f"{wide.name}/row" if wide.name else None,
        )
        node.outputs[0].name = f"{logits.name}/row"
        graph.append(node)
        infer_outputs(node)
        chosen = node.outputs[0]
        if chosen.dtype == ir.DataType.BFLOAT16:  # for which ArgMax has no kernel
            chosen = self.op.Cast(chosen, to=ir.DataType.FLOAT)
        return self.op.ArgMax(chosen, axis=2, keepdims=0)


def _check(head: ir.Graph) -> None:
    state, logits = output_named(head, "hidden_out"), output_named(head, "logits")
    names = [value.name or "" for value in head.inputs]
    caches = [name for name in names if name.startswith("past.")]
    if sorted(names) != sorted(["next_ids", "hidden", "past_length", *caches]) or not caches:
        raise PreconditionError(
            f"graph {head.name!r} has the inputs {', '.join(names)}; a head has next_ids, "
            "hidden, past_length and past.*"
        )
    for name in caches:
        output_named(head, name.replace("past.", "present."))
    wide = logits.producer()
    if wide is None or not wide.inputs or wide.inputs[0] is not state:
        raise PreconditionError(
            f"graph {head.name!r} does not make logits from hidden_out by one node, so they "
            "cannot be made for one row alone"
        )
    hidden = input_named(head, "hidden")
    if (
        hidden.shape is None
        or hidden.shape.rank() != 3
        or not isinstance(hidden.shape[2], int)
    ):
        raise PreconditionError(f"hidden is {hidden.shape}; a head takes [1, S, D]")
