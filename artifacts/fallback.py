"""What an artifact for this project's kernels holds besides, for machines that lack them.

Each graph has a sibling in ONNX Runtime's own operators, bound to the same ports. Its
four-bit matrices lie in no file: they are unpacked from those that the kernels read, while
these are uploaded. The graphs say that they begin where the weight file ends, so that nobody
reads other numbers for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from artifacts.packed_w4 import BLOCK, PARTS, packed_shape
from artifacts.parse import Fields

if TYPE_CHECKING:
    from artifacts.manifest import WeightTensor

__all__ = ["DerivedTensor", "Fallback", "derived_fault"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback:
    """A graph in stock operators; rows, inputs and outputs are those of its sibling."""

    file: str
    """Beside the manifest."""
    sha256: str
    weights: tuple[str, ...]
    """Names of the tensors that it reads, derived ones included."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {"file": self.file, "sha256": self.sha256, "weights": list(self.weights)}

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        """Read from parsed JSON; raises `ParseError` that names the key."""
        return cls(
            file=fields.file_name("file"),
            sha256=fields.text("sha256"),
            weights=fields.texts("weights"),
        )


@dataclass(frozen=True, slots=True)
class DerivedTensor:
    """Four-bit weights, or their scales, as MatMulNBits takes them, out of a packed tensor."""

    dtype: str
    """``uint8`` for weights [N, K / 32, 16]; a float of 16 bits for scales [N, K / 32]."""
    shape: tuple[int, ...]
    source: str
    """The packed tensor, uint8, of the weight file."""
    part: str
    """``all`` of its rows, or the ``gates`` or ``values`` that lie in it by turns."""

    @property
    def length(self) -> int:
        """Bytes of it on the device."""
        rows, blocks = self.shape[:2]
        return rows * blocks * (BLOCK // 2 if self.dtype == "uint8" else 2)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "dtype": self.dtype,
            "shape": list(self.shape),
            "source": self.source,
            "part": self.part,
        }

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        """Read from parsed JSON; raises `ParseError` that names the key."""
        return cls(
            fields.one_of("dtype", ("uint8", "float16", "bfloat16")),
            fields.integers("shape", minimum=1),
            fields.text("source"),
            fields.one_of("part", PARTS),
        )


def derived_fault(tensor: DerivedTensor, source: WeightTensor | None) -> str | None:
    """Why `tensor` cannot be unpacked from `source`; None where it can."""
    wanted = (BLOCK // 2,) if tensor.dtype == "uint8" else ()
    if len(tensor.shape) < 2 or tensor.shape[2:] != wanted:
        sizes = ", ".join(["N", "K / 32", *map(str, wanted)])
        return f"is {tensor.dtype}{list(tensor.shape)}; it must be [{sizes}]"
    if source is None:
        return f"is to be unpacked from {tensor.source!r}, and there is no such weight"
    rows, blocks = tensor.shape[:2]
    if tensor.part != "all":
        rows = -(-rows // 8) * 16
    packed = packed_shape(rows, blocks)
    if (source.dtype, source.shape) != ("uint8", packed):
        return (
            f"is {list(tensor.shape)}, {tensor.part} of uint8{list(packed)}; "
            f"{tensor.source!r} is {source.dtype}{list(source.shape)}"
        )
    return None
