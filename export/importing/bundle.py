"""A whole bundle: target, head, what joins them, and the files beside them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from artifacts import AttentionSpec, GdnSpec, LayerKind, ModelSpec, ParseError, Source
from artifacts.spec import HeadSpec
from export.build import Model
from export.bundles.describe import load_graphs
from export.bundles.layout import BundleLayout, find_layout
from export.errors import BundleError
from export.importing.companions import Companions, companions
from export.importing.graph import BundleGraph
from export.importing.hanging import check_shared, read_head
from export.importing.stack import Stack
from export.stored_weights import is_same
from passes.streamed import StreamedTensor

__all__ = ["import_bundle"]

FAMILY = "qwen3_5_text"
EMBED, LM_HEAD = "embed", "lm_head"


def import_bundle(folder: Path) -> Model:
    """Read the bundle in `folder`; matrices are read when they are written.

    Raises:
        BundleError: There is no bundle, a file is not what it must be, or something in a
            graph is not of the model that can be built; the message names it.
    """
    layout = find_layout(folder)
    if layout.missing:
        raise BundleError(f"{layout.missing[0]} is named by {layout.metadata} and not there")
    try:
        return _imported(layout)
    except (LookupError, OverflowError, TypeError, ValueError) as e:
        raise BundleError(
            f"a graph of {folder.name} has attributes or constants of another kind than its "
            f"operators take: {e}"
        ) from e


def _imported(layout: BundleLayout) -> Model:
    graphs = load_graphs(layout)
    target = BundleGraph(layout, "target", graphs["target"])
    stack, width = target.stack()
    weights = stack.named("") | _vocabulary(target, stack, width)
    target.finish()
    notes = _unpacked(target)
    head: HeadSpec | None = None
    if "head" in graphs:
        hanging = BundleGraph(layout, "head", graphs["head"])
        head, of_head = read_head(hanging, stack, width)
        scores = weights.get(LM_HEAD, weights[EMBED])
        notes += check_shared(layout, target, hanging, weights[EMBED], scores)
        hanging.finish()
        weights |= of_head
        _same_epsilon(target, hanging)
        notes += _unpacked(hanging)
    beside = companions(layout, target.index, int(weights[EMBED].shape.numpy()[0]))
    return Model(
        spec=_spec(target, stack, weights, head, beside),
        weights={name: tensor.renamed(name) for name, tensor in weights.items()},
        source=Source(
            kind="bundle",
            name=layout.folder.resolve().name,
            config_sha256=_digest(layout),
            left_out=(),
        ),
        eos_token_ids=beside.eos_token_ids,
        files=beside.files,
        notes=tuple(notes),
    )


def _vocabulary(target: BundleGraph, stack: Stack, width: int) -> dict[str, StreamedTensor]:
    """Embedding and LM head; the latter only where it is another matrix."""
    looked_up, scores = target.embedding(), target.lm_head()
    if looked_up is None or stack.entry != target.reader.source(looked_up[0]):
        maker = target.index.producers.get(stack.entry)
        target.reader.refuse(maker, "the first layer does not read embeddings")
    embed = looked_up[1]
    if scores is None or scores.shape != embed.shape or embed.shape[1] != width:
        found = scores.shape if scores is not None else "none"
        target.reader.refuse(
            None, f"embedding {embed.shape} and LM head {found} do not fit a width of {width}"
        )
    return {EMBED: embed} if is_same(scores, embed) else {EMBED: embed, LM_HEAD: scores}


def _unpacked(graph: BundleGraph) -> list[str]:
    count = graph.weights.unpacked
    if not count:
        return []
    role = graph.reader.role
    return [f"{count} matrices of the {role} were stored in four bits and are unpacked"]


def _same_epsilon(*graphs: BundleGraph) -> float:
    found = {eps: (g, at) for g in graphs for eps, at in g.parts.epsilons.items()}
    if len(found) != 1:
        graph, at = list(found.values())[-1]
        graph.reader.refuse(
            next((n for n in graph.index.graph.node if at in (n.name, *n.output)), None),
            f"norms have different epsilons: {', '.join(f'{eps:g}' for eps in found)}",
        )
    return next(iter(found))


def _spec(
    target: BundleGraph,
    stack: Stack,
    weights: dict[str, StreamedTensor],
    head: HeadSpec | None,
    beside: Companions,
) -> ModelSpec:
    specs = [layer.mixer.spec for layer in stack.layers]
    attentions = {spec for spec in specs if isinstance(spec, AttentionSpec)}
    nets = {spec for spec in specs if isinstance(spec, GdnSpec)}
    inner = {layer.inner for layer in stack.layers}
    if len(attentions) != 1 or len(nets) > 1 or len(inner) != 1:
        target.reader.refuse(None, f"its layers differ: {attentions}, {nets}, widths {inner}")
    vocab, width = weights[EMBED].shape.numpy()
    return ModelSpec(
        family=beside.family or FAMILY,
        hidden_size=width,
        intermediate_size=inner.pop(),
        vocab_size=vocab,
        layers=tuple(
            LayerKind.GDN if isinstance(spec, GdnSpec) else LayerKind.ATTENTION
            for spec in specs
        ),
        attention=attentions.pop(),
        gdn=nets.pop() if nets else None,
        rms_norm_eps=_same_epsilon(target),
        tied_embedding=LM_HEAD not in weights,
        max_positions=beside.longest,
        head=head,
    )


def _digest(layout: BundleLayout) -> str:
    if layout.metadata is None:
        return ""
    try:
        return hashlib.sha256((layout.folder / layout.metadata).read_bytes()).hexdigest()
    except OSError as e:
        raise ParseError(f"{layout.metadata} cannot be read: {e.strerror or e}") from e
