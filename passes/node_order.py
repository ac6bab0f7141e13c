"""Which node must have run before which: the only order that ONNX Runtime promises."""

from __future__ import annotations

import onnx_ir as ir

from passes.node_place import subgraphs

__all__ = ["NodeOrder"]


class NodeOrder:
    """Ancestors of the nodes of one graph; what a subgraph captures counts for its node.

    The graph must not change while this is used.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self._outer: dict[ir.Node, ir.Node] = {}
        for node in graph:
            self._hold(node, node)
        self._ancestors: dict[ir.Node, frozenset[ir.Node]] = {}
        self._parents: dict[ir.Node, set[ir.Node]] = {node: set() for node in graph}
        for inner, node in self._outer.items():
            for value in inner.inputs:
                maker = None if value is None else value.producer()
                if maker is not None and maker.graph is graph:
                    self._parents[node].add(maker)

    def _hold(self, inner: ir.Node, node: ir.Node) -> None:
        self._outer[inner] = node
        for graph in subgraphs(inner):
            for deeper in graph:
                self._hold(deeper, node)

    def outer(self, node: ir.Node) -> ir.Node:
        """The node of the graph that `node` is, or in whose subgraph it stands."""
        return self._outer[node]

    def ancestors(self, node: ir.Node) -> frozenset[ir.Node]:
        """All nodes that have run when `node` begins; never `node` itself."""
        known = self._ancestors.get(node)
        if known is None:
            seen: set[ir.Node] = set()
            stack = [node]
            while stack:
                new = self._parents[stack.pop()] - seen
                seen |= new
                stack.extend(new)
            known = self._ancestors[node] = frozenset(seen - {node})
        return known
