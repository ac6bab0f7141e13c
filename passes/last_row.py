"""Only the last row's logits and hidden state, for a prompt."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import PreconditionError
from onnxscript import GraphBuilder

from passes.counted import CountedPass, output_named

__all__ = ["LastRowPass"]


class LastRowPass(CountedPass):
    """Give logits and hidden state of the last row alone.

        before   hidden [1, S, D]              logits [1, S, V] = FusedMatMul(hidden, lm_head)
        after    hidden [1, 1, D] = last row   logits [1, 1, V] = FusedMatMul(last, lm_head)

    Of a prompt only the last row's logits are ever read, and the LM head is the largest
    matrix there is. Others that read all rows of `hidden` still do.

    Refuses logits that are not made from `hidden` by one node.
    """

    def rewrite(self, model: ir.Model) -> int:
        """See the class."""
        graph = model.graph
        hidden, logits = output_named(graph, "hidden"), output_named(graph, "logits")
        if hidden.shape is not None and hidden.shape[1] == 1:
            return 0
        head = logits.producer()
        if head is None or not head.inputs or head.inputs[0] is not hidden:
            raise PreconditionError(
                f"logits is not made from {hidden.name!r} by one node (it is the output of "
                f"{'no node' if head is None else head.op_type}), so its last row cannot be "
                "taken before the LM head"
            )
        builder = GraphBuilder(graph)
        op = builder.op
        last = op.Gather(hidden, op.Constant(value_ints=[-1]), axis=1)
        head.replace_input_with(0, last)
        for old, new in ((hidden, last), (logits, logits)):
            assert new.shape is not None
            new.shape = ir.Shape([1, 1, new.shape[2]])
            graph.outputs[list(graph.outputs).index(old)] = new
        hidden.name, last.name = "hidden_rows", "hidden"
        return 1
