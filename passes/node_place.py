"""Where a node stands, in the words that errors use: ``graph:node(Op)``."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

__all__ = ["CONTROL_FLOW", "place", "subgraphs"]

CONTROL_FLOW = frozenset({("", "If"), ("", "Loop"), ("", "Scan")})
"""(domain, op) of the nodes that a captured CUDA graph refuses."""


def place(node: ir.Node) -> str:
    """``graph:node(Op)``; a node without a name is called by its first named output."""
    name = node.name or next((output.name for output in node.outputs if output.name), "?")
    graph = getattr(node.graph, "name", None) or "graph"
    return f"{graph}:{name}({node.op_type})"


def subgraphs(node: ir.Node) -> Iterator[ir.Graph]:
    """Graphs that `node` holds as attributes, not those inside them."""
    for attribute in node.attributes.values():
        if attribute.is_ref():
            continue
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()
