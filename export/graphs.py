"""All graphs of an artifact from a spec and weights: each weight in its place, none left."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx_ir as ir
from onnx_ir.passes import InvariantError, PassError

from artifacts import ModelSpec
from export.decoder import build_target
from export.errors import BuildError
from export.head import build_head
from export.options import BuildOptions
from export.pipeline import DerivedGraph, derive, fall_back, prepare
from export.ports import Layout
from passes.own_kernels import OwnMatricesPass
from passes.quantise import Pack, QuantisePass
from passes.streamed import StreamedTensor, cast

__all__ = ["make_graphs"]


def make_graphs(
    spec: ModelSpec,
    weights: Mapping[str, StreamedTensor],
    options: BuildOptions,
    *,
    layout: Layout,
    pack: Pack,
    on_pass: Callable[[str, int], None],
) -> Mapping[str, DerivedGraph]:
    """Build the canonical models, give them their weights, derive and prove all graphs.

    Args:
        spec: The model.
        weights: By canonical name; those of the head are left out where k is 0.
        options: Sizes and target.
        layout: Where the graphs' ports will lie.
        pack: Puts a matrix into four bits, where that is asked.
        on_pass: Told of each graph and pass before it runs, and how many ran.

    Raises:
        BuildError: A weight is missing, left over or of another shape; no graph here
            computes the model; a pass refuses, or a proof fails.
    """
    models = _canonical(spec, options)
    for canonical in models:
        _attach(canonical, weights)
    _refuse_unused(weights, models, options)
    done, at = 0, "the lowering of the canonical models"

    def count(graph: str, name: str) -> None:
        nonlocal done, at
        done, at = done + 1, f"{name} of the {graph} graph"
        on_pass(f"{graph}: {name}", done)

    try:
        quantise = QuantisePass(pack)
        for canonical in models:
            prepare(canonical, options, quantise)
        if not options.own_kernels:
            return _derive(models, options, layout=layout, on_pass=count)
        others = _derive(models, options, layout=layout, on_pass=count, stock=True)
        own = OwnMatricesPass()
        for canonical in models:
            own(canonical)
        graphs = _derive(models, options, layout=layout, on_pass=count)
        return fall_back(graphs, others, own.sources)
    except (InvariantError, PassError) as e:
        raise BuildError(f"{at} refuses: {e}") from e


def _derive(
    models: list[ir.Model], options: BuildOptions, **keywords: Any
) -> Mapping[str, DerivedGraph]:
    head = models[1] if len(models) > 1 else None
    return derive(models[0], head, options, **keywords)


def _canonical(spec: ModelSpec, options: BuildOptions) -> list[ir.Model]:
    """The target and, where something is drafted, the head."""
    dtype, rows = options.dtype, options.cache_rows
    builders = [build_target, build_head] if options.k else [build_target]
    try:
        return [build_model(spec, dtype=dtype, cache_rows=rows) for build_model in builders]
    except ValueError as e:  # sizes that no kernel takes
        raise BuildError(str(e)) from e


def _refuse_unused(
    weights: Mapping[str, StreamedTensor], models: list[ir.Model], options: BuildOptions
) -> None:
    used = {name for model in models for name in model.graph.initializers}
    unused = [
        name
        for name in weights
        if name not in used and (options.k or not name.startswith("head."))
    ]
    if unused:
        raise BuildError(
            f"{len(unused)} weights of the source have no place in the graphs: "
            + ", ".join(unused[:5])
        )


def _attach(model: ir.Model, weights: Mapping[str, StreamedTensor]) -> None:
    """Give every open initializer of a canonical model its weight, in the graph's dtype."""
    for name, value in model.graph.initializers.items():
        if value.const_value is not None:
            continue
        assert value.shape is not None and value.dtype is not None
        weight = weights.get(name)
        if weight is None:
            raise BuildError(f"weight {name!r} {value.shape} is not in the source")
        if weight.shape != value.shape:
            raise BuildError(
                f"weight {name!r} is {weight.shape}, the graph takes {value.shape}"
            )
        value.const_value = cast(weight, value.dtype).renamed(name)
