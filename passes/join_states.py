"""The convolution states of all layers written together, after all of them were read."""

from __future__ import annotations

import onnx_ir as ir
from onnxscript import GraphBuilder

from passes.contrib import is_contrib
from passes.counted import CountedPass, output_named

__all__ = ["CommitConvStatesPass", "JoinConvStatesPass"]


class JoinConvStatesPass(CountedPass):
    """Give the new convolution states of all layers as one output.

        before   present.{i}.conv [1, K-1, conv_dim], each written by its own convolution
        after    present.conv [L, K-1, conv_dim] = Concat of them

    The CUDA kernel for several rows must not write its state over the one it reads: other
    blocks may still read it. The joined output comes after every convolution, so it may.
    """

    def rewrite(self, model: ir.Model) -> int:
        """See the class."""
        graph = model.graph
        states = [
            node.outputs[1]
            for node in graph
            if is_contrib(node, "CausalConvWithState")
            and len(node.outputs) > 1
            and (node.outputs[1].name or "").startswith("present.")
        ]
        if not states:
            return 0
        kept = [value for value in graph.outputs if value not in states]
        graph.outputs.clear()
        graph.outputs.extend(kept)
        for value in states:
            value.name = "last." + (value.name or "").removeprefix("present.")
        builder = GraphBuilder(graph)
        builder.push_module("states")
        builder.add_output(builder.op.Concat(*states, axis=0), "present.conv")
        return len(states)


class CommitConvStatesPass(CountedPass):
    """Write convolution states aside, and commit them together at the end of the graph.

        before   present.{i}.conv, each written by its own node over what it reads
        after    rows.{i}.conv, and present.conv [L, K-1, conv_dim] = rows.conv[:, accepted]

    For a one-row graph whose kernel reads a state in one block and writes it in another:
    over each other they would race. `rows.conv` [L, M, K-1, conv_dim] is a view of the
    memory that ``rows.{i}.conv`` are written to, as in a verify.
    """

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def rewrite(self, model: ir.Model) -> int:
        """See the class."""
        graph = model.graph
        states = [
            value
            for value in graph.outputs
            if (value.name or "").startswith("present.")
            and (value.name or "").endswith(".conv")
            and (value.name or "").count(".") == 2
        ]
        if not states:
            return 0
        shape = states[0].shape
        assert shape is not None
        accepted = output_named(graph, "accepted")
        for value in states:
            value.name = "rows." + (value.name or "").removeprefix("present.")
        builder = GraphBuilder(graph)
        builder.push_module("commit")
        op = builder.op
        dims = [len(states), self.rows, *shape[1:]]
        view = builder.input("rows.conv", states[0].dtype, ir.Shape(dims))
        count = op.Squeeze(accepted, op.Constant(value_ints=[0]))
        builder.add_output(op.Gather(view, count, axis=1), "present.conv")
        return len(states)
