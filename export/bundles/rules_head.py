"""Rules about the head of a bundle: what it is fed, what it shares, what it keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from artifacts.findings import Severity
from export.bundles.rule import Bundle, BundleRule, Fault
from export.bundles.weights import WeightClass
from export.bundles.wiring import HeadWiring, HiddenKind, Sharing

__all__ = ["HEAD_RULES"]

MATRICES = (WeightClass.ATTENTION, WeightClass.LINEAR_ATTENTION, WeightClass.MLP)


def _absent(bundle: Bundle) -> Iterator[Fault]:
    if bundle.layout.head is None and not bundle.layout.missing:
        yield bundle.layout.target, "the bundle has no head; decoding drafts nothing"


def _hidden(bundle: Bundle) -> Iterator[Fault]:
    wiring = bundle.description.wiring
    if wiring is None or wiring.hidden_kind is HiddenKind.POST_NORM:
        return
    place = f"target:{wiring.hidden_output or 'hidden states'}"
    better = wiring.post_norm_output
    instead = f"; '{better}' is the one after it" if better else "; no output is"
    if wiring.hidden_kind is None:
        yield place, f"the head starts from it, and the target has no such output{instead}"
    else:
        where = "before" if wiring.hidden_kind is HiddenKind.PRE_NORM else "far from"
        yield place, f"the head starts from it; it is taken {where} the final norm{instead}"


def _feedback(bundle: Bundle) -> Iterator[Fault]:
    wiring = bundle.description.wiring
    if wiring is None or wiring.feedback_kind is HiddenKind.POST_NORM:
        return
    name = wiring.feedback_output or "hidden state"
    told = "is not an output" if wiring.feedback_kind is None else "is not after its last norm"
    yield f"head:{name}", f"the head's own state {told}, and its next draft starts from that"


def _matrices(bundle: Bundle) -> Iterator[Fault]:
    for what, sharing, name in _shared(bundle.description.wiring):
        if sharing is Sharing.ABSENT:
            known = f"; the target's is '{name}'" if name else ""
            yield f"head:{what}", f"neither the head nor the metadata gives it{known}"


def _copies(bundle: Bundle) -> Iterator[Fault]:
    for what, sharing, name in _shared(bundle.description.wiring):
        if sharing is Sharing.OWN_COPY:
            yield f"head:{what}", f"the head keeps its own copy beside the target's '{name}'"


def _shared(wiring: HeadWiring | None) -> Iterator[tuple[str, Sharing, str | None]]:
    if wiring is not None:
        yield "embedding", wiring.embedding, wiring.embedding_weight
        yield "lm_head", wiring.lm_head, wiring.lm_head_weight


def _cache(bundle: Bundle) -> Iterator[Fault]:
    head = next((g for g in bundle.description.graphs if g.role == "head"), None)
    if head is None:
        return
    if not head.states:
        yield "head:past", "the head has no cache"
    elif bundle.layout.declared.kv_mode in ("proposal_local", "hidden_threaded"):
        mode = bundle.layout.declared.kv_mode
        yield (
            f"{bundle.layout.metadata}:kv_mode",
            f"{mode} empties the head's cache before each step",
        )


def _unused(bundle: Bundle) -> Iterator[Fault]:
    for role, index in bundle.graphs.items():
        read = {name for node in index.graph.node for name in node.input}
        read |= {output.name for output in index.graph.output}
        if any(attribute.g.node for node in index.graph.node for attribute in node.attribute):
            continue  # a body may read it
        for name in index.initializers:
            if name not in read:
                yield f"{role}:{name}", "the file holds this weight and no node reads it"


def _unquantised(bundle: Bundle) -> Iterator[Fault]:
    rows = [row for graph in bundle.description.graphs for row in graph.weights]
    if not any(row.dtype.startswith("int") and "/" in row.dtype for row in rows):
        return
    for graph in bundle.description.graphs:
        plain = [r for r in graph.weights if r.kind in MATRICES and "/" not in r.dtype]
        size = sum(row.bytes for row in plain)
        if size:
            kinds = ", ".join(sorted({str(row.kind) for row in plain}))
            yield (
                f"{graph.role}:weights",
                f"{size} bytes of {kinds} matrices are {plain[0].dtype} in a quantised bundle",
            )


HEAD_RULES: Sequence[BundleRule] = (
    BundleRule(
        code="mtp.absent",
        severity=Severity.WARNING,
        title="the bundle has a head",
        explanation="Exporters drop the mtp.* tensors of a checkpoint without a word.",
        remedy="export the head too, or build from the checkpoint",
        run=_absent,
    ),
    BundleRule(
        code="mtp.hidden",
        severity=Severity.ERROR,
        title="the head starts from the state after the target's final norm",
        explanation=(
            "Qwen3.5-class heads are trained on it; with the state before it nothing fails "
            "and fewer drafts are accepted."
        ),
        remedy="repair exposes that state and names it for the head",
        run=_hidden,
    ),
    BundleRule(
        code="mtp.feedback",
        severity=Severity.ERROR,
        title="the head gives its own state after its last norm",
        explanation="The second and later drafts start from it.",
        remedy="export the head with that output",
        run=_feedback,
    ),
    BundleRule(
        code="mtp.matrices",
        severity=Severity.ERROR,
        title="the head has an embedding and an LM head",
        explanation="A head without its own takes the target's, which somebody must name.",
        remedy="name the target's initializers in the metadata",
        run=_matrices,
    ),
    BundleRule(
        code="mtp.copies",
        severity=Severity.NOTE,
        title="embedding and LM head are stored once",
        explanation="At 248,320 tokens each copy takes 2.5 GB.",
        remedy="build an artifact: its graphs share one weight file",
        run=_copies,
    ),
    BundleRule(
        code="mtp.cache",
        severity=Severity.WARNING,
        title="the head keeps its cache from step to step",
        explanation="An empty cache at each step lowers acceptance.",
        remedy="build an artifact: its head's cache is prefilled and kept",
        run=_cache,
    ),
    BundleRule(
        code="weights.unread",
        severity=Severity.WARNING,
        title="every weight is read",
        explanation="A weight that no node reads was lost on its way into the graph.",
        remedy="export again, and see that every tensor of the checkpoint is used",
        run=_unused,
    ),
    BundleRule(
        code="weights.unquantised",
        severity=Severity.NOTE,
        title="a quantised bundle has its large matrices quantised",
        explanation="Decoding is bound by reading weights; a plain matrix costs four times.",
        remedy="see that the quantisation reached every layer; a bfloat16 head is on purpose",
        run=_unquantised,
    ),
)
