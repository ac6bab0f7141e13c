"""ONNX files read as what they are on their own: a graph, without the weights it refers to.

Nothing here opens external data, so a graph is read in the same moment whether its weights
have a megabyte, a hundred gigabytes, or are not there.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import onnx
from google.protobuf.message import DecodeError, Message

from artifacts.parse import ParseError

__all__ = [
    "MAX_GRAPH_BYTES",
    "ONNX_DTYPES",
    "External",
    "StoredTensor",
    "open_regular",
    "read_graph",
    "stored_tensors",
    "value_type",
    "without_weights",
]

MAX_GRAPH_BYTES = 256 * 2**20
"""Of an ONNX file: an unrolled graph of a hundred layers stays under a tenth of it."""

ONNX_DTYPES: dict[str, int] = {
    "float32": onnx.TensorProto.FLOAT,
    "float16": onnx.TensorProto.FLOAT16,
    "bfloat16": onnx.TensorProto.BFLOAT16,
    "int64": onnx.TensorProto.INT64,
    "int32": onnx.TensorProto.INT32,
    "int8": onnx.TensorProto.INT8,
    "uint8": onnx.TensorProto.UINT8,
    "bool": onnx.TensorProto.BOOL,
}
"""A manifest's dtype -> that of ONNX."""

_NAMES = {number: name for name, number in ONNX_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class External:
    """Where a tensor says that its bytes lie; None where it says nothing usable."""

    location: str
    offset: int | None
    length: int | None


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor with bytes of its own, wherever in a model it stands."""

    name: str
    proto: onnx.TensorProto
    is_initializer: bool
    """False for an attribute's value and for the parts of a sparse tensor."""

    @property
    def external(self) -> External | None:
        """None where the bytes are in the graph file."""
        if self.proto.data_location != onnx.TensorProto.EXTERNAL:
            return None
        entries = {entry.key: entry.value for entry in self.proto.external_data}
        return External(
            entries.get("location", ""),
            _number(entries.get("offset", "0")),
            _number(entries.get("length", "")),
        )


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; never follows a link or waits for a pipe's writer.

    Raises:
        ParseError: It is something else, or cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, ValueError) as e:
        raise ParseError(f"{path.name} cannot be opened: {e}") from e
    file = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise ParseError(f"{path.name} is not a regular file")
    return file


def read_graph(path: Path) -> onnx.ModelProto:
    """Read an ONNX file, leaving external data where it is.

    Raises:
        ParseError: It cannot be read, is no protobuf, or is over `MAX_GRAPH_BYTES`.
    """
    try:
        with open_regular(path) as file:
            data = file.read(MAX_GRAPH_BYTES + 1)
    except OSError as e:
        raise ParseError(f"{path.name} cannot be read: {e.strerror or e}") from e
    if len(data) > MAX_GRAPH_BYTES:
        raise ParseError(
            f"{path.name} has over {MAX_GRAPH_BYTES} bytes, the most of a graph whose weights "
            "lie in the weight file"
        )
    try:
        model = onnx.ModelProto()
        model.ParseFromString(data)
    except DecodeError as e:
        raise ParseError(f"{path.name} is no ONNX file: {e}") from e
    if not model.graph.node:
        raise ParseError(f"{path.name} holds no graph, or one without nodes")
    if not _texts_are_texts(model):
        raise ParseError(f"{path.name} holds a name that is not UTF-8 text")
    return model


def _texts_are_texts(message: Message) -> bool:
    """Protobuf hands out a string that is no UTF-8 as bytes; nothing here expects that."""
    for field, value in message.ListFields():
        if field.type == field.TYPE_STRING:
            texts = (value,) if isinstance(value, str | bytes) else value
            if any(isinstance(text, bytes) for text in texts):
                return False
        elif field.type == field.TYPE_MESSAGE:
            inner = (value,) if isinstance(value, Message) else value
            if not all(map(_texts_are_texts, inner)):
                return False
    return True


def stored_tensors(model: onnx.ModelProto) -> Iterator[StoredTensor]:
    """Every tensor with bytes: of the graph, its subgraphs, attributes and functions."""
    yield from _of_graph(model.graph)
    for function in model.functions:
        yield from _of_nodes(function.node)
    for info in model.training_info:
        yield from _of_graph(info.initialization)
        yield from _of_graph(info.algorithm)


def _of_graph(graph: onnx.GraphProto) -> Iterator[StoredTensor]:
    for tensor in graph.initializer:
        yield StoredTensor(tensor.name, tensor, True)
    for sparse in graph.sparse_initializer:
        yield from _of_sparse(sparse.values.name, sparse)
    yield from _of_nodes(graph.node)


def _of_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[StoredTensor]:
    for node in nodes:
        for attribute in node.attribute:
            name = f"{node.name}({node.op_type}).{attribute.name}"
            if attribute.HasField("t"):
                yield StoredTensor(name, attribute.t, False)
            for tensor in attribute.tensors:
                yield StoredTensor(name, tensor, False)
            if attribute.HasField("sparse_tensor"):
                yield from _of_sparse(name, attribute.sparse_tensor)
            for sparse in attribute.sparse_tensors:
                yield from _of_sparse(name, sparse)
            if attribute.HasField("g"):
                yield from _of_graph(attribute.g)
            for graph in attribute.graphs:
                yield from _of_graph(graph)


def _of_sparse(name: str, sparse: onnx.SparseTensorProto) -> Iterator[StoredTensor]:
    yield StoredTensor(name, sparse.values, False)
    yield StoredTensor(name, sparse.indices, False)


def without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with external initializers as inputs of the same type.

    So a checker sees each type and shape and needs no weights: its own reading of external
    data would want the whole file beside the graph.
    """
    light = onnx.ModelProto()
    light.CopyFrom(model)
    seen = {value.name for value in light.graph.input}
    for stored in stored_tensors(model):
        if not stored.is_initializer or stored.external is None or stored.name in seen:
            continue
        seen.add(stored.name)
        value = light.graph.input.add(name=stored.name)
        value.type.tensor_type.elem_type = stored.proto.data_type
        for size in stored.proto.dims:
            value.type.tensor_type.shape.dim.add(dim_value=size)
        value.type.tensor_type.shape.SetInParent()
    _drop_external(light.graph)
    return light


def _drop_external(graph: onnx.GraphProto) -> None:
    kept = [t for t in graph.initializer if t.data_location != onnx.TensorProto.EXTERNAL]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _drop_external(attribute.g)
            for inner in attribute.graphs:
                _drop_external(inner)


def value_type(value: onnx.ValueInfoProto) -> tuple[str, tuple[int | str, ...]]:
    """Dtype and shape of a graph's input or output; ``?`` where the file does not say."""
    tensor = value.type.tensor_type
    shape = tuple(
        dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?"
        for dim in tensor.shape.dim
    )
    known = tensor.HasField("shape")
    return _NAMES.get(tensor.elem_type, f"type {tensor.elem_type}"), shape if known else ("?",)


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None
