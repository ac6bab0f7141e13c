"""The buffers of every artifact of a spec: graphs are bound to them, a run counts on them."""

from __future__ import annotations

from artifacts.manifest import Buffer, Manifest
from artifacts.spec import LayerKind

__all__ = ["contract_buffers", "state_buffers"]


def state_buffers(manifest: Manifest) -> dict[str, Buffer]:
    """Caches and states that the spec demands, as buffers.

    The keys are ``target.{i}.key`` and ``.value`` of attention layers, ``.conv`` and
    ``.recurrent`` of GDN layers, ``head.0.key`` and ``.value`` of a head. On CUDA the states
    of all L GDN layers lie together: ``target.conv`` and ``target.recurrent`` with M - 1
    slots in front, and ``rows.conv`` and ``rows.recurrent`` for the M rows of a verify.
    """
    spec, dtype = manifest.spec, manifest.target.dtype
    attention, gdn = spec.attention, spec.gdn
    cache = Buffer(dtype, (1, attention.kv_heads, manifest.cache_rows, attention.head_dim))
    found: dict[str, Buffer] = {}
    for i in spec.layers_of(LayerKind.ATTENTION):
        found |= {f"target.{i}.key": cache, f"target.{i}.value": cache}
    layers, rows = spec.layers_of(LayerKind.GDN), manifest.rows
    for kind in ("conv", "recurrent") if gdn is not None and layers else ():
        assert gdn is not None
        state = (
            (gdn.conv_kernel - 1, gdn.conv_dim)
            if kind == "conv"
            else (gdn.value_heads, gdn.key_dim, gdn.value_dim)
        )
        type_ = dtype if kind == "conv" else "float32"
        if manifest.target.provider != "cuda":
            found |= {f"target.{i}.{kind}": Buffer(type_, (1, *state)) for i in layers}
            continue
        found[f"target.{kind}"] = Buffer(type_, (rows - 1 + len(layers), *state))
        if manifest.k:
            found[f"rows.{kind}"] = Buffer(type_, (len(layers), rows, *state))
    if manifest.k:
        found |= {"head.0.key": cache, "head.0.value": cache}
    return found


def contract_buffers(manifest: Manifest) -> dict[str, Buffer]:
    """Every buffer that a runner counts on, `state_buffers` included."""
    rows, spec, dtype = manifest.rows, manifest.spec, manifest.target.dtype
    found = {
        "ids": Buffer("int64", (1, rows)),
        "length": Buffer("int32", (1,)),
        "accepted": Buffer("int64", (1,)),
        "best": Buffer("int64", (1, rows)),
        "hidden": Buffer(dtype, (1, rows, spec.hidden_size)),
        "logits": Buffer(dtype, (1, rows, spec.vocab_size)),
        "result": Buffer("int64", (2 * rows + 2,)),
        "prompt_ids": Buffer("int64", (1, manifest.prefill_rows)),
    }
    if manifest.k:
        found["draft_count"] = Buffer("int32", (1,))
        found["prompt_next"] = Buffer("int64", (1, manifest.prefill_rows))
    return found | state_buffers(manifest)
