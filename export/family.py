"""How checkpoints of the family name and pack tensors, and the canonical names they get.

    stored                                      canonical
    <prefix>layers.0.linear_attn.A_log [Hv]     layers.0.gdn.decay_scale [Hv] f32
    <prefix>layers.3.self_attn.q_proj.weight    layers.3.attention.q [H*hd, D]
        [2*H*hd, D], per head hd query rows     layers.3.attention.gate [H*hd, D]
        then hd gate rows

All matrices are ``[out, in]``, as stored. Norm weights are zero-centred, but for that of
the Gated DeltaNet's output: the ``1 +`` is folded in, in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from artifacts import GdnSpec, LayerKind, ModelSpec

__all__ = ["HEAD", "HEAD_GATE_PROJ", "Fold", "Piece", "RowGroups", "Source", "sources"]

HEAD = "mtp."
HEAD_GATE_PROJ = "mtp.layers.0.mlp.gate_proj.weight"
"""Its rows are the head's own I."""


class Fold(Enum):
    """What becomes of the stored values."""

    NONE = auto()
    """Nothing: they keep their dtype."""
    FLOAT32 = auto()
    ONE_PLUS = auto()
    """``1 + w`` in float32."""
    MINUS_EXP = auto()
    """``-exp(w)`` in float32."""


@dataclass(frozen=True, slots=True)
class RowGroups:
    """Rows ``i * period + start`` onwards, `width` of them, for each ``i < count``."""

    count: int
    period: int
    start: int
    width: int


@dataclass(frozen=True, slots=True)
class Piece:
    """One canonical tensor out of a stored one."""

    name: str
    fold: Fold = Fold.NONE
    rows: tuple[RowGroups, ...] = ()
    """Which rows, in order; () is all of them."""


@dataclass(frozen=True, slots=True)
class Source:
    """A stored tensor: the name and shape it must have, and what is made of it."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def sources(spec: ModelSpec, prefix: str) -> Iterator[Source]:
    """Every tensor that a checkpoint of `spec` holds.

    Args:
        spec: Says by its `head` whether there is one.
        prefix: What the names of the decoder begin with, such as ``model.``.
    """
    width = spec.hidden_size
    yield _plain(f"{prefix}embed_tokens.weight", (spec.vocab_size, width), "embed")
    for i, kind in enumerate(spec.layers):
        yield from _layer(
            spec, kind, spec.intermediate_size, f"{prefix}layers.{i}", f"layers.{i}"
        )
    yield _norm(f"{prefix}norm.weight", width, "norm")
    if not spec.tied_embedding:
        yield _plain("lm_head.weight", (spec.vocab_size, width), "lm_head")
    if spec.head is not None:
        yield _plain("mtp.fc.weight", (width, 2 * width), "head.fc")
        yield _norm("mtp.pre_fc_norm_embedding.weight", width, "head.embed_norm")
        yield _norm("mtp.pre_fc_norm_hidden.weight", width, "head.hidden_norm")
        yield from _layer(
            spec,
            LayerKind.ATTENTION,
            spec.head.intermediate_size,
            "mtp.layers.0",
            "head.layers.0",
        )
        yield _norm("mtp.norm.weight", width, "head.norm")


def _plain(name: str, shape: tuple[int, ...], canonical: str) -> Source:
    return Source(name, shape, (Piece(canonical),))


def _norm(name: str, width: int, canonical: str) -> Source:
    return Source(name, (width,), (Piece(canonical, Fold.ONE_PLUS),))


def _layer(
    spec: ModelSpec, kind: LayerKind, intermediate_size: int, name: str, canonical: str
) -> Iterator[Source]:
    width = spec.hidden_size
    yield _norm(f"{name}.input_layernorm.weight", width, f"{canonical}.input_norm")
    if kind is LayerKind.ATTENTION:
        yield from _attention(spec, f"{name}.self_attn", f"{canonical}.attention")
    elif spec.gdn is not None:
        yield from _gdn(spec, spec.gdn, f"{name}.linear_attn", f"{canonical}.gdn")
    yield _norm(f"{name}.post_attention_layernorm.weight", width, f"{canonical}.post_norm")
    for part in ("gate", "up"):
        shape = (intermediate_size, width)
        yield _plain(f"{name}.mlp.{part}_proj.weight", shape, f"{canonical}.mlp.{part}")
    shape = (width, intermediate_size)
    yield _plain(f"{name}.mlp.down_proj.weight", shape, f"{canonical}.mlp.down")


def _attention(spec: ModelSpec, name: str, canonical: str) -> Iterator[Source]:
    a = spec.attention
    queries, keys = a.query_heads * a.head_dim, a.kv_heads * a.head_dim
    packed = 2 * a.head_dim
    yield Source(
        f"{name}.q_proj.weight",
        (2 * queries, spec.hidden_size),
        (
            Piece(f"{canonical}.q", rows=(RowGroups(a.query_heads, packed, 0, a.head_dim),)),
            Piece(
                f"{canonical}.gate",
                rows=(RowGroups(a.query_heads, packed, a.head_dim, a.head_dim),),
            ),
        ),
    )
    yield _plain(f"{name}.k_proj.weight", (keys, spec.hidden_size), f"{canonical}.k")
    yield _plain(f"{name}.v_proj.weight", (keys, spec.hidden_size), f"{canonical}.v")
    yield _plain(f"{name}.o_proj.weight", (spec.hidden_size, queries), f"{canonical}.o")
    yield _norm(f"{name}.q_norm.weight", a.head_dim, f"{canonical}.q_norm")
    yield _norm(f"{name}.k_norm.weight", a.head_dim, f"{canonical}.k_norm")


def _gdn(spec: ModelSpec, g: GdnSpec, name: str, canonical: str) -> Iterator[Source]:
    width = spec.hidden_size
    if spec.family == "qwen3_next":
        yield from _fused(spec, g, name, canonical)
    else:
        yield _plain(f"{name}.in_proj_qkv.weight", (g.conv_dim, width), f"{canonical}.qkv")
        yield _plain(f"{name}.in_proj_z.weight", (g.values_width, width), f"{canonical}.z")
        for part in ("b", "a"):
            shape = (g.value_heads, width)
            yield _plain(f"{name}.in_proj_{part}.weight", shape, f"{canonical}.{part}")
    yield _plain(f"{name}.conv1d.weight", (g.conv_dim, 1, g.conv_kernel), f"{canonical}.conv")
    yield Source(
        f"{name}.A_log",
        (g.value_heads,),
        (Piece(f"{canonical}.decay_scale", Fold.MINUS_EXP),),
    )
    yield Source(
        f"{name}.dt_bias", (g.value_heads,), (Piece(f"{canonical}.dt_bias", Fold.FLOAT32),)
    )
    yield Source(
        f"{name}.norm.weight", (g.value_dim,), (Piece(f"{canonical}.norm", Fold.FLOAT32),)
    )
    yield _plain(f"{name}.out_proj.weight", (width, g.values_width), f"{canonical}.out")


def _fused(spec: ModelSpec, g: GdnSpec, name: str, canonical: str) -> Iterator[Source]:
    """Qwen3-Next packs by key head: dk q, dk k, r*dv v, r*dv z; and r b, r a."""
    heads, dk, ratio = g.key_heads, g.key_dim, g.value_heads // g.key_heads
    dv = ratio * g.value_dim
    period = 2 * (dk + dv)
    q, k = RowGroups(heads, period, 0, dk), RowGroups(heads, period, dk, dk)
    v, z = RowGroups(heads, period, 2 * dk, dv), RowGroups(heads, period, 2 * dk + dv, dv)
    yield Source(
        f"{name}.in_proj_qkvz.weight",
        (heads * period, spec.hidden_size),
        (Piece(f"{canonical}.qkv", rows=(q, k, v)), Piece(f"{canonical}.z", rows=(z,))),
    )
    b, a = RowGroups(heads, 2 * ratio, 0, ratio), RowGroups(heads, 2 * ratio, ratio, ratio)
    yield Source(
        f"{name}.in_proj_ba.weight",
        (2 * g.value_heads, spec.hidden_size),
        (Piece(f"{canonical}.b", rows=(b,)), Piece(f"{canonical}.a", rows=(a,))),
    )
