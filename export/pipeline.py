"""Which passes make which graph, in which order: one table a target."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes import PassBase, PassError
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
from passes.caches_only import CachesOnlyPass
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
from passes.pin_shapes import PinShapesPass
from passes.quantise import QuantisePass
from passes.row_states import KeepRowStatesPass
from passes.sample import SamplePass
from passes.state_window import StateWindowPass
from passes.straight_line import StraightLinePass

__all__ = ["DerivedGraph", "StockGraph", "derive", "fall_back", "prepare"]

Passes = Sequence[PassBase]

OF_HEAD = ("draft", "catch_up")
"""Graphs that are made of the head; the others are made of the target."""
OPEN = ("prefill", "catch_up")
"""Graphs of any number of rows."""


@dataclass(frozen=True, slots=True)
class StockGraph:
    """What a graph of this project's operators falls back to."""

    model: ir.Model
    unpacked: Mapping[str, tuple[str, str]]
    """Weights that are in no file -> the packed one, and which part of it they are."""


@dataclass(frozen=True, slots=True)
class DerivedGraph:
    """A graph of the artifact and the passes that made it."""

    model: ir.Model
    rows: int | None
    """Rows of a forward; None where a run chooses."""
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    passes: tuple[PassRecord, ...]
    fallback: StockGraph | None = None
    """The same graph with the same ports in stock operators, where it has others."""


def derive(
    target: ir.Model,
    head: ir.Model | None,
    options: BuildOptions,
    *,
    layout: Layout,
    on_pass: Callable[[str, str], None] = lambda graph, name: None,
    stock: bool = False,
) -> Mapping[str, DerivedGraph]:
    """All graphs of an artifact from the canonical models, which are left as they are.

    Args:
        target: The canonical target.
        head: The canonical head, or None where the model has none.
        options: Sizes and what to lower for.
        layout: Where the graphs' inputs and outputs will lie.
        on_pass: Told of each graph and pass before it runs.
        stock: Use stock operators alone, whatever the options say; ports stay the same.
    """
    graphs = {}
    for name, passes in _table(head, options, stock=stock).items():
        source = head if name in OF_HEAD else target
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
        rows = None if name in OPEN else 1 if name.startswith("decode") else options.rows
        graphs[name] = DerivedGraph(model, rows, inputs, outputs, tuple(records))
        for proof in _proofs(graphs[name], options):
            on_pass(name, type(proof).__name__)
            proof(model)
    return graphs


def fall_back(
    graphs: Mapping[str, DerivedGraph],
    others: Mapping[str, DerivedGraph],
    unpacked: Mapping[str, tuple[str, str]],
) -> Mapping[str, DerivedGraph]:
    """`graphs` with `others`, derived with `stock`, as what they fall back to.

    Args:
        graphs: With this project's operators.
        others: The same graphs without.
        unpacked: Of which packed weights those of `others` are parts.

    Raises:
        PassError: A pair differs in its ports, so one set of buffers does not serve both.
    """
    paired = {}
    for name, graph in graphs.items():
        other = others[name]
        if set(graph.inputs + graph.outputs) != set(other.inputs + other.outputs):
            raise PassError(f"{name} and its fallback have different ports")
        paired[name] = dataclasses.replace(graph, fallback=StockGraph(other.model, unpacked))
    return paired


def prepare(canonical: ir.Model, options: BuildOptions, pack: QuantisePass) -> None:
    """Lower a canonical model in place, before graphs are derived from it.

    `pack` is shared by target and head, as their weights are.
    """
    passes: list[PassBase] = []
    if options.on_cuda:
        apart = ".mlp." if options.own_kernels else None  # that pair becomes one by itself
        passes += [MergeProjectionsPass(MOST_MERGED, apart), HoistCastsPass()]
    if options.target.weights == "int4":
        passes.append(pack)
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


def _table(head: ir.Model | None, options: BuildOptions, *, stock: bool) -> dict[str, Passes]:
    """The passes of each graph, in order, for the target of `options`."""
    m, cache, cuda = options.rows, {"C": options.cache_rows}, options.on_cuda
    lower: Passes = [FuseQkNormPass(), FuseGatesPass()] if cuda else []
    # without a verify there is no memory that a decode could write its states aside to
    aside = options.own_kernels and options.k
    gdn: Passes = [FuseGdnPass()] if aside and not stock else []
    attend: Passes = [FuseAttentionPass()] if options.own_kernels and not stock else []
    join: Passes = [] if head is None or not options.k else [JoinHeadPass(head)]
    states: Passes = [JoinConvStatesPass()] if cuda else []
    keep = StateWindowPass(m) if cuda else KeepRowStatesPass(m)
    prefill = [*join, LastRowPass(), GreedyTailPass(), PinShapesPass(cache), *states]
    decode = [PinShapesPass({"S": 1} | cache), InlineSingleTripPass(strict=True)]
    decoded = [*lower, *gdn, *attend, *([CommitConvStatesPass(m)] if aside else [])]
    table: dict[str, Passes] = {
        "prefill": [*prefill, *lower],
        "decode": [*decode, GreedyTailPass(), *decoded],
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
        table["catch_up"] = [CachesOnlyPass(), PinShapesPass(cache), *lower]
    if options.sampling:
        table["decode_sampled"] = [*decode, GreedyTailPass(), SamplePass(), *decoded]
    if options.sampling and options.k:
        table["verify_sampled"] = [*verify, SamplePass(), *lower, *gdn, *attend]
    return table


def _finish() -> Passes:
    """What every graph gets last: names once, equal constants once, nothing unread."""
    return [
        NameFixPass(),
        CommonSubexpressionEliminationPass(),
        LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        RemoveUnusedNodesPass(),
    ]
