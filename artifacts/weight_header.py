"""The header of a weight file: safetensors, which ONNX can refer into as external data.

    8 bytes    length of the header, little-endian
    header     JSON: name -> dtype, shape, [begin, end) counted from the end of the header
    data       the tensors, without holes

`WeightTensor.offset` counts from the start of the *file*, as ONNX does.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO

from artifacts.manifest import WeightTensor
from artifacts.parse import Fields, ParseError

__all__ = [
    "ITEM_BYTES",
    "MAX_HEADER_BYTES",
    "PAGE_BYTES",
    "SAFETENSORS_DTYPES",
    "encode_header",
    "read_header",
    "tensor_bytes",
]

PAGE_BYTES = 4096
"""The data begins at a multiple of it, so that pages of a large tensor can be mapped."""
MAX_HEADER_BYTES = 100_000_000
"""Readers of safetensors refuse a longer header."""

SAFETENSORS_DTYPES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""A manifest's dtype -> that of safetensors."""
ITEM_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}

_MANIFEST_DTYPES = {theirs: ours for ours, theirs in SAFETENSORS_DTYPES.items()}


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a dense tensor; `dtype` is one of a manifest's."""
    return ITEM_BYTES[dtype] * math.prod(shape)


def encode_header(tensors: Mapping[str, WeightTensor]) -> bytes:
    """The header for `tensors`, whose offsets count from the start of the data.

    Padded with spaces so that the data begins at a multiple of `PAGE_BYTES`; the first
    eight bytes, the length, are part of the answer.
    """
    entries = {
        name: {
            "dtype": SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [tensor.offset, tensor.offset + tensor.length],
        }
        for name, tensor in tensors.items()
    }
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE_BYTES)
    return struct.pack("<Q", len(text)) + text


def read_header(file: BinaryIO, size: int, place: str) -> tuple[int, dict[str, WeightTensor]]:
    """Where the data of a weight file begins, and the tensors that its own header names.

    Args:
        file: Open at its start.
        size: Bytes of the file.
        place: What an error calls the file.

    Raises:
        ParseError: It is no safetensors header, or one too long for the file.
    """
    head = file.read(8)
    if len(head) < 8:
        raise ParseError(f"{place} has {size} bytes; a weight file begins with 8 of length")
    (length,) = struct.unpack("<Q", head)
    limit = min(MAX_HEADER_BYTES, size - 8)
    if length > limit:
        raise ParseError(
            f"{place} announces a header of {length} bytes; at most {limit} can be there"
        )
    text = file.read(length)
    try:
        values = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError as e:
        raise ParseError(f"the header of {place} is nested too deeply") from e
    except ValueError as e:
        raise ParseError(f"the header of {place} is not JSON: {e}") from e
    fields = Fields(values, f"header of {place}")
    names = [name for name in fields if name != "__metadata__"]
    data = 8 + length
    return data, {name: _entry(fields.object(name), data) for name in names}


def _entry(fields: Fields, data: int) -> WeightTensor:
    code = fields.one_of("dtype", tuple(_MANIFEST_DTYPES))
    span = fields.integers("data_offsets")
    if len(span) != 2 or span[0] > span[1] or span[1] > 2**53:
        raise fields.refuse("data_offsets", "[begin, end] with begin <= end <= 2**53")
    begin, end = span
    shape = fields.integers("shape")
    return WeightTensor(_MANIFEST_DTYPES[code], shape, data + begin, end - begin)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name stands in it twice")
    return values
