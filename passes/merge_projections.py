"""Matrices that read the same rows, as one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import onnx_ir as ir
from onnxscript import GraphBuilder

from passes.contrib import DOMAIN, infer_outputs, is_projection
from passes.counted import CountedPass
from passes.streamed import StreamedTensor, concat_rows

__all__ = ["MergeProjectionsPass"]


class MergeProjectionsPass(CountedPass):
    """Merge projections of one input into one, and split its result.

        before   a = FusedMatMul<transB=1>(x, wa)    b = FusedMatMul<transB=1>(x, wb)
        after    a, b = Split(FusedMatMul<transB=1>(x, wa | wb))

    A kernel that reads weights has a fixed price (launch, ramp, uneven last wave), so fewer
    and larger matrices read faster. Matrices of `most` rows and more are large enough to be
    left alone. The merged weight is streamed: rows of the one, then rows of the other.

    Weights that other nodes read too (a tied embedding) are not merged.

    Args:
        most: Rows from which on a matrix is left.
        apart: Part of the names of weights that are left whatever their size.
    """

    def __init__(self, most: int, apart: str | None = None) -> None:
        super().__init__()
        self.most, self.apart = most, apart

    def rewrite(self, model: ir.Model) -> int:
        """See the class."""
        groups: dict[ir.Value, list[ir.Node]] = defaultdict(list)
        for node in model.graph:
            x = node.inputs[0] if node.inputs else None
            if x is not None and self._fits(node):
                groups[x].append(node)
        merged = [nodes for nodes in groups.values() if len(nodes) > 1]
        for nodes in merged:
            _merge(model.graph, nodes)
        return len(merged)

    def _fits(self, node: ir.Node) -> bool:
        if not is_projection(node):
            return False
        x, weight = node.inputs[:2]
        if x is None or x.shape is None or x.shape.rank() != 3:
            return False
        if weight is None or not isinstance(weight.const_value, StreamedTensor):
            return False
        rows = weight.const_value.shape[0]
        if self.apart is not None and self.apart in (weight.name or ""):
            return False
        alone = len(weight.uses()) == 1 and not node.outputs[0].is_graph_output()
        return alone and isinstance(rows, int) and rows < self.most


def _merge(graph: ir.Graph, nodes: Sequence[ir.Node]) -> None:
    weights = [node.inputs[1] for node in nodes]
    tensors = [w.const_value for w in weights if w is not None]
    streamed = [t for t in tensors if isinstance(t, StreamedTensor)]
    name = _joined_name([tensor.name or "" for tensor in streamed])
    tensor = concat_rows(streamed, name)
    merged = ir.Value(
        name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor
    )
    graph.initializers[name] = merged
    builder = GraphBuilder(graph)
    builder.push_module(name)
    op = builder.op
    wide = op.FusedMatMul(nodes[0].inputs[0], merged, transB=1, _domain=DOMAIN, _version=1)
    producer = wide.producer()
    assert producer is not None
    infer_outputs(producer)
    sizes = op.Constant(value_ints=[int(t.shape.numpy()[0]) for t in streamed])
    parts = op.Split(wide, sizes, axis=2, _outputs=len(nodes))
    for node, part in zip(nodes, parts, strict=True):
        ir.convenience.replace_all_uses_with(node.outputs[0], part)
        part.name, node.outputs[0].name = node.outputs[0].name, part.name
        graph.remove(node, safe=True)
    for weight in weights:
        if weight is not None and weight.name is not None:
            del graph.initializers[weight.name]
    builder.pop_module()


def _joined_name(names: Sequence[str]) -> str:
    """``layers.0.gdn.qkv`` and ``layers.0.gdn.z`` -> ``layers.0.gdn.qkv|z``."""
    scope = names[0].rpartition(".")[0]
    return f"{scope}.{'|'.join(name.rpartition('.')[2] for name in names)}"
