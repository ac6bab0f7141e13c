"""Public sizes of the family, for artifacts with random weights."""

from __future__ import annotations

from dataclasses import dataclass

from artifacts import AttentionSpec, GdnSpec, HeadSpec, LayerKind, ModelSpec

__all__ = ["GEOMETRIES", "spec_of"]

VOCABULARY = 248320
INTERVAL = 4
"""Every fourth layer is attention."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """What differs between the sizes; the rest is the same in all of them."""

    hidden: int
    layers: int
    intermediate: int
    query_heads: int
    kv_heads: int
    value_heads: int
    tied: bool


GEOMETRIES = {
    "qwen3.5-0.8b": Geometry(1024, 24, 3584, 8, 2, 16, True),
    "qwen3.5-2b": Geometry(2048, 24, 6144, 8, 2, 16, True),
    "qwen3.5-4b": Geometry(2560, 32, 9216, 16, 4, 32, True),
    "qwen3.5-9b": Geometry(4096, 32, 12288, 16, 4, 32, False),
    "qwen3.5-27b": Geometry(5120, 64, 17408, 24, 4, 48, False),
}
"""From the published configurations; the 2B and the tying of the 4B are not confirmed."""


def spec_of(name: str) -> ModelSpec:
    """The spec of a public size; raises `KeyError` for a name not in `GEOMETRIES`."""
    size = GEOMETRIES[name]
    kinds = (LayerKind.GDN, LayerKind.ATTENTION)
    return ModelSpec(
        family=name,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        vocab_size=VOCABULARY,
        layers=tuple(kinds[(i + 1) % INTERVAL == 0] for i in range(size.layers)),
        attention=AttentionSpec(
            query_heads=size.query_heads,
            kv_heads=size.kv_heads,
            head_dim=256,
            rotary_dim=64,
            rope_theta=1e7,
        ),
        gdn=GdnSpec(
            key_heads=16,
            value_heads=size.value_heads,
            key_dim=128,
            value_dim=128,
            conv_kernel=4,
            output_gate="silu",
        ),
        rms_norm_eps=1e-6,
        tied_embedding=size.tied,
        max_positions=262144,
        head=HeadSpec(
            layers=1,
            hidden_source="post_norm",
            feedback="post_norm",
            concat="embed_first",
            cache="own",
            intermediate_size=size.intermediate,
        ),
    )
