"""Random numbers for the inputs of a piece of a graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx

from export.bundles.graph_index import GraphIndex, attribute
from export.bundles.states import shape_of
from export.errors import ExportError

__all__ = ["samples"]

ROWS, PAST = 3, 2
"""Sizes that the samples give to what a run chooses."""


def samples(index: GraphIndex, elements: Mapping[str, int]) -> Iterator[tuple[str, Any]]:
    """A value for each name, of the given element types; bfloat16 as its bits, uint16.

    Raises:
        ExportError: A shape is not in the file.
    """
    rng = np.random.default_rng(0)
    declared = {v.name: v for v in (*index.graph.value_info, *index.graph.output)}
    declared |= index.inputs
    for name, element in elements.items():
        if name not in declared or not declared[name].type.tensor_type.HasField("shape"):
            raise ExportError(f"the shape of '{name}' is not in the file; start from another "
                              "value")  # fmt: skip
        shape = tuple(_size(index, name, size) for size in shape_of(declared[name]))
        dtype = onnx.helper.tensor_dtype_to_np_dtype(element)
        if not np.issubdtype(dtype, np.integer):
            values = rng.standard_normal(shape).astype(dtype)
            yield name, values.view(np.uint16) if dtype == ml_dtypes.bfloat16 else values
        elif "position" in name:
            yield name, np.broadcast_to(np.arange(PAST, PAST + shape[-1]), shape).astype(dtype)
        else:
            yield name, np.ones(shape, dtype)


def _size(index: GraphIndex, name: str, size: int | str) -> int:
    """A number for a size that a run chooses, the same wherever the name is the same."""
    if isinstance(size, int):
        return size
    if "+" in size:
        return sum(_size(index, name, part.strip()) for part in size.split("+"))
    if "batch" in size:
        return 1
    if "total" in size:
        return PAST + ROWS
    if "past" in size:
        return PAST
    return _head_width(index, name) if "dim" in size else ROWS


def _head_width(index: GraphIndex, past: str) -> int:
    """Of a cache whose width has a name: that of the attention that reads it."""
    declared = {v.name: v for v in index.graph.value_info}
    for node in index.consumers.get(past, ()):
        heads = attribute(node, "num_heads") or attribute(node, "q_num_heads")
        query = declared.get(index.source(node.input[0])) or declared.get(node.input[0])
        width = shape_of(query)[-1] if query is not None else None
        if heads and isinstance(width, int):
            return width // heads
    raise ExportError(f"the width of '{past}' is not in the file; start from another value")
