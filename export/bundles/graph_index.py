"""A graph file in memory without its weights: who makes a value, who reads it.

Only the main graph is indexed: bundles keep their structure there, and a subgraph or a
function body that hides a layer is told by its op.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from export.errors import BundleError

__all__ = ["LOOK_THROUGH", "GraphIndex", "attribute", "op_name", "read_graph_file"]

MAX_GRAPH_BYTES = 512 * 2**20
"""A graph of 64 layers has 3 MB; above this, weights are inside and memory would follow."""
LOOK_THROUGH = frozenset({"Cast", "Identity", "Reshape"})
"""Ops that hand a value on: same numbers, one input that matters."""


def read_graph_file(path: Path) -> onnx.ModelProto:
    """Parse a graph file, external data left where it lies.

    Raises `BundleError` for a link, a file that is no ONNX model, or one over
    `MAX_GRAPH_BYTES`.
    """
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise BundleError(f"{path} is not a plain file; copy the graph itself there")
        if status.st_size > MAX_GRAPH_BYTES:
            raise BundleError(
                f"{path} has {status.st_size} bytes, over {MAX_GRAPH_BYTES}: weights are "
                "inside of it; save them as external data"
            )
        model = onnx.ModelProto()
        model.ParseFromString(path.read_bytes())
    except OSError as e:
        raise BundleError(f"{path} cannot be read: {e.strerror or e}") from e
    except DecodeError as e:
        raise BundleError(f"{path} is not an ONNX model: {e}") from e
    if not model.graph.output:
        raise BundleError(f"{path} is not an ONNX model: its graph has no outputs")
    return model


def op_name(node: onnx.NodeProto) -> str:
    """``Add``, ``com.microsoft.LinearAttention``."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    return f"{domain}.{node.op_type}" if domain else node.op_type


def attribute(node: onnx.NodeProto, name: str, default: int = 0) -> int:
    """An integer attribute."""
    return next((int(a.i) for a in node.attribute if a.name == name), default)


class GraphIndex:
    """The main graph of a model by value name."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        self.graph = model.graph

    @cached_property
    def producers(self) -> dict[str, onnx.NodeProto]:
        """The node that makes each value."""
        return {name: node for node in self.graph.node for name in node.output if name}

    @cached_property
    def consumers(self) -> dict[str, list[onnx.NodeProto]]:
        """The nodes that read each value."""
        table: dict[str, list[onnx.NodeProto]] = {}
        for node in self.graph.node:
            for name in dict.fromkeys(node.input):
                if name:
                    table.setdefault(name, []).append(node)
        return table

    @cached_property
    def initializers(self) -> dict[str, onnx.TensorProto]:
        """The weights and constants by name."""
        return {tensor.name: tensor for tensor in self.graph.initializer}

    @cached_property
    def inputs(self) -> dict[str, onnx.ValueInfoProto]:
        """What a run must feed: inputs without those that an initializer fills."""
        return {i.name: i for i in self.graph.input if i.name not in self.initializers}

    def source(self, value: str) -> str:
        """`value` traced back through ops that only hand it on."""
        seen: set[str] = set()
        while value not in seen:
            seen.add(value)
            node = self.producers.get(value)
            if node is None or op_name(node) not in LOOK_THROUGH or not node.input:
                break
            value = node.input[0]
        return value

    def behind(
        self, values: list[str], stop: Callable[[onnx.NodeProto], bool]
    ) -> Iterator[onnx.NodeProto]:
        """Nodes that `values` are made by, backwards; a node that `stop`s is the last."""
        queue, seen = list(values), set()
        while queue:
            node = self.producers.get(queue.pop())
            if node is None or id(node) in seen:
                continue
            seen.add(id(node))
            yield node
            if not stop(node):
                queue.extend(node.input)

    def ahead(
        self, values: list[str], stop: Callable[[onnx.NodeProto], bool]
    ) -> Iterator[onnx.NodeProto]:
        """Nodes that are made from `values`; a node that `stop`s is the last of its way."""
        queue, seen = list(values), set()
        while queue:
            for node in self.consumers.get(queue.pop(), ()):
                if id(node) in seen:
                    continue
                seen.add(id(node))
                yield node
                if not stop(node):
                    queue.extend(node.output)
