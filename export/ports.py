"""Which buffer each input and output of each graph is bound to.

Names are the whole interface between the graphs and a runner: what shares a buffer is handed
on, or updated in place. `artifacts.manifest` says how ports and buffers relate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir

from artifacts import Buffer, LayerKind, ModelSpec, Port
from artifacts.buffers import catch_up_buffers, sample_buffers
from export.options import BuildOptions

__all__ = ["Layout"]

SHARED = {
    "accepted": "accepted",
    "best": "best",
    "draft_count": "draft_count",
    "hidden": "hidden",
    "ids": "ids",
    "input_ids": "ids",
    "length": "length",
    "logits": "logits",
    "next_ids": "prompt_next",
    "next_length": "length",
    "next_token": "ids",
    "past_length": "length",
    "result": "result",
}
"""Port name -> buffer, where the two differ by graph neither by layer nor by owner."""
CATCH_UP = {"hidden": "catch_up.hidden", "past_length": "catch_up.length"}
"""Ports of the graph catch_up whose buffers are its own."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the ports of an artifact's graphs lie.

    On the CPU every state has a buffer of its own. On CUDA the states of all L Gated
    DeltaNet layers lie in one buffer a kind, so that one kernel commits them:

        target.recurrent [M-1+L, Hv, dk, dv]   slot M-1+g is the state of the g-th such layer
        rows.recurrent [L, M, Hv, dk, dv]      the states after each row of a verify

    and the same with ``conv``. The kernels take a window of M slots and read its last one
    alone, so the window of layer g begins at slot g; the M-1 slots in front belong to none.
    """

    spec: ModelSpec
    options: BuildOptions

    @property
    def joined(self) -> bool:
        """Whether all layers' states share a buffer."""
        return self.options.target.provider == "cuda"

    def port(self, graph: str, value: ir.Value) -> Port:
        """The port of an input or output of the graph named `graph`."""
        name = value.name or ""
        assert value.dtype is not None and value.shape is not None
        shape = tuple(dim if isinstance(dim, int) else str(dim.value) for dim in value.shape)
        dtype = value.dtype.numpy().name
        kind = name.rpartition(".")[2]
        if self.joined and kind in ("recurrent", "conv"):
            buffer, offset, view = self._joined(name, kind, shape)
            return Port(name, buffer, dtype, shape, offset, view)
        return Port(name, _buffer(graph, name), dtype, shape)

    def _joined(
        self, name: str, kind: str, shape: tuple[int | str, ...]
    ) -> tuple[str, int, bool]:
        """Buffer, offset and whether it is a view, of a state port on CUDA."""
        state, _, layer = name.removesuffix(f".{kind}").partition(".")
        m, whole = self.options.rows, not layer
        slot = math.prod(_state_shape(self.spec, kind))
        if state == "rows":
            index = 0 if whole else self._index(int(layer))
            return f"rows.{kind}", index * m * slot, whole
        if whole:
            return f"target.{kind}", (m - 1) * slot, False
        elements = math.prod(size for size in shape if isinstance(size, int))
        return f"target.{kind}", (self._index(int(layer)) + m) * slot - elements, False

    def _index(self, layer: int) -> int:
        return self.spec.layers_of(LayerKind.GDN).index(layer)

    def buffers(self) -> dict[str, Buffer]:
        """All memory of a runner, by name."""
        made = _shared_buffers(self.spec, self.options)
        attention, options = self.spec.attention, self.options
        size = (1, attention.kv_heads, options.cache_rows, attention.head_dim)
        cache = Buffer(options.target.dtype, size)
        layers = self.spec.layers_of(LayerKind.GDN)
        for layer in self.spec.layers_of(LayerKind.ATTENTION):
            made[f"target.{layer}.key"] = made[f"target.{layer}.value"] = cache
        if options.k:
            made["head.0.key"] = made["head.0.value"] = cache
        for kind in ("conv", "recurrent") if layers else ():
            state, m = _state_shape(self.spec, kind), options.rows
            if not self.joined:
                made |= {f"target.{i}.{kind}": Buffer("float32", (1, *state)) for i in layers}
                continue
            made[f"target.{kind}"] = Buffer("float32", (m - 1 + len(layers), *state))
            if options.k:
                made[f"rows.{kind}"] = Buffer("float32", (len(layers), m, *state))
        return made


def _state_shape(spec: ModelSpec, kind: str) -> tuple[int, ...]:
    gdn = spec.gdn
    assert gdn is not None
    if kind == "conv":
        return gdn.conv_kernel - 1, gdn.conv_dim
    return gdn.value_heads, gdn.key_dim, gdn.value_dim


def _buffer(graph: str, name: str) -> str:
    if graph == "prefill" and name == "input_ids":
        return "prompt_ids"
    if graph == "catch_up" and name in CATCH_UP:
        return CATCH_UP[name]
    if name.startswith("sample."):
        return name
    if name in SHARED:
        return SHARED[name]
    owner = "head" if graph in ("draft", "catch_up") or name.startswith("head.") else "target"
    state, _, rest = name.removeprefix("head.").partition(".")
    if state not in ("past", "present"):
        raise ValueError(f"{graph} has a port {name!r} that no buffer is known for")
    layer, kind = rest.split(".")[:2]  # guesses write the same cache: present.0.key.2
    return f"{owner}.{layer}.{kind}"


def _shared_buffers(spec: ModelSpec, options: BuildOptions) -> dict[str, Buffer]:
    """What belongs to no layer."""
    m, dtype = options.rows, options.target.dtype
    made = {
        "ids": Buffer("int64", (1, m)),
        "length": Buffer("int32", (1,)),
        "accepted": Buffer("int64", (1,)),
        "best": Buffer("int64", (1, m)),
        "hidden": Buffer(dtype, (1, m, spec.hidden_size)),
        "logits": Buffer(dtype, (1, m, spec.vocab_size)),
        "result": Buffer("int64", (2 * m + 2,)),
        "prompt_ids": Buffer("int64", (1, options.prefill_rows)),
    }
    if options.k:
        made["draft_count"] = Buffer("int32", (1,))
        made["prompt_next"] = Buffer("int64", (1, options.prefill_rows))
        made |= catch_up_buffers(options.prefill_rows, spec.hidden_size, dtype)
    if options.sampling:
        made |= sample_buffers(m, spec.vocab_size)
    return made
