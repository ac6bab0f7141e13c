"""The convolution states of all layers written together, after all of them were read."""

from __future__ import annotations

import onnx_ir as ir
from onnxscript import GraphBuilder

from passes.contrib import is_contrib
from passes.counted import CountedPass

__all__ = ["JoinConvStatesPass"]


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
