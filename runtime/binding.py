"""Inputs and outputs of a session: what they are, and the addresses they are bound to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnxruntime

__all__ = ["HOST_MEMORY", "Binding", "Tensor", "declared"]

HOST_MEMORY = "Cpu"
"""What ONNX Runtime calls the host's memory."""

ELEMENTS = {
    "float32": ("tensor(float)", 1),
    "uint8": ("tensor(uint8)", 2),
    "int8": ("tensor(int8)", 3),
    "int32": ("tensor(int32)", 6),
    "int64": ("tensor(int64)", 7),
    "bool": ("tensor(bool)", 9),
    "float16": ("tensor(float16)", 10),
    "bfloat16": ("tensor(bfloat16)", 16),
}
"""Our dtype -> ONNX Runtime's name of the type, and ONNX's number for it."""

DTYPES = {name: dtype for dtype, (name, _) in ELEMENTS.items()}


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input or output as the ONNX file declares it."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    """A string is a size that a run chooses."""

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class Binding:
    """Inputs and outputs of one session, bound to addresses."""

    def __init__(self, session: Any, provider: str) -> None:
        self._binding = onnxruntime.IOBinding(session)
        self._device = provider

    def bind_input(
        self,
        name: str,
        dtype: str,
        shape: Sequence[int],
        address: int,
        *,
        on_host: bool = False,
    ) -> None:
        """Let input `name` read at `address` at every later run.

        With `on_host` the address is in the host's memory whatever the provider; it must be
        one of `Session.host_inputs`, or ONNX Runtime copies it now and never again.
        """
        number, device = ELEMENTS[dtype][1], "cpu" if on_host else self._device
        self._binding.bind_input(name, device, 0, number, list(shape), address)

    def bind_output(self, name: str, dtype: str, shape: Sequence[int], address: int) -> None:
        """Let output `name` be written at `address` at every later run."""
        number = ELEMENTS[dtype][1]
        self._binding.bind_output(name, self._device, 0, number, list(shape), address)


def declared(value: Any) -> Tensor:
    """What ONNX Runtime tells of an input or output."""
    shape = tuple(size if isinstance(size, int) else str(size) for size in value.shape)
    return Tensor(value.name, DTYPES.get(value.type, value.type), shape)
