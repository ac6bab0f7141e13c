"""Matrices in four bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from artifacts.packed_w4 import BLOCK
from passes.contrib import DOMAIN, infer_outputs, is_projection
from passes.counted import CountedPass
from passes.streamed import StreamedTensor

__all__ = ["BLOCK", "PackedMatrix", "QuantisePass"]


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix [N, K] as MatMulNBits takes it; no zero points (8 stands for zero)."""

    data: StreamedTensor
    """uint8 [N, K / 32, 16], two weights a byte, the earlier one low."""
    scales: StreamedTensor
    """T [N, K / 32]"""


Pack = Callable[[StreamedTensor], PackedMatrix | None]
"""Gives the packed form of a matrix, or None where it is to stay as it is."""


class QuantisePass(CountedPass):
    """Replace matrices by their four-bit form.

        before   y = FusedMatMul<transB=1>(x, w [N, K])
        after    y = MatMulNBits<bits=4, block_size=32>(x, w.q4, w.q4.scales)

    `pack` decides which, and how they are rounded. A matrix that others read too (a tied
    embedding) stays in the graph for them. Packed forms are kept between calls, so that all
    graphs of an artifact share them.
    """

    def __init__(self, pack: Pack) -> None:
        super().__init__()
        self.pack = pack
        self._packed: dict[str, PackedMatrix | None] = {}

    def rewrite(self, model: ir.Model) -> int:
        """See the class."""
        graph, changes = model.graph, 0
        for node in list(graph):
            if not is_projection(node):
                continue
            weight = node.inputs[1]
            if weight is None or not isinstance(weight.const_value, StreamedTensor):
                continue
            packed = self._pack(weight.name or "", weight.const_value)
            if packed is not None:
                _replace(graph, node, packed)
                changes += 1
        for name in [n for n, value in graph.initializers.items() if not value.uses()]:
            if self._packed.get(name) is not None:
                del graph.initializers[name]
        return changes

    def _pack(self, name: str, weight: StreamedTensor) -> PackedMatrix | None:
        if name not in self._packed:
            self._packed[name] = self.pack(weight)
        return self._packed[name]


def _replace(graph: ir.Graph, node: ir.Node, packed: PackedMatrix) -> None:
    x, (n, blocks, _) = node.inputs[0], packed.data.shape.numpy()
    made = ir.node(
        "MatMulNBits",
        [x, _initializer(graph, packed.data), _initializer(graph, packed.scales)],
        {"K": blocks * BLOCK, "N": n, "bits": 4, "block_size": BLOCK},
        domain=DOMAIN,
        name=node.name,
    )
    graph.insert_before(node, made)
    old, new = node.outputs[0], made.outputs[0]
    new.name = old.name
    infer_outputs(made)
    if old.is_graph_output():
        graph.outputs[list(graph.outputs).index(old)] = new
    ir.convenience.replace_all_uses_with(old, new)
    graph.remove(node, safe=True)


def _initializer(graph: ir.Graph, tensor: StreamedTensor) -> ir.Value:
    name = tensor.name or ""
    if name not in graph.initializers:
        graph.initializers[name] = ir.Value(
            name=name,
            type=ir.TensorType(tensor.dtype),
            shape=tensor.shape,
            const_value=tensor,
        )
    return graph.initializers[name]
