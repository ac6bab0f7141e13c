"""Graphs of own kernels and those that they fall back to: one set of buffers for both."""

import dataclasses

import pytest
from checkpoint_cases import CONFIG
from onnx_ir.passes import PassError
from tiny_builds import names, options, write_hybrid

from artifacts import Manifest, Target
from artifacts.rules import check_artifact
from export import pipeline
from export.build import build
from export.errors import BuildError
from export.graphs import make_graphs
from export.pipeline import fall_back
from export.ports import Layout
from export.sources import read_source

OWN, STOCK = (Target("cuda", "float16", "int4", kind) for kind in ("own", "stock"))
GRAPHS = {3: ("prefill", "decode", "verify", "draft", "catch_up"), 0: ("prefill", "decode")}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    sizes = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "intermediate_size": 128}
    config = dataclasses.replace(CONFIG, **sizes)
    return write_hybrid(tmp_path_factory.mktemp("checkpoint"), config)


def derived(checkpoint, target, k=3):
    model, asked = read_source(checkpoint), options(k, target=target)
    return make_graphs(
        model.spec,
        model.weights,
        asked,
        layout=Layout(model.spec, asked),
        pack=model.pack,
        on_pass=lambda what, done: None,
    )


def operators(model):
    return {node.op_type for node in model.graph}


@pytest.mark.parametrize("k", GRAPHS)
def test_every_graph_of_own_operators_has_a_fallback_without(checkpoint, k):
    graphs = derived(checkpoint, OWN, k)
    assert tuple(graphs) == GRAPHS[k]
    for name, graph in graphs.items():
        assert "MatMulW4" in operators(graph.model)
        assert "MatMulNBits" not in operators(graph.model)
        fused = bool(k) and name in ("decode", "verify")
        assert ("GdnRows" in operators(graph.model)) == fused
        assert all(node.domain != "onnx_mtp" for node in graph.fallback.model.graph)


def test_graphs_of_stock_operators_have_none(checkpoint):
    assert all(graph.fallback is None for graph in derived(checkpoint, STOCK).values())


@pytest.mark.parametrize("k", GRAPHS)
def test_inputs_and_outputs_of_both_are_the_same_in_name_type_and_shape(checkpoint, k):
    for graph in derived(checkpoint, OWN, k).values():
        for side in ("inputs", "outputs"):
            pair = [getattr(m.graph, side) for m in (graph.model, graph.fallback.model)]
            own, stock = ({(v.name, v.dtype, str(v.shape)) for v in values} for values in pair)
            assert own == stock


def test_a_pair_of_other_ports_is_refused(checkpoint):
    graphs, others = derived(checkpoint, OWN), derived(checkpoint, STOCK)
    with pytest.raises(PassError, match="decode and its fallback have different ports"):
        fall_back(graphs, others, {})


def test_the_weights_of_a_fallback_are_stored_or_parts_of_what_is(checkpoint, tmp_path):
    manifest = build(
        read_source(checkpoint), tmp_path / "a", options(3, target=OWN), run_check=False
    )
    assert check_artifact(tmp_path / "a") == []
    assert Manifest.read(tmp_path / "a") == manifest
    weights = manifest.weights
    for graph in manifest.graphs.values():
        assert set(graph.weights) <= set(weights.tensors)
        assert set(graph.fallback.weights) <= {*weights.tensors, *weights.derived}
    parts = {tensor.part for tensor in weights.derived.values()}
    assert parts == {"all", "gates", "values"}
    stock = build(
        read_source(checkpoint), tmp_path / "b", options(3, target=STOCK), run_check=False
    )
    packed = sum(
        weights.tensors[name].length for name in {t.source for t in weights.derived.values()}
    )
    unpacked = sum(tensor.length for tensor in weights.derived.values())
    rest = stock.weights.size - unpacked  # stock weights, less those of four bits
    assert abs(weights.size - packed - rest) < 8192  # headers are padded to pages


def test_a_fault_in_a_fallback_alone_stops_the_build(checkpoint, tmp_path, monkeypatch):
    plain = pipeline._proofs
    calls = []

    def failing(graph, asked):
        calls.append(graph)
        if len(calls) == 2:  # fallbacks are derived first
            graph.model.graph.append(pipeline.ir.node("If", [graph.model.graph.inputs[0]]))
        return plain(graph, asked)

    monkeypatch.setattr(pipeline, "_proofs", failing)
    with pytest.raises(BuildError, match="StraightLinePass of the decode graph refuses"):
        build(read_source(checkpoint), tmp_path / "a", options(3, target=OWN))
    assert names(tmp_path) == []
