"""The CUDA runtime library by ctypes: memory, copies, one stream, and what the card is.

ONNX Runtime's Python interface has no asynchronous copies, no page-locked memory and no
streams; these few calls are all that is needed besides it, so nothing else is depended on.

The libraries are looked for where the dynamic linker looks (``LD_LIBRARY_PATH`` included),
then in the pip packages ``nvidia-*``, then beside PyTorch. They are loaded for the whole
process, so that ONNX Runtime's provider, which asks for the same names, gets the same ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runtime.errors import DeviceError

__all__ = ["LIBRARIES", "CudaDriver"]

LIBRARIES = ("libcudart.so.13", "libcublasLt.so.13", "libcublas.so.13", "libcurand.so.10")
"""What ONNX Runtime's CUDA provider links to, each after those that it needs itself."""
DRIVER = "libcuda.so.1"
"""Comes with the NVIDIA driver, never with a package."""
INSTALL = 'pip install "nvidia-cuda-runtime~=13.0" "nvidia-cublas~=13.0" "nvidia-curand~=10.0"'
"""onnxruntime-gpu's own extras leave cuBLAS out."""

TO_DEVICE, TO_HOST, ON_DEVICE = 1, 2, 3
"""cudaMemcpyKind."""
NON_BLOCKING = 1
"""cudaStreamNonBlocking: the stream does not wait for the legacy default stream."""
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76
"""Of cudaDeviceAttr."""
PROPERTIES_BYTES = 4096
"""More than cudaDeviceProp takes in any release; it begins with the name."""
NAME_BYTES = 256


class CudaDriver:
    """One device and one stream.

    All errors are `DeviceError`.
    """

    def __init__(self) -> None:
        self._runtime = _load_libraries()
        _declare(self._runtime)
        count = ctypes.c_int()
        code = self._runtime.cudaGetDeviceCount(ctypes.byref(count))
        if code or not count.value:
            reason = self._reason(code) if code else "none is visible"
            raise DeviceError(
                f"CUDA finds no GPU: {reason}. Check nvidia-smi and CUDA_VISIBLE_DEVICES, or "
                "build the artifact for the CPU: mtp-export build --target cpu"
            )
        self._call("cudaSetDevice", 0)
        stream = ctypes.c_void_p()
        self._call("cudaStreamCreateWithFlags", ctypes.byref(stream), NON_BLOCKING)
        self._stream: int | None = stream.value

    @property
    def stream(self) -> int:
        """The stream's handle, the one on which everything is ordered."""
        if self._stream is None:
            raise DeviceError("the device is closed. Open the artifact again")
        return self._stream

    def close(self) -> None:
        """Let the stream go; nothing may run on it any more."""
        if self._stream is not None:
            stream, self._stream = self._stream, None
            self._call("cudaStreamDestroy", stream)

    def name(self) -> str:
        """What the card is called."""
        properties = ctypes.create_string_buffer(PROPERTIES_BYTES)
        self._call("cudaGetDeviceProperties", properties, 0)
        return properties.raw[:NAME_BYTES].split(b"\0")[0].decode(errors="replace")

    def capability(self) -> tuple[int, int]:
        """Compute capability, such as (9, 0)."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("cudaDeviceGetAttribute", ctypes.byref(major), CAPABILITY_MAJOR, 0)
        self._call("cudaDeviceGetAttribute", ctypes.byref(minor), CAPABILITY_MINOR, 0)
        return major.value, minor.value

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the card, all processes counted."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def allocate(self, size: int, what: str) -> int:
        """Address of `size` new bytes on the device; `what` they are for, in an error."""
        pointer = ctypes.c_void_p()
        code = self._runtime.cudaMalloc(ctypes.byref(pointer), max(size, 1))
        if code or pointer.value is None:
            self._runtime.cudaGetLastError()  # else the next call would report this one
            free, total = self.memory()
            raise DeviceError(
                f"{what} takes {size} bytes on the device, of which {free} of {total} are "
                f"free ({self._reason(code)}). Use a smaller capacity, or stop what else uses "
                "the card"
            )
        return pointer.value

    def free(self, address: int) -> None:
        """Give back what `allocate` gave."""
        self._call("cudaFree", address)

    def allocate_pinned(self, size: int) -> int:
        """Address of `size` new bytes of page-locked host memory, fit for `copy`."""
        pointer = ctypes.c_void_p()
        self._call("cudaHostAlloc", ctypes.byref(pointer), size, 0)
        assert pointer.value is not None
        return pointer.value

    def free_pinned(self, address: int) -> None:
        """Give back what `allocate_pinned` gave."""
        self._call("cudaFreeHost", address)

    def copy(self, to: int, source: int, size: int, kind: int) -> None:
        """Copy on the stream and return at once; host memory must be page-locked."""
        self._call("cudaMemcpyAsync", to, source, size, kind, self.stream)

    def zero(self, address: int, size: int) -> None:
        """Fill with zeros on the stream."""
        self._call("cudaMemsetAsync", address, 0, size, self.stream)

    def synchronize(self) -> None:
        """Wait until the stream has done all that was put on it."""
        self._call("cudaStreamSynchronize", self.stream)

    def abandon_capture(self) -> bool:
        """Take the stream out of a capture that was left open; whether there was one."""
        status = ctypes.c_int()
        self._runtime.cudaStreamIsCapturing(self.stream, ctypes.byref(status))
        if status.value:
            graph = ctypes.c_void_p()
            self._runtime.cudaStreamEndCapture(self.stream, ctypes.byref(graph))
        self._runtime.cudaGetLastError()
        return bool(status.value)

    def _call(self, function: str, *arguments: Any) -> None:
        code = getattr(self._runtime, function)(*arguments)
        if code:
            self._runtime.cudaGetLastError()
            raise DeviceError(
                f"{function} failed: {self._reason(code)}. The card may be lost to this "
                "process; start it again, and see the kernel's log if it comes again"
            )

    def _reason(self, code: int) -> str:
        text = self._runtime.cudaGetErrorString(code)
        return f"CUDA error {code}, {(text or b'').decode(errors='replace')}"


def _declare(runtime: ctypes.CDLL) -> None:
    """Argument types: without them ctypes cuts addresses to 32 bits."""
    pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for function, arguments in {
        "cudaFree": [pointer],
        "cudaFreeHost": [pointer],
        "cudaHostAlloc": [pointer, size, ctypes.c_uint],
        "cudaMalloc": [pointer, size],
        "cudaMemcpyAsync": [pointer, pointer, size, integer, pointer],
        "cudaMemsetAsync": [pointer, integer, size, pointer],
        "cudaStreamCreateWithFlags": [pointer, ctypes.c_uint],
        "cudaStreamDestroy": [pointer],
        "cudaStreamEndCapture": [pointer, pointer],
        "cudaStreamIsCapturing": [pointer, pointer],
        "cudaStreamSynchronize": [pointer],
    }.items():
        getattr(runtime, function).argtypes = arguments
    runtime.cudaGetErrorString.restype = ctypes.c_char_p


def _load_libraries() -> ctypes.CDLL:
    """All of `LIBRARIES`; returns the first, or raises with what to install."""
    loaded = [_load(name) for name in LIBRARIES]
    missing = [name for name, library in zip(LIBRARIES, loaded, strict=True) if not library]
    if missing:
        raise DeviceError(
            f"the CUDA 13 libraries {', '.join(missing)} are not on this machine. Install "
            f"them: {INSTALL}"
        )
    try:
        ctypes.CDLL(DRIVER)
    except OSError as e:
        raise DeviceError(
            f"this machine has no NVIDIA driver ({DRIVER}: {e}). Use a machine with a GPU, or "
            "build the artifact for the CPU: mtp-export build --target cpu"
        ) from e
    assert loaded[0] is not None
    return loaded[0]


def _load(name: str) -> ctypes.CDLL | None:
    for path in _places(name):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    return None


def _places(name: str) -> Iterator[str]:
    yield name
    for package, pattern in (("nvidia", "*/lib"), ("torch", "lib")):
        spec = importlib.util.find_spec(package)
        for root in (spec.submodule_search_locations or ()) if spec else ():
            yield from (str(path) for path in sorted(Path(root).glob(f"{pattern}/{name}")))
