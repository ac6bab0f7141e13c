"""What a piece of a graph computes, told by running it on small numbers.

Masks, lengths and recurrences are written in many ways; that one of them is right is proved
by its values, not by its shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from export.bundles.graph_index import GraphIndex
from export.errors import BundleError
from export.importing.reader import Array

__all__ = ["bookkeeping", "causal", "nodes_between", "probe"]

MAX_NODES = 400


def nodes_between(
    index: GraphIndex, outputs: Sequence[str], inputs: frozenset[str]
) -> list[onnx.NodeProto]:
    """The nodes behind `outputs` up to `inputs`, in the order of the graph."""
    found: set[int] = set()
    queue = [name for name in outputs if name not in inputs]
    while queue:
        node = index.producers.get(queue.pop())
        if node is None or id(node) in found:
            continue
        found.add(id(node))
        queue += [name for name in _read(node) if name not in inputs]
    return [node for node in index.graph.node if id(node) in found]


def probe(
    index: GraphIndex, outputs: Sequence[str], feeds: Mapping[str, Array]
) -> list[Array]:
    """The values of `outputs` when the values named in `feeds` are what they are there.

    Raises `BundleError` when the piece needs more than `feeds` and constants, or is too
    large, or cannot be run.
    """
    nodes = nodes_between(index, outputs, frozenset(feeds))
    if len(nodes) > MAX_NODES:
        raise BundleError(f"{len(nodes)} nodes make '{outputs[0]}'; that many are not probed")
    made = {name for node in nodes for name in node.output} | set(feeds)
    wanted = {name for node in nodes for name in _read(node)} - made
    constants = [index.initializers[name] for name in sorted(wanted & set(index.initializers))]
    missing = sorted(wanted - set(index.initializers))
    if missing or any(t.data_location == onnx.TensorProto.EXTERNAL for t in constants):
        needed = (missing or [t.name for t in constants])[0]
        raise BundleError(f"'{outputs[0]}' depends on '{needed}' too, so it is not known")
    inputs = [onnx.helper.make_value_info(name, _type(feed)) for name, feed in feeds.items()]
    graph = onnx.helper.make_graph(
        nodes,
        "probe",
        inputs,
        [onnx.ValueInfoProto(name=name) for name in outputs],
        initializer=constants,
    )
    model = onnx.helper.make_model(
        graph, opset_imports=index.model.opset_import, functions=index.model.functions
    )
    try:
        found = ReferenceEvaluator(model).run(list(outputs), dict(feeds))
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as e:
        raise BundleError(f"what makes '{outputs[0]}' cannot be run: {e}") from e
    return [np.asarray(value) for value in found]


def _type(feed: Array) -> onnx.TypeProto:
    element = onnx.helper.np_dtype_to_tensor_dtype(feed.dtype)
    return onnx.helper.make_tensor_type_proto(element, feed.shape)


def _read(node: onnx.NodeProto) -> Iterator[str]:
    """What a node reads, the outer values of its bodies included."""
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        if attribute.HasField("g"):
            body: Any = attribute.g
            inner = {value.name for value in (*body.input, *body.initializer)}
            inner |= {name for n in body.node for name in n.output}
            yield from (name for n in body.node for name in _read(n) if name not in inner)


def causal(mask: Array, past: int) -> bool:
    """Whether a mask [..., S, P + S] lets row r see the first ``past + r + 1`` columns."""
    rows, total = mask.shape[-2:]
    seen = np.arange(total)[None] <= past + np.arange(rows)[:, None]
    flat = mask.reshape(-1, rows, total)
    if mask.dtype == bool:
        return bool((flat == seen).all())
    values = flat.astype(np.float64)
    return bool(((values == 0) == seen).all() and (values[:, ~seen] <= -1e4).all())


def bookkeeping(index: GraphIndex, past: int, rows: int) -> dict[str, Array]:
    """Inputs of a forward of `rows` rows after `past` others: nothing is padded."""
    feeds: dict[str, Array] = {}
    for name, value in index.inputs.items():
        sizes = [d.dim_value or 1 for d in value.type.tensor_type.shape.dim]
        if len(sizes) < 2 or name.startswith("past"):
            continue
        if "mask" in name:
            feeds[name] = np.ones((1, past + rows), np.int64)
        elif "position" in name:
            shape = (*sizes[:-1], rows)
            feeds[name] = np.broadcast_to(np.arange(past, past + rows), shape).copy()
        else:
            dtype = np.int64 if len(sizes) == 2 else np.float32
            feeds[name] = np.zeros((1, rows, *sizes[2:]), dtype)
    return feeds
