"""The MTP head as a dynamic ONNX model with the canonical I/O.

    inputs   next_ids [1, S] int64 (the token after each row), hidden [1, S, D] (the target's,
             after its final norm), past_length [1] int32, past.0.key, past.0.value
    outputs  logits [1, S, V], hidden_out [1, S, D] (after the head's norm), present.0.*

    e = norm(embed(next_ids)); h = norm(hidden); u = layer(fc([e, h])); hidden_out = norm(u)

Embedding and LM head are the target's: initializers of the same names. Row i of the head is
row i of the target; its prediction is the token two positions on.
"""

from __future__ import annotations

import onnx_ir as ir
from onnxscript import OpBuilder, nn

from artifacts import HeadSpec, LayerKind, ModelSpec
from export.decoder import (
    INT32,
    INT64,
    IR_VERSION,
    DecoderLayer,
    cache_inputs,
    cache_ports,
    new_builder,
)
from export.layers import AddNorm, CacheInputs, Linear, Norm, contrib

__all__ = ["build_head"]

SUPPORTED = HeadSpec(
    layers=1,
    hidden_source="post_norm",
    feedback="post_norm",
    concat="embed_first",
    cache="own",
    intermediate_size=1,
)
"""What `Head` writes; `intermediate_size` is free."""


class Head(nn.Module):
    """See the module."""

    def __init__(self, spec: ModelSpec, head: HeadSpec, dtype: ir.DataType) -> None:
        super().__init__("head")
        width, eps = spec.hidden_size, spec.rms_norm_eps
        self.embed_norm = Norm(width, eps, dtype, "embed_norm")
        self.hidden_norm = Norm(width, eps, dtype, "hidden_norm")
        self.fc = Linear(2 * width, width, dtype, "fc")
        self.input_norm = Norm(width, eps, dtype, "layers.0.input_norm")
        self.layers = nn.ModuleList(
            [DecoderLayer(spec, LayerKind.ATTENTION, head.intermediate_size, dtype)]
        )
        self.norm = AddNorm(width, eps, dtype, "norm")
        for norm in (self.embed_norm, self.hidden_norm, self.input_norm, self.norm):
            norm._set_name("")
        self.fc._set_name("")

    def forward(
        self,
        op: OpBuilder,
        embedded: ir.Value,
        hidden: ir.Value,
        key: ir.Value,
        value: ir.Value,
        cache: CacheInputs,
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        """``embedded, hidden [1, S, D]`` to ``hidden_out [1, S, D]`` and the new cache."""
        joined = op.Concat(self.embed_norm(op, embedded), self.hidden_norm(op, hidden), axis=2)
        x = self.fc(op, joined)
        delta, x, key, value = self.layers[0](op, self.input_norm(op, x), x, key, value, cache)
        normed, _ = self.norm(op, delta, x)
        return normed, key, value


class HeadWithVocabulary(nn.Module):
    """The head between the target's embedding and LM head."""

    def __init__(self, spec: ModelSpec, head: HeadSpec, dtype: ir.DataType) -> None:
        super().__init__("")
        shape = [spec.vocab_size, spec.hidden_size]
        self.embed = nn.Parameter(shape, dtype, name="embed")
        self.head = Head(spec, head, dtype)
        self.lm_head = (
            None if spec.tied_embedding else nn.Parameter(shape, dtype, name="lm_head")
        )

    def forward(
        self, op: OpBuilder, next_ids: ir.Value, *rest: object
    ) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
        """Give logits, hidden_out, and the new cache."""
        embedded = op.Gather(self.embed, next_ids, axis=0)
        hidden_out, key, value = self.head(op, embedded, *rest)
        vocabulary = self.embed if self.lm_head is None else self.lm_head
        logits = contrib(op, "FusedMatMul", hidden_out, vocabulary, transB=1)[0]
        return logits, hidden_out, key, value


def build_head(spec: ModelSpec, *, dtype: ir.DataType, cache_rows: int) -> ir.Model:
    """The canonical head; its initializers have types and shapes but no values yet.

    Raises:
        ValueError: The model has no head, or one of a kind that is not written here.
    """
    head = spec.head
    if head is None:
        raise ValueError(f"the {spec.family} model has no MTP head")
    for name in ("layers", "hidden_source", "feedback", "concat", "cache"):
        is_, can = getattr(head, name), getattr(SUPPORTED, name)
        if is_ != can:
            raise ValueError(f"the MTP head has {name} = {is_!r}; only {can!r} can be built")
    builder = new_builder("head")
    op = builder.op
    next_ids = builder.input("next_ids", INT64, [1, "S"])
    hidden = builder.input("hidden", dtype, [1, "S", spec.hidden_size])
    past_length = builder.input("past_length", INT32, [1])
    ports = cache_ports(spec.attention, 0, dtype)
    key, value = (builder.input(f"past.{name}", t, shape) for name, t, shape in ports)
    cache = cache_inputs(
        builder, spec.attention, next_ids, past_length, key, dtype=dtype, cache_rows=cache_rows
    )
    logits, hidden_out, key, value = HeadWithVocabulary(spec, head, dtype)(
        op, next_ids, hidden, key, value, cache
    )
    builder.add_output(logits, "logits")
    builder.add_output(hidden_out, "hidden_out")
    builder.add_output(key, "present.0.key")
    builder.add_output(value, "present.0.value")
    return ir.Model(builder.graph, ir_version=IR_VERSION, producer_name="onnx-mtp")
