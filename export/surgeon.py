"""Cuts pieces out of graphs with onnx-graphsurgeon; the only module that knows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
import onnx_graphsurgeon as gs
from onnx_graphsurgeon.logger import G_LOGGER

from export.errors import ExportError

__all__ = ["cut"]

G_LOGGER.severity = G_LOGGER.ERROR  # it prints what is no concern of a user's


def cut(
    model: onnx.ModelProto,
    nodes: frozenset[str],
    inputs: Mapping[str, int],
    outputs: Sequence[str],
) -> onnx.ModelProto:
    """A model of some nodes of another one.

    Args:
        model: Its weights may lie in data files, which are not read.
        nodes: A node stays when it makes one of these values.
        inputs: Values that the piece is fed, with their element types.
        outputs: Values that it gives.

    Raises:
        ExportError: A value is not in the graph.
    """
    graph = gs.import_onnx(model)
    tensors = graph.tensors()
    for name in (*inputs, *outputs):
        if name not in tensors:
            raise ExportError(f"the graph has no value called {name!r}")
    graph.nodes = [n for n in graph.nodes if any(o.name in nodes for o in n.outputs)]
    graph.inputs = [tensors[name] for name in inputs]
    graph.outputs = [tensors[name] for name in outputs]
    for name, element in inputs.items():
        tensors[name].inputs.clear()
        tensors[name].dtype = element
    graph.cleanup(remove_unused_node_outputs=False, remove_unused_graph_inputs=False)
    piece: onnx.ModelProto = gs.export_onnx(graph.toposort(), do_type_check=False)
    return piece
