"""How a head hangs on its target: which hidden state, whose embedding, whose LM head.

All three are told by position in the graph. Names lie here: the same exporter calls the
state before the final norm ``hidden_states.3`` and the one after it ``hidden_states``, and
a head runs with either.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import onnx

from export.bundles.data_files import region
from export.bundles.graph_index import LOOK_THROUGH, GraphIndex, op_name
from export.bundles.layout import Declared
from export.bundles.weights import NORMS, embedding, lm_head

__all__ = ["HeadWiring", "HiddenKind", "Sharing", "hidden_outputs", "wire_head"]


class HiddenKind(StrEnum):
    """Where in the target a hidden state is taken."""

    POST_NORM = "post-norm"
    """What the LM head reads: after the final norm."""
    PRE_NORM = "pre-norm"
    """What the final norm reads."""
    INNER = "inner"
    """Anywhere else."""


class Sharing(StrEnum):
    """How a head comes by a matrix that the target has too."""

    SAME_BYTES = "same bytes"
    """Both graphs read one region of one file."""
    BY_NAME = "by name"
    """The head's graph lacks it; a runtime takes the target's initializer."""
    OWN_COPY = "own copy"
    ABSENT = "absent"
    """Neither in the head nor named by the metadata."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadWiring:
    """The joint of target and head."""

    hidden_output: str | None
    """Output of the target that the metadata (or, without, its name) gives the head."""
    hidden_kind: HiddenKind | None
    """None: the target has no such output."""
    post_norm_output: str | None
    """Output of the target that is post-norm, if any."""
    feedback_output: str | None
    """Output of the head that feeds its next draft."""
    feedback_kind: HiddenKind | None
    embedding: Sharing
    embedding_weight: str | None
    """Name of the initializer in the target."""
    lm_head: Sharing
    lm_head_weight: str | None
    kv_mode: str | None


def hidden_outputs(index: GraphIndex) -> dict[str, HiddenKind]:
    """The hidden outputs of a graph and where each is taken.

    Without an LM head (a head whose logits another graph makes) the last norm is the final
    one: that of which nothing but outputs is made.
    """
    states = ("present", "logits")
    names = [o.name for o in index.graph.output if not o.name.startswith(states)]
    norm = _final_norm(index)
    before = after = None
    if norm is not None:
        skip = op_name(norm).startswith("com.microsoft.Skip")
        after = norm.output[0]
        before = norm.output[3] if skip and len(norm.output) > 3 else None
        before = before or (None if skip else index.source(norm.input[0]))
    kinds = {after: HiddenKind.POST_NORM, before: HiddenKind.PRE_NORM}
    return {name: kinds.get(index.source(name), HiddenKind.INNER) for name in names}


def wire_head(
    target: tuple[str, GraphIndex], head: tuple[str, GraphIndex], declared: Declared
) -> HeadWiring:
    """Describe the joint; each graph comes with its file, relative to the bundle."""
    of_target, of_head = hidden_outputs(target[1]), hidden_outputs(head[1])
    post = next((n for n, kind in of_target.items() if kind is HiddenKind.POST_NORM), None)
    hidden = declared.hidden_output or post or next(iter(of_target), None)
    feedback = declared.head_output or next(iter(of_head), None)
    looked_up, told = embedding(target[1]), embedding(head[1])
    embeds = _sharing(target, looked_up, head, told, declared.embedding)
    scores = _sharing(target, lm_head(target[1]), head, lm_head(head[1]), declared.lm_head)
    return HeadWiring(
        hidden_output=hidden,
        hidden_kind=of_target.get(hidden) if hidden else None,
        post_norm_output=post,
        feedback_output=feedback,
        feedback_kind=of_head.get(feedback) if feedback else None,
        embedding=embeds[0],
        embedding_weight=embeds[1],
        lm_head=scores[0],
        lm_head_weight=scores[1],
        kv_mode=declared.kv_mode,
    )


def _final_norm(index: GraphIndex) -> onnx.NodeProto | None:
    product = lm_head(index)
    if product is not None:
        norm = index.producers.get(index.source(product.input[0]))
        return norm if norm is not None and op_name(norm) in NORMS else None
    ends = (o.name for o in index.graph.output if not o.name.startswith("present"))
    for name in ends:
        norm = index.producers.get(index.source(name))
        if norm is None or op_name(norm) not in NORMS or norm.output[0] != index.source(name):
            continue
        made = index.ahead([norm.output[0]], lambda n: False)
        if all(op_name(n) in LOOK_THROUGH for n in made):
            return norm
    return None


def _weight(index: GraphIndex, node: onnx.NodeProto | None) -> onnx.TensorProto | None:
    """The matrix of a look-up (input 0) or a product (input 1)."""
    if node is None:
        return None
    at = 0 if "Gather" in node.op_type else 1
    name = node.input[at]
    if name not in index.initializers and name in index.producers:
        name = next(iter(index.producers[name].input), "")
    return index.initializers.get(name)


def _sharing(
    target: tuple[str, GraphIndex],
    ours: onnx.NodeProto | None,
    head: tuple[str, GraphIndex],
    theirs: onnx.NodeProto | None,
    named: str | None,
) -> tuple[Sharing, str | None]:
    of_target, of_head = _weight(target[1], ours), _weight(head[1], theirs)
    name = of_target.name if of_target is not None else None
    if of_head is None:
        known = named is not None and named in target[1].initializers
        return (Sharing.BY_NAME, named) if known else (Sharing.ABSENT, named or name)
    if of_target is not None:
        place = region(of_head, head[0])
        if place is not None and place == region(of_target, target[0]):
            return Sharing.SAME_BYTES, name
    return Sharing.OWN_COPY, name
