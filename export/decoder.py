"""The target: the family's decoder as a dynamic ONNX model with the canonical I/O.

    inputs   input_ids [1, S] int64, past_length [1] int32,
             past.{i}.key, past.{i}.value [1, Hkv, C, hd]            attention layers
             past.{i}.conv [1, K-1, conv_dim], past.{i}.recurrent [1, Hv, dk, dv], float32
    outputs  logits [1, S, V], hidden [1, S, D] (after the final norm), present.* as past.*

The convolution's state holds its columns channels-last, as the convolution reads its input:
channels-first would need two transposes a layer.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnxscript import GraphBuilder, OpBuilder, nn

from artifacts import AttentionSpec, LayerKind, ModelSpec
from export.layers import (
    AddNorm,
    Attention,
    CacheInputs,
    FeedForward,
    GatedDeltaNet,
    Norm,
    contrib,
)

__all__ = [
    "OPSETS",
    "DecoderLayer",
    "build_target",
    "cache_inputs",
    "cache_ports",
    "new_builder",
]

OPSETS = {"": 24, "com.microsoft": 1}
IR_VERSION = 11
FLOAT, INT32, INT64 = ir.DataType.FLOAT, ir.DataType.INT32, ir.DataType.INT64


class DecoderLayer(nn.Module):
    """``mixer`` then feed-forward, each followed by the residual addition and the next norm.

    Takes the normed stream and the stream itself, gives both back; the norm after the
    feed-forward belongs to whatever comes next and is passed in.
    """

    def __init__(
        self, spec: ModelSpec, kind: LayerKind, inner: int, dtype: ir.DataType
    ) -> None:
        super().__init__()
        eps, width = spec.rms_norm_eps, spec.hidden_size
        if kind is LayerKind.GDN:
            assert spec.gdn is not None
            self.mixer: nn.Module = GatedDeltaNet(width, spec.gdn, eps, dtype)
        else:
            self.mixer = Attention(width, spec.attention, eps, dtype)
        self.post_norm = AddNorm(width, eps, dtype, "post_norm")
        self.mlp = FeedForward(width, inner, dtype)

    def forward(
        self, op: OpBuilder, normed: ir.Value, x: ir.Value, *state: object
    ) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
        """Give the feed-forward's delta, the stream before it, and the two new states."""
        delta, first, second = self.mixer(op, normed, *state)
        normed, x = self.post_norm(op, delta, x)
        return self.mlp(op, normed), x, first, second


class Target(nn.Module):
    """Embedding, layers, final norm, LM head."""

    def __init__(self, spec: ModelSpec, dtype: ir.DataType) -> None:
        super().__init__("")
        self.spec = spec
        width, eps = spec.hidden_size, spec.rms_norm_eps
        self.embed = nn.Parameter([spec.vocab_size, width], dtype, name="embed")
        self.layers = nn.ModuleList(
            [DecoderLayer(spec, kind, spec.intermediate_size, dtype) for kind in spec.layers]
        )
        norms: list[nn.Module] = [Norm(width, eps, dtype, "layers.0.input_norm")]
        norms += [
            AddNorm(width, eps, dtype, f"layers.{i}.input_norm")
            for i in range(1, len(spec.layers))
        ]
        norms.append(AddNorm(width, eps, dtype, "norm"))
        self.norms = nn.ModuleList(norms)
        for norm in norms:
            norm._set_name("")
        self.lm_head = (
            None
            if spec.tied_embedding
            else nn.Parameter([spec.vocab_size, width], dtype, name="lm_head")
        )

    def forward(
        self,
        op: OpBuilder,
        input_ids: ir.Value,
        states: list[tuple[ir.Value, ir.Value]],
        cache: CacheInputs,
    ) -> tuple[ir.Value, ir.Value, list[tuple[ir.Value, ir.Value]]]:
        """``input_ids [1, S]`` to logits, hidden, and the new states of every layer."""
        x = op.Gather(self.embed, input_ids, axis=0)
        norms = iter(self.norms)
        normed = next(norms)(op, x)
        new_states = []
        for kind, layer, (first, second) in zip(
            self.spec.layers, self.layers, states, strict=True
        ):
            extra = (cache,) if kind is LayerKind.ATTENTION else ()
            delta, x, first, second = layer(op, normed, x, first, second, *extra)
            new_states.append((first, second))
            normed, x = next(norms)(op, delta, x)
        head = self.embed if self.lm_head is None else self.lm_head
        logits = contrib(op, "FusedMatMul", normed, head, transB=1)[0]
        return logits, normed, new_states


def build_target(spec: ModelSpec, *, dtype: ir.DataType, cache_rows: int) -> ir.Model:
    """The canonical target; its initializers have types and shapes but no values yet.

    Args:
        spec: The model.
        dtype: T, the type of activations, weights and caches.
        cache_rows: Rows of the rotary table, C of any cache that will be bound.

    Raises:
        ValueError: No layer is attention, or the kernel cannot turn so many channels.
    """
    if LayerKind.ATTENTION not in spec.layers:
        raise ValueError(
            f"the {spec.family} model has no attention layer, whose cache tells all others "
            "how many rows there are; only hybrids can be built"
        )
    builder = new_builder("target")
    op = builder.op
    input_ids = builder.input("input_ids", INT64, [1, "S"])
    past_length = builder.input("past_length", INT32, [1])
    ports = [_state_ports(spec, i, kind, dtype) for i, kind in enumerate(spec.layers)]
    states = [tuple(builder.input(f"past.{n}", t, s) for n, t, s in layer) for layer in ports]
    key = states[spec.layers_of(LayerKind.ATTENTION)[0]][0]
    cache = cache_inputs(
        builder,
        spec.attention,
        input_ids,
        past_length,
        key,
        dtype=dtype,
        cache_rows=cache_rows,
    )
    logits, hidden, new_states = Target(spec, dtype)(op, input_ids, states, cache)
    builder.add_output(logits, "logits")
    builder.add_output(hidden, "hidden")
    for layer, values in zip(ports, new_states, strict=True):
        for (name, _, _), value in zip(layer, values, strict=True):
            builder.add_output(value, f"present.{name}")
    return ir.Model(builder.graph, ir_version=IR_VERSION, producer_name="onnx-mtp")


def new_builder(name: str) -> GraphBuilder:
    """A builder of an empty graph with this project's operator sets."""
    return GraphBuilder(ir.Graph([], [], nodes=[], opset_imports=dict(OPSETS), name=name))


def cache_inputs(
    builder: GraphBuilder,
    spec: AttentionSpec,
    rows_of: ir.Value,
    past_length: ir.Value,
    key: ir.Value,
    *,
    dtype: ir.DataType,
    cache_rows: int,
) -> CacheInputs:
    """Lengths and rotary table for all attention layers of a graph.

    Args:
        builder: Where they are written.
        spec: Rotary sizes.
        rows_of: A value [1, S, ...] that tells S.
        past_length: int32 [1], rows in the cache before this forward.
        key: A cache [1, Hkv, C, hd] that tells C.
        dtype: T.
        cache_rows: Rows of the rotary table.

    Raises:
        ValueError: The kernel cannot turn so many channels.
    """
    if spec.rotary_dim % 16 or not 16 <= spec.rotary_dim <= spec.head_dim:
        raise ValueError(
            f"the attention layers have rotary_dim = {spec.rotary_dim}; ONNX Runtime's "
            f"GroupQueryAttention turns a multiple of 16 channels, up to {spec.head_dim} here"
        )
    op = builder.op
    rows = op.Cast(op.Shape(rows_of, start=1, end=2), to=INT32)
    last_row = op.Sub(op.Add(past_length, rows), op.Constant(value=ir.tensor([1], INT32)))
    last_row.name = "last_row"
    total = op.Squeeze(op.Cast(op.Shape(key, start=2, end=3), to=INT32))
    cos, sin = rotary_table(spec, cache_rows)
    return CacheInputs(
        last_row,
        total,
        builder.initializer(ir.tensor(cos.astype(dtype.numpy())), "rotary.cos"),
        builder.initializer(ir.tensor(sin.astype(dtype.numpy())), "rotary.sin"),
    )


def rotary_table(
    spec: AttentionSpec, rows: int
) -> tuple[np.ndarray[tuple[int, int]], np.ndarray[tuple[int, int]]]:
    """Cosine and sine [rows, rotary_dim / 2], computed in float64, given as float32."""
    exponent = np.arange(0, spec.rotary_dim, 2, dtype=np.float64) / spec.rotary_dim
    angle = np.arange(rows, dtype=np.float64)[:, None] * spec.rope_theta**-exponent
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def cache_ports(
    spec: AttentionSpec, layer: int, dtype: ir.DataType
) -> list[tuple[str, ir.DataType, list[int | str]]]:
    """Name (without ``past.``), type and shape of an attention layer's cache."""
    shape: list[int | str] = [1, spec.kv_heads, "C", spec.head_dim]
    return [(f"{layer}.key", dtype, shape), (f"{layer}.value", dtype, shape)]


def _state_ports(
    spec: ModelSpec, layer: int, kind: LayerKind, dtype: ir.DataType
) -> list[tuple[str, ir.DataType, list[int | str]]]:
    if kind is LayerKind.ATTENTION:
        return cache_ports(spec.attention, layer, dtype)
    assert spec.gdn is not None
    gdn = spec.gdn
    return [
        (f"{layer}.conv", FLOAT, [1, gdn.conv_kernel - 1, gdn.conv_dim]),
        (f"{layer}.recurrent", FLOAT, [1, gdn.value_heads, gdn.key_dim, gdn.value_dim]),
    ]
