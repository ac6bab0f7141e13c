"""``config.json`` of a Qwen3.5-class checkpoint: the sizes, and what cannot be built.

Text-only files state the text model at top level; the multimodal wrapper (``qwen3_5``) keeps
it in ``text_config``. null means the same as a missing key. Keys that change nothing in
the computation (initialisers, dropout, cache switches) are not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from artifacts import AttentionSpec, Fields, GdnSpec, LayerKind, ModelSpec

__all__ = ["ConfigFields", "TextConfig", "parse_config"]

WRAPPER = "qwen3_5"
TEXT_FAMILIES = ("qwen3_5_text", "qwen3_next")
LAYER_TYPES = {"linear_attention": LayerKind.GDN, "full_attention": LayerKind.ATTENTION}
OUTPUT_GATES = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}
ROPE_OBJECTS = ("rope_parameters", "rope_scaling")  # the first that states a key wins

# Limits far above any model of the kind: they bound what a hostile file can ask for.
MAX_LAYERS = 1024
MAX_WIDTH = 2**20
MAX_VOCAB = 2**24
MAX_HEADS = 2**12
MAX_HEAD_WIDTH = 2**14
MAX_TAPS = 64
MAX_POSITIONS = 2**31 - 1
"""Lengths are int32 on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig:
    """What ``config.json`` says, checked."""

    spec: ModelSpec
    """Without a head: whether there is one is decided by the tensors present."""
    is_wrapped: bool
    """Whether the text model stands inside a multimodal wrapper."""
    announced_head_layers: int
    """MTP layers that the file announces, 0 when it says nothing."""
    eos_token_ids: tuple[int, ...]


class ConfigFields(Fields):
    """A JSON object of a model's configuration, where null stands for a missing key."""

    @classmethod
    def of(cls, fields: Fields) -> Self:
        """The same object, read by the rules of a configuration."""
        return cls(fields._values, fields.place)

    def has(self, key: str) -> bool:
        """Whether `key` is there and not null."""
        return self._values.get(key) is not None

    def bounded(self, key: str, maximum: float, *, default: float) -> float:
        """A number above zero and not above `maximum`."""
        value = self._values.get(key)
        # Compared before it is converted: a whole number can be too large for a float.
        if isinstance(value, int | float) and not 0 < value <= maximum:
            raise self.refuse(key, f"above zero and not above {maximum:g}")
        return self.number(key, default=default)

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """One token id or a list of them, () where there is none."""
        if not self.has(key):
            return ()
        is_list = isinstance(self._values[key], list)
        ids = self.integers(key) if is_list else (self.integer(key),)
        if any(i >= vocab_size for i in ids):
            raise self.refuse(key, f"token ids below vocab_size, {vocab_size}")
        return ids


def parse_config(fields: Fields) -> TextConfig:
    """Read a parsed ``config.json``.

    Raises:
        ParseError: a key is missing, ill-typed, out of its limits, at odds with another, or
            asks for something that no graph here computes.
    """
    outer = ConfigFields.of(fields)
    is_wrapped = outer.has("model_type") and outer.text("model_type") == WRAPPER
    text = outer.object("text_config") if is_wrapped else outer
    family = text.text("model_type", default=TEXT_FAMILIES[0] if is_wrapped else "")
    if family not in TEXT_FAMILIES:
        must = f"one of {WRAPPER}, {', '.join(TEXT_FAMILIES)}; no other family can be built"
        raise text.refuse("model_type", must)
    for level in (outer, text):
        if level.has("quantization_config"):
            raise level.refuse(
                "quantization_config", "absent: build from the unquantised checkpoint"
            )
    _refuse_variants(text)
    spec = _spec(text, family, tied=_is_tied(outer) or _is_tied(text))
    return TextConfig(
        spec=spec,
        is_wrapped=is_wrapped,
        announced_head_layers=_announced(text),
        eos_token_ids=outer.token_ids("eos_token_id", spec.vocab_size)
        or text.token_ids("eos_token_id", spec.vocab_size),
    )


def _refuse_variants(text: ConfigFields) -> None:
    if text.integer("num_experts", default=0):
        raise text.refuse("num_experts", "0: only dense feed-forwards can be built")
    if text.text("hidden_act", default="silu") != "silu":
        raise text.refuse("hidden_act", "silu, the only activation built")
    if text.boolean("attention_bias", default=False):
        raise text.refuse("attention_bias", "false: projections are built without bias")
    if not text.boolean("attn_output_gate", default=True):
        raise text.refuse("attn_output_gate", "true: attention is built with its gate")
    if text.boolean("mtp_use_dedicated_embeddings", default=False):
        raise text.refuse(
            "mtp_use_dedicated_embeddings", "false: the head shares the target's embedding"
        )


def _is_tied(level: ConfigFields) -> bool:
    return level.boolean("tie_word_embeddings", default=False)


def _announced(text: ConfigFields) -> int:
    keys = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
    return max(text.integer(key, default=0, maximum=MAX_LAYERS) for key in keys)


def _spec(text: ConfigFields, family: str, *, tied: bool) -> ModelSpec:
    layers = _layers(text)
    return ModelSpec(
        family=family,
        hidden_size=text.integer("hidden_size", minimum=1, maximum=MAX_WIDTH),
        intermediate_size=text.integer("intermediate_size", minimum=1, maximum=MAX_WIDTH),
        vocab_size=text.integer("vocab_size", minimum=1, maximum=MAX_VOCAB),
        layers=layers,
        attention=_attention(text),
        gdn=_gdn(text) if LayerKind.GDN in layers else None,
        rms_norm_eps=text.bounded("rms_norm_eps", 1.0, default=1e-6),
        tied_embedding=tied,
        max_positions=text.integer(
            "max_position_embeddings", default=32768, minimum=1, maximum=MAX_POSITIONS
        ),
        head=None,
    )


def _layers(text: ConfigFields) -> tuple[LayerKind, ...]:
    count = text.integer("num_hidden_layers", minimum=1, maximum=MAX_LAYERS)
    if not text.has("layer_types"):
        interval = text.integer(
            "full_attention_interval", default=4, minimum=1, maximum=MAX_LAYERS
        )
        kinds = (LayerKind.GDN, LayerKind.ATTENTION)
        return tuple(kinds[(i + 1) % interval == 0] for i in range(count))
    names = text.texts("layer_types", of=tuple(LAYER_TYPES))
    if len(names) != count:
        raise text.refuse(
            "layer_types",
            f"as long as num_hidden_layers, {count}; it has {len(names)} entries",
        )
    return tuple(LAYER_TYPES[name] for name in names)


def _attention(text: ConfigFields) -> AttentionSpec:
    query_heads = text.integer("num_attention_heads", minimum=1, maximum=MAX_HEADS)
    kv_heads = text.integer("num_key_value_heads", minimum=1, maximum=MAX_HEADS)
    if query_heads % kv_heads:
        raise text.refuse(
            "num_attention_heads", f"a multiple of num_key_value_heads, {kv_heads}"
        )
    head_dim = text.integer("head_dim", default=256, minimum=1, maximum=MAX_HEAD_WIDTH)
    rope = _rope(text, "partial_rotary_factor")
    rotary_dim = int(head_dim * rope.bounded("partial_rotary_factor", 1.0, default=0.25))
    if rotary_dim % 2 or not rotary_dim:
        raise rope.refuse(
            "partial_rotary_factor",
            f"such that an even number of the {head_dim} channels turns, not {rotary_dim}",
        )
    return AttentionSpec(
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rope_theta=_rope(text, "rope_theta").bounded("rope_theta", 1e15, default=1e7),
    )


def _rope(text: ConfigFields, key: str) -> ConfigFields:
    """The object that states `key`: ``rope_parameters`` before the top level."""
    nested = [text.object(name) for name in ROPE_OBJECTS if text.has(name)]
    for rope in nested:
        for kind in ("rope_type", "type"):
            if rope.has(kind) and rope.text(kind) != "default":
                raise rope.refuse(kind, "default: no other scaling of positions is built")
    return next((rope for rope in nested if rope.has(key)), text)


def _gdn(text: ConfigFields) -> GdnSpec:
    key_heads = text.integer("linear_num_key_heads", minimum=1, maximum=MAX_HEADS)
    value_heads = text.integer("linear_num_value_heads", minimum=1, maximum=MAX_HEADS)
    if value_heads % key_heads:
        raise text.refuse(
            "linear_num_value_heads", f"a multiple of linear_num_key_heads, {key_heads}"
        )
    gate = text.text("output_gate_type", default="silu")
    if gate not in OUTPUT_GATES:
        raise text.refuse("output_gate_type", "one of " + ", ".join(OUTPUT_GATES))
    width = {"minimum": 1, "maximum": MAX_HEAD_WIDTH}
    return GdnSpec(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=text.integer("linear_key_head_dim", **width),
        value_dim=text.integer("linear_value_head_dim", **width),
        conv_kernel=text.integer(
            "linear_conv_kernel_dim", default=4, minimum=2, maximum=MAX_TAPS
        ),
        output_gate=OUTPUT_GATES[gate],
    )
