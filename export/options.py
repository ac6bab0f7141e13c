"""What a build is asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from artifacts import ModelSpec, Target

__all__ = ["BuildOptions"]

DTYPES = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """Sizes of an artifact and what it is lowered for."""

    k: int
    """Drafted tokens a step; 0 builds no verify and no draft graph."""
    capacity: int
    """Tokens a sequence may hold, prompt included."""
    prefill_rows: int
    """Most rows of one prefill chunk."""
    target: Target
    sampling: bool = True
    """Whether to build the graphs that sample, beside the greedy ones."""

    @property
    def rows(self) -> int:
        """M, the rows of the verify graph."""
        return self.k + 1

    @property
    def cache_rows(self) -> int:
        """C: a verify that starts on the last free row still writes all its M rows."""
        return self.capacity + self.rows

    @property
    def on_cuda(self) -> bool:
        """Whether the graphs are for ONNX Runtime's CUDA provider."""
        return self.target.provider == "cuda"

    @property
    def own_kernels(self) -> bool:
        """Whether this project's operators take the place of stock ones."""
        return self.target.kernels == "own"

    @property
    def dtype(self) -> ir.DataType:
        """T, the type of activations and caches."""
        return DTYPES[self.target.dtype]

    def with_head_of(self, spec: ModelSpec) -> BuildOptions:
        """These options for a model that may have no head: then k is 0."""
        if spec.head is not None or self.k == 0:
            return self
        return replace(self, k=0)
