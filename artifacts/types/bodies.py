"""Bodies of function ops, as ONNX Runtime inlines them when it has no kernel for a node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx

from artifacts.types.table import ort_table

__all__ = ["function_body"]

MASK_FIXED_IN = (1, 32)
"""From here on ONNX Runtime carries the `Attention` body that casts its causal mask.

Up to 1.31 the body, built for opsets 23 and 24, adds a float32 triangle to a mask of any
type (mended in ONNX by pull request 7840). The installed ``onnx`` may be newer than the one
inside of ONNX Runtime, so its body is taken back to what is really inlined.
"""


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
    if body.name == "Attention" and release < MASK_FIXED_IN:
        for node in body.node:
            if node.op_type == "CastLike" and list(node.output) == ["MaskTri"]:
                node.op_type = "Identity"
                del node.input[1:]
    return body
