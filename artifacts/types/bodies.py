"""Bodies of function ops, as ONNX Runtime inlines them when it has no kernel for a node."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import onnx

from artifacts.types.table import ort_table

__all__ = ["function_body"]

NEW_BODY_FROM = (1, 32)
"""From here on ONNX Runtime inlines `Attention` as newer ONNX writes it.

Up to 1.31 the body adds a float32 causal triangle to a mask of any type, and does not look
for rows that are masked as a whole (ONNX pull request 7840 mended the first). The installed
``onnx`` may be newer than the one inside of ONNX Runtime, so its body is taken back to what
is really inlined.
"""
NEWER_VALUES = {"BiasRowMaxAxes", "BiasRowMax", "FloatNegInfT", "RowAllMasked", "ZeroProbT"}
HANDED_ON = {"MaskTri": ("CastLike", 0), "SoftmaxOutSafe": ("Where", 2)}
"""Values that the older body takes as they are: the newer op, the input that goes through."""


def function_body(
    node: onnx.NodeProto, opset: int, types: Sequence[str | None]
) -> onnx.FunctionProto | None:
    """The body of an ONNX op for these input types; None when it has none.

    `types` are names such as ``float16``, None where unknown or absent.
    """
    if node.domain not in ("", "ai.onnx"):
        return None
    try:
        schema: Any = onnx.defs.get_schema(
            node.op_type, max_inclusive_version=opset, domain=""
        )
    except onnx.defs.SchemaError:
        return None
    if schema.has_context_dependent_function:
        versions = schema.context_dependent_function_opset_versions
        text = _built(schema, _version(versions, opset), node, types)
    elif schema.has_function:
        version = _version(schema.function_opset_versions, opset)
        text = schema.get_function_with_opset_version(version)
    else:
        return None
    if not text:
        return None
    body = onnx.FunctionProto()
    body.ParseFromString(text)
    return _as_inlined(body)


def _built(
    schema: Any, version: int, node: onnx.NodeProto, types: Sequence[str | None]
) -> bytes:
    """The context-dependent body, tried with inputs of unknown rank, then of rank 3 and 4."""
    for rank in (None, 3, 4):
        protos = [_type_proto(name, rank) for name in types]
        try:
            text: bytes = schema.get_context_dependent_function_with_opset_version(
                version, node.SerializeToString(), protos
            )
        except RuntimeError:
            continue
        if text:
            return text
    return b""


def _version(versions: Sequence[int], opset: int) -> int:
    return max((v for v in versions if v <= opset), default=min(versions))


def _type_proto(name: str | None, rank: int | None) -> bytes:
    elements: dict[str, int] = dict(onnx.TensorProto.DataType.items())
    element = elements.get(name.upper()) if name else None
    if element is None:
        empty: bytes = onnx.TypeProto().SerializeToString()
        return empty
    shape = None if rank is None else [None] * rank
    text: bytes = onnx.helper.make_tensor_type_proto(element, shape).SerializeToString()
    return text


def _as_inlined(body: onnx.FunctionProto) -> onnx.FunctionProto:
    release = tuple(int(part) for part in ort_table().version.split(".")[:2])
    if body.name != "Attention" or release >= NEW_BODY_FROM:
        return body
    older = [node for node in body.node if not NEWER_VALUES & {*node.output}]
    for node in older:
        op, kept = HANDED_ON.get(node.output[0], ("", 0))
        if node.op_type == op:
            source = node.input[kept]
            node.op_type = "Identity"
            node.input[:] = [source]
    copies = [copy.deepcopy(node) for node in older]
    del body.node[:]
    body.node.extend(copies)
    return body
