"""The buffers of every artifact of a spec: graphs are bound to them, a run counts on them.

On the CPU each state has a buffer of its own. On CUDA the states of all L Gated DeltaNet
layers lie in one buffer a kind, so that one kernel commits them:

    target.recurrent [M-1+L, Hv, dk, dv]     slot M-1+g is the state of the g-th such layer
    rows.recurrent [L, M, Hv, dk, dv]        the states after each row of a verify

and the same with ``conv``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from artifacts.manifest import SAMPLED_RANKS, Buffer, Manifest
from artifacts.spec import GdnSpec, LayerKind

__all__ = ["State", "catch_up_buffers", "contract_buffers", "sample_buffers", "states"]


@dataclass(frozen=True, slots=True)
class State:
    """What a layer keeps from row to row: where it lies."""

    owner: str
    """``target`` or ``head``."""
    buffer: str
    offset: int
    """Elements of the buffer before it."""
    shape: tuple[int, ...]
    """Without the batch axis for states that share a buffer."""

    @property
    def end(self) -> int:
        """Elements of the buffer up to its last one."""
        return self.offset + math.prod(self.shape)


def states(manifest: Manifest) -> dict[str, State]:
    """Every cache and state that the spec demands.

    The names are ``target.{i}.key`` and ``.value`` of attention layers, ``.conv`` and
    ``.recurrent`` of GDN layers, ``head.0.key`` and ``.value`` of a head.
    """
    spec, found = manifest.spec, {}
    caches = [f"target.{i}" for i in spec.layers_of(LayerKind.ATTENTION)]
    for layer in [*caches, "head.0"] if manifest.k else caches:
        for name in (f"{layer}.key", f"{layer}.value"):
            found[name] = State(layer.partition(".")[0], name, 0, _cache(manifest))
    for kind, shape in _gdn_shapes(spec.gdn).items():
        for g, i in enumerate(spec.layers_of(LayerKind.GDN)):
            name = f"target.{i}.{kind}"
            if manifest.target.provider == "cuda":
                offset = (manifest.rows - 1 + g) * math.prod(shape)
                found[name] = State("target", f"target.{kind}", offset, shape)
            else:
                found[name] = State("target", name, 0, (1, *shape))
    return found


def contract_buffers(manifest: Manifest) -> dict[str, Buffer]:
    """Every buffer that a runner counts on, those of all states included."""
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
    if manifest.samples:
        found |= sample_buffers(rows, spec.vocab_size)
    if "catch_up" in manifest.graphs:
        found |= catch_up_buffers(manifest.prefill_rows, spec.hidden_size, dtype)
    for name, state in states(manifest).items():
        if state.buffer == name:
            exact = name.endswith((".conv", ".recurrent"))
            found[name] = Buffer("float32" if exact else dtype, state.shape)
    if manifest.target.provider == "cuda" and spec.layers_of(LayerKind.GDN):
        layers = len(spec.layers_of(LayerKind.GDN))
        for kind, shape in _gdn_shapes(spec.gdn).items():
            found[f"target.{kind}"] = Buffer("float32", (rows - 1 + layers, *shape))
            if manifest.k:
                found[f"rows.{kind}"] = Buffer("float32", (layers, rows, *shape))
    return found


def sample_buffers(rows: int, vocab_size: int) -> dict[str, Buffer]:
    """What the host says to graphs that sample; `passes.sample` says what becomes of it.

    ``sample.prompt`` is 1 for tokens of the prompt, ``sample.counts`` how often each token
    was emitted; both matter to penalties alone.
    """
    ranks = min(SAMPLED_RANKS, vocab_size)
    numbers = (
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    )
    return {
        "sample.noise": Buffer("float32", (1, rows, ranks)),
        "sample.prompt": Buffer("float32", (vocab_size,)),
        "sample.counts": Buffer("float32", (vocab_size,)),
        "sample.top_k": Buffer("int32", (1,)),
        **{f"sample.{name}": Buffer("float32", (1,)) for name in numbers},
    }


def catch_up_buffers(prefill_rows: int, hidden_size: int, dtype: str) -> dict[str, Buffer]:
    """Hidden states of rows that the head has not seen, and the number of the first."""
    return {
        "catch_up.hidden": Buffer(dtype, (1, prefill_rows, hidden_size)),
        "catch_up.length": Buffer("int32", (1,)),
    }


def _cache(manifest: Manifest) -> tuple[int, ...]:
    attention = manifest.spec.attention
    return 1, attention.kv_heads, manifest.cache_rows, attention.head_dim


def _gdn_shapes(gdn: GdnSpec | None) -> dict[str, tuple[int, ...]]:
    if gdn is None:
        return {}
    return {
        "conv": (gdn.conv_kernel - 1, gdn.conv_dim),
        "recurrent": (gdn.value_heads, gdn.key_dim, gdn.value_dim),
    }
