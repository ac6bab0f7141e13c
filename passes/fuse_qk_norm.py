"""The norms of queries and keys inside GroupQueryAttention (CUDA)."""

from __future__ import annotations

import onnx_ir as ir

from passes.contrib import is_contrib
from passes.counted import CountedPass

__all__ = ["FuseQkNormPass"]

Q_NORM, K_NORM = 14, 15
"""Places of ``q_norm_weight`` and ``k_norm_weight`` among the inputs."""


class FuseQkNormPass(CountedPass):
    """Let GroupQueryAttention normalise queries and keys itself.

        before   q' = Reshape(RMSNormalization(Reshape(q), wq))   k' likewise
                 GroupQueryAttention(q', k', ..)
        after    GroupQueryAttention(q, k, .., wq, wk)

    On CUDA the norm, the rotation and the append to the cache are then one kernel; the CPU
    kernel refuses these inputs. Nodes whose two norms differ in epsilon, or that lack one,
    are left.
    """

    def rewrite(self, model: ir.Model) -> int:
        """See the class."""
        nodes = [n for n in model.graph if is_contrib(n, "GroupQueryAttention")]
        return sum(_fuse(model.graph, node) for node in nodes)


def _fuse(graph: ir.Graph, node: ir.Node) -> int:
    query, key = _normed(node.inputs[0]), _normed(node.inputs[1])
    if query is None or key is None or _epsilon(query) != _epsilon(key):
        return 0
    inputs = [*node.inputs, *[None] * (K_NORM + 1 - len(node.inputs))]
    inputs[0], inputs[1] = _before(query), _before(key)
    inputs[Q_NORM], inputs[K_NORM] = query.inputs[1], key.inputs[1]
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    fused = ir.node(
        node.op_type,
        inputs,
        attributes | {"qk_norm_epsilon": _epsilon(query)},
        domain=node.domain,
        num_outputs=len(node.outputs),
        name=node.name,
    )
    graph.insert_before(node, fused)
    for old, new in zip(node.outputs, fused.outputs, strict=True):
        new.name, new.type, new.shape = old.name, old.type, old.shape
        if old.is_graph_output():
            graph.outputs[list(graph.outputs).index(old)] = new
        ir.convenience.replace_all_uses_with(old, new)
    graph.remove(node, safe=True)
    _drop(graph, query)
    _drop(graph, key)
    return 1


def _normed(value: ir.Value | None) -> ir.Node | None:
    """The norm in ``Reshape(RMSNormalization(Reshape(x), w))``, where `value` is just that."""
    outer = None if value is None else value.producer()
    if outer is None or outer.op_type != "Reshape" or outer.inputs[0] is None:
        return None
    norm = outer.inputs[0].producer()
    if norm is None or norm.op_type != "RMSNormalization" or norm.inputs[0] is None:
        return None
    inner = norm.inputs[0].producer()
    made, weight = (outer.outputs[0], norm.outputs[0]), norm.inputs[1]
    alone = all(len(v.uses()) == 1 and not v.is_graph_output() for v in made)
    if weight is None or weight.shape is None or weight.shape.rank() != 1:
        return None
    return norm if alone and inner is not None and inner.op_type == "Reshape" else None


def _before(norm: ir.Node) -> ir.Value | None:
    """What enters the reshape in front of `norm`."""
    value = norm.inputs[0]
    inner = None if value is None else value.producer()
    return None if inner is None else inner.inputs[0]


def _epsilon(norm: ir.Node) -> float:
    return norm.attributes.get_float("epsilon", 1e-5)


def _drop(graph: ir.Graph, norm: ir.Node) -> None:
    """Remove the norm and its two reshapes, now unread."""
    outer = norm.outputs[0].consumers()[0]
    value = norm.inputs[0]
    inner = None if value is None else value.producer()
    graph.remove(outer, safe=True)
    graph.remove(norm, safe=True)
    if inner is not None and not (
        inner.outputs[0].uses() or inner.outputs[0].is_graph_output()
    ):
        graph.remove(inner, safe=True)
