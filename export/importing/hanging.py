"""The head of a bundle, and what it takes from its target."""

from __future__ import annotations

import onnx

from artifacts import AttentionSpec, HeadSpec
from export.bundles.layout import BundleLayout
from export.bundles.weights import embedding, lm_head
from export.bundles.wiring import HiddenKind, Sharing, wire_head
from export.errors import BundleError
from export.importing.columns import columns
from export.importing.graph import BundleGraph
from export.importing.reader import NORM_OPS
from export.importing.stack import Stack
from export.stored_weights import is_same
from passes.streamed import StreamedTensor

__all__ = ["check_shared", "read_head"]


def read_head(
    graph: BundleGraph, target: Stack, width: int
) -> tuple[HeadSpec, dict[str, StreamedTensor]]:
    """``fc([norm(embedding), norm(hidden)])``, one attention layer, norm."""
    reader, parts = graph.reader, graph.parts
    stack, own_width = graph.stack()
    spec, specs = stack.layers[0].mixer.spec, [layer.mixer.spec for layer in target.layers]
    wanted = next((x for x in specs if isinstance(x, AttentionSpec)), None)
    if len(stack.layers) != 1 or own_width != width or spec != wanted:
        reader.refuse(
            None,
            f"its {len(stack.layers)} layers are not one attention layer as the target's "
            f"({spec} and {wanted})",
        )
    fc = columns(reader, stack.entry, "the product that joins embedding and hidden state")
    joined = reader.made_by(fc.input, ["Concat"], "embedding and hidden state side by side")
    reader.allow(joined, axis=(-1, 2))
    norms = [reader.made_by(value, NORM_OPS[:2], "a norm") for value in joined.input]
    if len(norms) != 2 or not _embeds(graph, norms[0]) or _embeds(graph, norms[1]):
        reader.refuse(joined, "it does not join the embedding and, second, the hidden state")
    hidden = reader.source(norms[1].input[0])
    if hidden not in graph.index.inputs:
        reader.refuse(norms[1], f"'{hidden}' is no input")
    weights = stack.named("head.") | {
        "head.fc": graph.weights.matrix(fc),
        "head.embed_norm": parts.norm(norms[0], width, "the norm of embeddings"),
        "head.hidden_norm": parts.norm(norms[1], width, "the norm of hidden states"),
    }
    return HeadSpec(
        layers=1,
        hidden_source="post_norm",
        feedback="post_norm",
        concat="embed_first",
        cache="own",
        intermediate_size=stack.layers[0].inner,
    ), weights


def _embeds(graph: BundleGraph, norm: onnx.NodeProto) -> bool:
    """Whether a norm reads embeddings: a look-up, or an input that is called so."""
    source = graph.reader.source(norm.input[0])
    lookup = embedding(graph.index)
    if lookup is not None:
        return bool(source == lookup.output[0])
    return source in graph.index.inputs and "embed" in source


def check_shared(
    layout: BundleLayout,
    target: BundleGraph,
    head: BundleGraph,
    embed: StreamedTensor,
    scores: StreamedTensor,
) -> list[str]:
    """The head's embedding and LM head must be the target's; gives what to tell of it.

    Those that the head's graph lacks are the target's by the metadata, or for want of
    others.
    """
    declared, assumed = layout.declared, []
    assert layout.head is not None
    wiring = wire_head((layout.target, target.index), (layout.head, head.index), declared)
    looked_up = head.embedding()
    for what, named, sharing, node, at, mine, theirs in (
        ("embedding", declared.embedding, wiring.embedding, embedding(target.index), 0,
         looked_up[1] if looked_up else None, embed),
        ("LM head", declared.lm_head, wiring.lm_head, lm_head(target.index), 1,
         head.lm_head(), scores),
    ):  # fmt: skip
        used = target.reader.source(node.input[at]) if node is not None else None
        if named is not None and named != used:
            raise BundleError(
                f"{layout.metadata} gives the head the target's '{named}' for its {what}, and "
                f"the target uses '{used}' there; no head with another can be built"
            )
        if mine is None:
            assumed += [what] if named is None else []
        elif sharing is not Sharing.SAME_BYTES and not is_same(mine, theirs):
            head.reader.refuse(None, f"its {what} is not the target's")
    notes = []
    if assumed:
        names = " and ".join(assumed)
        notes += [f"nothing names the head's {names}: it takes the target's"]
    if wiring.hidden_kind is not HiddenKind.POST_NORM:
        name = wiring.hidden_output
        notes += [f"the bundle starts its head from {name}; the artifact from the state after "
                  "the final norm"]  # fmt: skip
    return notes
