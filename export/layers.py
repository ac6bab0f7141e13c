"""The layers of the family as modules that write ONNX graph.

The operators are those that ONNX Runtime has kernels for, so that nothing has to be fused
afterwards. `T` is the type of activations; whatever must not be rounded (all of a Gated
DeltaNet layer between its projections, its states) is float32 whatever `T` is.

Equations: Qwen3.5's published modelling code; the NumPy oracle in ``tests/oracle`` has them
in the order used here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnxscript import OpBuilder, nn

from artifacts import AttentionSpec, GdnSpec
from passes.contrib import DOMAIN, infer_outputs

__all__ = [
    "AddNorm",
    "Attention",
    "CacheInputs",
    "FeedForward",
    "GatedDeltaNet",
    "Linear",
    "Norm",
    "contrib",
]

FLOAT = ir.DataType.FLOAT
L2_EPSILON = 1e-6
"""Added to the sum of squares inside the root when q and k are normalised."""


def contrib(
    op: OpBuilder,
    op_type: str,
    *inputs: ir.Value | None,
    outputs: int = 1,
    **attributes: object,
) -> list[ir.Value]:
    """A ``com.microsoft`` node with typed outputs."""
    made = getattr(op, op_type)(
        *inputs, _domain=DOMAIN, _version=1, _outputs=outputs, **attributes
    )
    values: list[ir.Value] = [made] if isinstance(made, ir.Value) else list(made)
    node = values[0].producer()
    assert node is not None
    infer_outputs(node)
    return values


class Linear(nn.Module):
    """``x [1, S, in] -> x @ weight.T [1, S, out]``; the weight is [out, in], as stored."""

    def __init__(self, width_in: int, width_out: int, dtype: ir.DataType, name: str) -> None:
        super().__init__("")
        self.weight = nn.Parameter([width_out, width_in], dtype, name=name)

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        """See the class."""
        return contrib(op, "FusedMatMul", x, self.weight, transB=1)[0]


class Norm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis, the mean in float32."""

    def __init__(self, width: int, eps: float, dtype: ir.DataType, name: str) -> None:
        super().__init__("")
        self.eps = eps
        self.weight = nn.Parameter([width], dtype, name=name)

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        """See the class."""
        return op.RMSNormalization(x, self.weight, epsilon=self.eps)


class AddNorm(Norm):
    """``(delta, x) -> (norm(x + delta), x + delta)``: a residual sum and the next norm."""

    def forward(  # type: ignore[override]
        self, op: OpBuilder, delta: ir.Value, x: ir.Value
    ) -> tuple[ir.Value, ir.Value]:
        """See the class."""
        normed, mean, deviation, total = contrib(
            op,
            "SkipSimplifiedLayerNormalization",
            delta,
            x,
            self.weight,
            outputs=4,
            epsilon=self.eps,
        )
        mean.name = deviation.name = ""  # optional outputs that nobody reads
        return normed, total


class FeedForward(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, width: int, inner: int, dtype: ir.DataType) -> None:
        super().__init__("mlp")
        self.gate = Linear(width, inner, dtype, "gate")
        self.up = Linear(width, inner, dtype, "up")
        self.down = Linear(inner, width, dtype, "down")

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        """See the class."""
        silu = contrib(op, "QuickGelu", self.gate(op, x), alpha=1.0)[0]
        return self.down(op, op.Mul(silu, self.up(op, x)))


@dataclass(frozen=True, slots=True)
class CacheInputs:
    """What every attention layer of a graph needs to use its cache."""

    last_row: ir.Value
    """int32 [1]: position of the last row of this forward."""
    total: ir.Value
    """int32 []: an upper bound of all lengths, the rows of the cache (C)."""
    cos: ir.Value
    """T [C, rotary_dim / 2]"""
    sin: ir.Value


class Attention(nn.Module):
    """Gated full attention over a cache that is written in place.

    ``x [1, S, D], past key and value [1, Hkv, C, hd] -> [1, S, D], present key and value``
    """

    def __init__(
        self, width: int, spec: AttentionSpec, eps: float, dtype: ir.DataType
    ) -> None:
        super().__init__("attention")
        self.spec = spec
        heads, kv = spec.query_heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.q = Linear(width, heads, dtype, "q")
        self.gate = Linear(width, heads, dtype, "gate")
        self.k = Linear(width, kv, dtype, "k")
        self.v = Linear(width, kv, dtype, "v")
        self.o = Linear(heads, width, dtype, "o")
        self.q_norm = Norm(spec.head_dim, eps, dtype, "q_norm")
        self.k_norm = Norm(spec.head_dim, eps, dtype, "k_norm")

    def forward(
        self, op: OpBuilder, x: ir.Value, key: ir.Value, value: ir.Value, cache: CacheInputs
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        """See the class."""
        spec = self.spec
        attended, key, value = contrib(
            op,
            "GroupQueryAttention",
            self._per_head(op, self.q_norm, self.q(op, x), spec.query_heads),
            self._per_head(op, self.k_norm, self.k(op, x), spec.kv_heads),
            self.v(op, x),
            key,
            value,
            cache.last_row,
            cache.total,
            cache.cos,
            cache.sin,
            outputs=3,
            num_heads=spec.query_heads,
            kv_num_heads=spec.kv_heads,
            do_rotary=1,
            scale=spec.head_dim**-0.5,
        )
        gated = op.Mul(attended, op.Sigmoid(self.gate(op, x)))
        return self.o(op, gated), key, value

    def _per_head(self, op: OpBuilder, norm: Norm, x: ir.Value, heads: int) -> ir.Value:
        """``norm`` over each head of ``x [1, S, heads * hd]``."""
        width = self.spec.head_dim
        split = op.Reshape(x, op.Constant(value_ints=[0, 0, heads, width]))
        return op.Reshape(norm(op, split), op.Constant(value_ints=[0, 0, heads * width]))


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet: causal convolution, gated delta rule, gated norm.

    ``x [1, S, D], conv float32 [1, K-1, conv_dim], recurrent float32 [1, Hv, dk, dv] ->
    [1, S, D]`` and the two states after the last row. All between the projections is
    float32: then one cast serves all of them once they are merged.
    """

    def __init__(self, width: int, spec: GdnSpec, eps: float, dtype: ir.DataType) -> None:
        super().__init__("gdn")
        self.spec, self.eps, self.dtype = spec, eps, dtype
        self.qkv = Linear(width, spec.conv_dim, dtype, "qkv")
        self.z = Linear(width, spec.values_width, dtype, "z")
        self.b = Linear(width, spec.value_heads, dtype, "b")
        self.a = Linear(width, spec.value_heads, dtype, "a")
        self.out = Linear(spec.values_width, width, dtype, "out")
        self.conv = nn.Parameter([spec.conv_dim, 1, spec.conv_kernel], FLOAT, name="conv")
        self.decay_scale = nn.Parameter([spec.value_heads], FLOAT, name="decay_scale")
        self.dt_bias = nn.Parameter([spec.value_heads], FLOAT, name="dt_bias")
        self.norm = nn.Parameter([spec.value_dim], FLOAT, name="norm")

    def forward(
        self, op: OpBuilder, x: ir.Value, conv: ir.Value, recurrent: ir.Value
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        """See the class."""
        spec = self.spec
        mixed, conv = contrib(
            op,
            "CausalConvWithState",
            self._exact(op, self.qkv(op, x)),
            self.conv,
            None,
            conv,
            outputs=2,
            activation="silu",
            channels_last=1,
            ndim=1,
        )
        keys = spec.keys_width
        q, k, v = op.Split(
            mixed,
            op.Constant(value_ints=[keys, keys, spec.values_width]),
            axis=2,
            _outputs=3,
        )
        decay, beta = contrib(
            op,
            "LinearAttentionGate",
            self._exact(op, self.a(op, x)),
            self.dt_bias,
            self.decay_scale,
            self._exact(op, self.b(op, x)),
            outputs=2,
        )
        read, recurrent = contrib(
            op,
            "LinearAttention",
            self._l2(op, q),
            self._l2(op, k),
            v,
            recurrent,
            decay,
            beta,
            outputs=2,
            q_num_heads=spec.key_heads,
            kv_num_heads=spec.value_heads,
            update_rule="gated_delta",
            scale=spec.key_dim**-0.5,
        )
        normed = contrib(
            op,
            "GatedRMSNorm",
            read,
            self.norm,
            self._exact(op, self.z(op, x)),
            epsilon=self.eps,
            activation=spec.output_gate,
        )[0]
        if self.dtype != FLOAT:
            normed = op.Cast(normed, to=self.dtype)
        return self.out(op, normed), conv, recurrent

    def _exact(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        """`x` in float32: decay and state amplify what a rounding loses."""
        return x if self.dtype == FLOAT else op.Cast(x, to=FLOAT)

    def _l2(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        """``x / sqrt(sum(x^2) + eps)`` over each head, as one RMS norm.

        mean(x^2) = sum(x^2) / dk, so an epsilon of eps / dk and a weight of 1 / sqrt(dk)
        give the L2 norm in one kernel, epsilon included.
        """
        heads, width = self.spec.key_heads, self.spec.key_dim
        split = op.Reshape(x, op.Constant(value_ints=[0, 0, heads, width]))
        scale = np.full(width, 1 / math.sqrt(width), np.float32)
        normed = op.RMSNormalization(
            split, op.Constant(value=ir.tensor(scale)), epsilon=L2_EPSILON / width
        )
        return op.Reshape(normed, op.Constant(value_ints=[0, 0, heads * width]))
