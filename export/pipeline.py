"""Which passes make which graph, in which order: one table a target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes import PassBase
from onnx_ir.passes.common import (
    CommonSubexpressionEliminationPass,
    LiftConstantsToInitializersPass,
    NameFixPass,
    RemoveUnusedNodesPass,
)

from artifacts import PassRecord, Port
from artifacts.manifest import overlaps
from export.options import BuildOptions
from export.ports import Layout
from passes.accept import AcceptPass, GreedyTailPass
from passes.alias_order import AliasOrderPass
from passes.causal_padding import CausalPaddingPass
from passes.draft import DraftPass
from passes.fuse_attention import FuseAttentionPass
from passes.fuse_gates import FuseGatesPass
from passes.fuse_gdn import FuseGdnPass
from passes.fuse_qk_norm import FuseQkNormPass
from passes.hoist_casts import HoistCastsPass
from passes.inline_single_trip import InlineSingleTripPass
from passes.join_head import JoinHeadPass
from passes.join_states import CommitConvStatesPass, JoinConvStatesPass
from passes.last_row import LastRowPass
from passes.merge_projections import MergeProjectionsPass
from passes.own_kernels import OwnMatricesPass
from passes.pin_shapes import PinShapesPass
from passes.quantise import QuantisePass
from passes.row_states import KeepRowStatesPass
from passes.state_window import StateWindowPass
from passes.straight_line import StraightLinePass

__all__ = ["DerivedGraph", "derive", "prepare"]

Passes = Sequence[PassBase]


@dataclass(frozen=True, slots=True)
class DerivedGraph:
    """A graph of the artifact and the passes that made it."""

    model: ir.Model
    rows: int | None
    """Rows of a forward; None where a run chooses."""
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    passes: tuple[PassRecord, ...]


def derive(
    target: ir.Model,
    head: ir.Model | None,
    options: BuildOptions,
    *,
    layout: Layout,
    on_pass: Callable[[str, str], None] = lambda graph, name: None,
) -> Mapping[str, DerivedGraph]:
    """All graphs of an artifact from the canonical models, which are left as they are.

    Args:
        target: The canonical target.
        head: The canonical head, or None where the model has none.
        options: Sizes and what to lower for.
        layout: Where the graphs' inputs and outputs will lie.
        on_pass: Told of each graph and pass before it runs.
    """
    rows = {"prefill": None, "decode": 1, "verify": options.rows, "draft": options.rows}
    graphs = {}
    for name, passes in _table(head, options).items():
        source = head if name == "draft" else target
        assert source is not None
        model = source.clone()
        records = []
        for step in (*passes, *_finish()):
            on_pass(name, type(step).__name__)
            model = step(model).model
            if hasattr(step, "changes"):
                records.append(PassRecord(type(step).__name__, step.changes))
        model.graph.name = name
        inputs = tuple(layout.port(name, value) for value in model.graph.inputs)
        outputs = tuple(layout.port(name, value) for value in model.graph.outputs)
        graphs[name] = DerivedGraph(model, rows[name], inputs, outputs, tuple(records))
        for proof in _proofs(graphs[name], options):
            on_pass(name, type(proof).__name__)
            proof(model)
    return graphs


def prepare(
    canonical: ir.Model, options: BuildOptions, pack: QuantisePass, own: OwnMatricesPass
) -> None:
    """Lower a canonical model in place, before graphs are derived from it.

    `pack` and `own` are shared by target and head, as their weights are.
    """
    passes: list[PassBase] = []
    if options.on_cuda:
        apart = ".mlp." if options.own_kernels else None  # that pair becomes one by itself
        passes += [MergeProjectionsPass(MOST_MERGED, apart), HoistCastsPass()]
    if options.target.weights == "int4":
        passes.append(pack)
    if options.own_kernels:
        passes.append(own)
    for step in passes:
        step(canonical)


MOST_MERGED = 16384
"""Rows from which on a matrix reads as fast alone as merged."""


def _proofs(graph: DerivedGraph, options: BuildOptions) -> Passes:
    """What must hold of every graph as it will be run."""
    aliases = overlaps(graph.inputs, graph.outputs)
    order = AliasOrderPass(
        [(output.name, port.name) for output, port in aliases],
        provider=options.target.provider,
        rows=graph.rows,
        views=[port.name for port in graph.inputs if port.view],
    )
    return [StraightLinePass(static=graph.rows is not None), order]


def _table(head: ir.Model | None, options: BuildOptions) -> dict[str, Passes]:
    """The passes of each graph, in order, for the target of `options`."""
    m, cache, cuda = options.rows, {"C": options.cache_rows}, options.on_cuda
    lower: Passes = [FuseQkNormPass(), FuseGatesPass()] if cuda else []
    # without a verify there is no memory that a decode could write its states aside to
    gdn: Passes = [FuseGdnPass()] if options.own_kernels and options.k else []
    attend: Passes = [FuseAttentionPass()] if options.own_kernels else []
    join: Passes = [] if head is None or not options.k else [JoinHeadPass(head)]
    states: Passes = [JoinConvStatesPass()] if cuda else []
    keep = StateWindowPass(m) if cuda else KeepRowStatesPass(m)
    prefill = [*join, LastRowPass(), GreedyTailPass(), PinShapesPass(cache), *states]
    table: dict[str, Passes] = {
        "prefill": [*prefill, *lower],
        "decode": [
            PinShapesPass({"S": 1} | cache),
            InlineSingleTripPass(strict=True),
            GreedyTailPass(),
            *lower,
            *gdn,
            *attend,
            *([CommitConvStatesPass(m)] if gdn else []),
        ],
    }
    if options.k:
        verify = [
            PinShapesPass({"S": m} | cache),
            CausalPaddingPass(m),
            keep,
            AcceptPass(m, together=cuda),
        ]
        table["verify"] = [*verify, *lower, *gdn, *attend]
        table["draft"] = [DraftPass(options.k), PinShapesPass(cache), *lower, *attend]
    return table


def _finish() -> Passes:
    """What every graph gets last: names once, equal constants once, nothing unread."""
    return [
        NameFixPass(),
        CommonSubexpressionEliminationPass(),
        LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        RemoveUnusedNodesPass(),
    ]
