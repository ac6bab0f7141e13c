"""The layers of a graph, walked backwards from its final norm along the residual stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx

from export.bundles.graph_index import op_name
from export.importing.attention import ATTENTION_OPS, Mixer, attention
from export.importing.columns import columns
from export.importing.delta_net import delta_net
from export.importing.parts import Parts
from export.importing.reader import SKIP_NORM
from passes.streamed import StreamedTensor

__all__ = ["Layer", "Stack", "read_stack"]

MAX_LAYERS = 1024


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: its mixer, and all its weights by their canonical names in it."""

    mixer: Mixer
    weights: dict[str, StreamedTensor]
    inner: int
    """Width of the feed-forward."""


@dataclass(frozen=True, slots=True)
class Stack:
    """The layers between what enters and the final norm."""

    layers: tuple[Layer, ...]
    entry: str
    """The value that enters the first layer."""
    norm: StreamedTensor
    """Weights of the final norm."""

    def named(self, prefix: str) -> dict[str, StreamedTensor]:
        """All weights by canonical name, which begins with `prefix`."""
        found = {f"{prefix}norm": self.norm}
        for i, layer in enumerate(self.layers):
            found |= {f"{prefix}layers.{i}.{n}": w for n, w in layer.weights.items()}
        return found


def read_stack(
    parts: Parts, final: onnx.NodeProto, size: int, presents: Mapping[str, str]
) -> Stack:
    """Read all layers before the norm `final` of a stream `size` wide."""
    reader = parts.reader
    layers: list[Layer] = []
    last = parts.norm(final, size, "the final norm")
    norm = final
    while (added := parts.residual(norm)) is not None:
        if len(layers) == MAX_LAYERS:
            reader.refuse(norm, f"over {MAX_LAYERS} layers lie before it")
        mlp = parts.feed_forward(added.delta)
        post = _norm_of(parts, mlp.normed, added.stream)
        post_weight = parts.norm(post, size, "the norm after a mixer")
        sums = parts.residual(post)
        if sums is None:
            reader.refuse(post, "no sum with a layer's mixer is what it reads")
        mixer = _mixer(parts, sums.delta, presents)
        norm = _norm_of(parts, mixer.normed, sums.stream)
        weights = mixer.weights | mlp.weights
        weights["input_norm"] = parts.norm(norm, size, "the norm before a mixer")
        weights["post_norm"] = post_weight
        layers.append(Layer(mixer, weights, mlp.inner))
    if not layers:
        reader.refuse(final, "no layer lies before it")
    return Stack(tuple(reversed(layers)), reader.source(norm.input[0]), last)


def _norm_of(parts: Parts, normed: str, stream: str) -> onnx.NodeProto:
    """The norm that makes `normed`; the stream goes on from what it reads."""
    reader = parts.reader
    node = reader.maker(normed)
    if node is None or node.output[0] != reader.source(normed):
        reader.refuse(node, f"no norm makes '{normed}', which a layer's products read")
    if parts.total(node) != reader.source(stream):
        reader.refuse(node, f"the stream goes on from '{stream}', not from what it reads")
    if op_name(node) == SKIP_NORM and not node.output[3]:
        reader.refuse(node, "it does not give its sum")
    return node


def _mixer(parts: Parts, delta: str, presents: Mapping[str, str]) -> Mixer:
    reader = parts.reader
    out = columns(reader, delta, "a mixer's last product")
    gating = reader.maker(out.input)
    if gating is None:
        reader.refuse(out.node, "nothing is gated before it")
    made = [reader.maker(name) for name in gating.input]
    if op_name(gating) == "Mul" and any(
        node is not None and op_name(node) in ATTENTION_OPS for node in made
    ):
        return attention(parts, gating, out)
    return delta_net(parts, gating, out, presents)
