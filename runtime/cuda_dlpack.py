"""Device memory of ours as ONNX Runtime values, by DLPack.

A session takes an initializer over without a copy only if its memory is "owned by the user",
which a value that ONNX Runtime allocated itself is not; and its own allocator would grow by
powers of two, so that weights could take up to twice their size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

__all__ = ["ELEMENT_CODES", "capsule"]

ELEMENT_CODES = {
    "float32": (2, 32),
    "float16": (2, 16),
    "bfloat16": (4, 16),
    "int64": (0, 64),
    "int32": (0, 32),
    "int8": (0, 8),
    "uint8": (1, 8),
    "bool": (6, 8),
}
"""Our dtype -> DLDataTypeCode and bits."""
CUDA = 2
"""kDLCUDA."""
NAME = b"dltensor"


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = (
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


def _no_deleter() -> int | None:
    """A function of C that ignores its argument, since the memory is not the value's to free.

    ONNX Runtime calls a deleter without asking for one, and may do so while the interpreter
    shuts down, when Python code can no longer run.
    """
    return ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p).value


def capsule(address: int, dtype: str, shape: Sequence[int]) -> tuple[object, Any]:
    """A DLPack capsule of a contiguous tensor on device 0.

    Returns:
        The capsule, and what must outlive every value made from it besides the memory.
    """
    code, bits = ELEMENT_CODES[dtype]
    sizes = (ctypes.c_int64 * max(len(shape), 1))(*shape)
    strides = (ctypes.c_int64 * max(len(shape), 1))()
    step = 1
    for axis in range(len(shape) - 1, -1, -1):
        strides[axis], step = step, step * shape[axis]
    tensor = _Tensor(address, CUDA, 0, len(shape), code, bits, 1, sizes, strides, 0)
    managed = _Managed(tensor, None, _no_deleter())
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(ctypes.addressof(managed), NAME, None), (managed, sizes, strides)
