"""What a model is: the sizes and switches that every room agrees on.

Shape letters, used in every docstring of this project:

    B   batch, always 1                    S   rows of one forward (dynamic)
    M   rows of the verify graph, k + 1    k   drafted tokens a step
    C   rows of a key/value cache          V   vocabulary
    D   hidden width                       I   feed-forward width
    H   query heads                        Hkv key/value heads       hd  their width
    Hk  key heads of a Gated DeltaNet      Hv  its value heads       dk, dv  their widths
    K   taps of its causal convolution     conv_dim = 2 * Hk * dk + Hv * dv
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self

from artifacts.parse import Fields

__all__ = ["AttentionSpec", "GdnSpec", "HeadSpec", "LayerKind", "ModelSpec"]


class LayerKind(StrEnum):
    """What mixes the rows of a decoder layer."""

    GDN = "gdn"
    """Gated DeltaNet: a causal convolution and a recurrent matrix."""
    ATTENTION = "attention"
    """Full attention with grouped key/value heads, rotary embedding and an output gate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """A full-attention layer: ``o_proj(attention(q, k, v) * sigmoid(gate))``."""

    query_heads: int
    """H"""
    kv_heads: int
    """Hkv; H is a multiple of it."""
    head_dim: int
    """hd"""
    rotary_dim: int
    """Leading channels of a head that turn ("rotate half" pairing); the rest pass through."""
    rope_theta: float

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        """Read from parsed JSON; raises `ParseError` that names the key."""
        return cls(
            query_heads=fields.integer("query_heads", minimum=1),
            kv_heads=fields.integer("kv_heads", minimum=1),
            head_dim=fields.integer("head_dim", minimum=1),
            rotary_dim=fields.integer("rotary_dim", minimum=0),
            rope_theta=fields.number("rope_theta"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GdnSpec:
    """A Gated DeltaNet layer."""

    key_heads: int
    """Hk; query heads are as many."""
    value_heads: int
    """Hv, a multiple of Hk: key head i serves value heads i*Hv/Hk onwards."""
    key_dim: int
    """dk"""
    value_dim: int
    """dv"""
    conv_kernel: int
    """K; the convolution's state holds the K - 1 newest columns *before* the convolution."""
    output_gate: str
    """Activation on z: ``silu`` or ``sigmoid``."""

    @property
    def keys_width(self) -> int:
        """``Hk * dk``, the channels of all keys of one row."""
        return self.key_heads * self.key_dim

    @property
    def values_width(self) -> int:
        """``Hv * dv``, the channels of all values of one row."""
        return self.value_heads * self.value_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution, in the order q | k | v."""
        return 2 * self.keys_width + self.values_width

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        """Read from parsed JSON; raises `ParseError` that names the key."""
        return cls(
            key_heads=fields.integer("key_heads", minimum=1),
            value_heads=fields.integer("value_heads", minimum=1),
            key_dim=fields.integer("key_dim", minimum=1),
            value_dim=fields.integer("value_dim", minimum=1),
            conv_kernel=fields.integer("conv_kernel", minimum=2),
            output_gate=fields.one_of("output_gate", ("silu", "sigmoid")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """What differs between families of MTP heads; today's graphs take the first value.

    The next family is a new value here and a branch where it is read, not a second head.
    """

    layers: int
    """Layers of the head; the same one serves every draft step when it is 1."""
    hidden_source: str
    """Target hidden state that enters: ``post_norm`` (after its final norm), ``pre_norm``."""
    feedback: str
    """What the head feeds back to itself: ``post_norm`` (after its norm), ``pre_norm``."""
    concat: str
    """Input order of ``fc``: ``embed_first`` or ``hidden_first``."""
    cache: str
    """Keys and values: ``own``, or the ``target``'s."""
    intermediate_size: int
    """I of the head's feed-forward."""

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        """Read from parsed JSON; raises `ParseError` that names the key."""
        return cls(
            layers=fields.integer("layers", minimum=1),
            hidden_source=fields.one_of("hidden_source", ("post_norm", "pre_norm")),
            feedback=fields.one_of("feedback", ("post_norm", "pre_norm")),
            concat=fields.one_of("concat", ("embed_first", "hidden_first")),
            cache=fields.one_of("cache", ("own", "target")),
            intermediate_size=fields.integer("intermediate_size", minimum=1),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder and, where the source has one, its MTP head."""

    family: str
    """``model_type`` of the text model, for people."""
    hidden_size: int
    """D"""
    intermediate_size: int
    """I"""
    vocab_size: int
    """V"""
    layers: tuple[LayerKind, ...]
    attention: AttentionSpec
    gdn: GdnSpec | None
    """None when no layer is of that kind."""
    rms_norm_eps: float
    tied_embedding: bool
    """Whether the LM head is the embedding matrix."""
    max_positions: int
    """Longest sequence the source announces."""
    head: HeadSpec | None

    def layers_of(self, kind: LayerKind) -> tuple[int, ...]:
        """Numbers of the layers of one kind, ascending."""
        return tuple(i for i, layer in enumerate(self.layers) if layer is kind)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values, the inverse of `parse`."""
        return asdict(self) | {"layers": [str(layer) for layer in self.layers]}

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        """Read from parsed JSON; raises `ParseError` that names the key."""
        gdn, head = fields.optional_object("gdn"), fields.optional_object("head")
        kinds = tuple(str(kind) for kind in LayerKind)
        return cls(
            family=fields.text("family"),
            hidden_size=fields.integer("hidden_size", minimum=1),
            intermediate_size=fields.integer("intermediate_size", minimum=1),
            vocab_size=fields.integer("vocab_size", minimum=1),
            layers=tuple(LayerKind(name) for name in fields.texts("layers", of=kinds)),
            attention=AttentionSpec.parse(fields.object("attention")),
            gdn=None if gdn is None else GdnSpec.parse(gdn),
            rms_norm_eps=fields.number("rms_norm_eps"),
            tied_embedding=fields.boolean("tied_embedding"),
            max_positions=fields.integer("max_positions", minimum=1),
            head=None if head is None else HeadSpec.parse(head),
        )
