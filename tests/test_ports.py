"""Where ports lie: within their buffers, and sharing memory only where that is meant."""

import dataclasses
import itertools
import math

import onnx_ir as ir
import pytest
from checkpoint_cases import CONFIG
from tiny_builds import options, write_hybrid

from artifacts import Buffer, LayerKind, Target
from export.graphs import make_graphs
from export.ports import Layout
from export.sources import read_source

TARGETS = [
    Target("cpu", "float32"),
    Target("cuda", "float16"),
    Target("cuda", "bfloat16"),
]
K, CAPACITY, ROWS = 2, 40, 16
GDN, ATTENTION = (0, 1, 2), 3
STATE = {"conv": (3, 160), "recurrent": (6, 16, 16)}
"""K-1 columns of 2*Hk*dk + Hv*dv = 2*2*16 + 6*16 channels; Hv matrices of dk x dv."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return read_source(write_hybrid(tmp_path_factory.mktemp("checkpoint"), CONFIG))


@pytest.fixture(scope="module", params=TARGETS, ids=lambda t: f"{t.provider}-{t.dtype}")
def laid(request, model):
    """The layout and the graphs of one target."""
    sizes = {"capacity": CAPACITY, "prefill_rows": ROWS, "sampling": True}
    asked = options(K, target=request.param, **sizes)
    layout = Layout(model.spec, asked)
    graphs = make_graphs(
        model.spec,
        model.weights,
        asked,
        layout=layout,
        pack=model.pack,
        on_pass=lambda what, done: None,
    )
    return layout, graphs


def span(port):
    """First and last element, exclusive; a size chosen at a run at its largest."""
    sizes = [ROWS if isinstance(size, str) else size for size in port.shape]
    return port.offset, port.offset + math.prod(sizes)


def share(a, b):
    (start, end), (first, last) = span(a), span(b)
    return a.buffer == b.buffer and start < last and first < end


def test_every_port_lies_in_its_buffer_and_has_its_type(laid):
    layout, graphs = laid
    buffers = layout.buffers()
    for name, graph in graphs.items():
        for port in (*graph.inputs, *graph.outputs):
            buffer = buffers[port.buffer]
            assert port.dtype == buffer.dtype, (name, port)
            assert port.offset >= 0
            assert span(port)[1] <= math.prod(buffer.shape), (name, port)


def test_every_buffer_is_written_by_a_graph_or_by_the_host(laid):
    layout, graphs = laid
    written = {port.buffer for graph in graphs.values() for port in graph.outputs}
    by_host = {
        "prompt_ids",
        "prompt_next",
        "draft_count",
        "catch_up.hidden",
        "catch_up.length",
    }
    unwritten = layout.buffers().keys() - written
    assert {name for name in unwritten if not name.startswith("sample.")} == by_host
    assert len(unwritten - by_host) == 10  # noise, prompt, counts, and seven numbers


def in_place(past, *, states):
    """Present and past of the caches and of the states of one buffer each."""
    kinds = [(ATTENTION, "key"), (ATTENTION, "value")]
    kinds += [(layer, kind) for layer in GDN for kind in states]
    return {(f"present.{i}.{kind}", f"{past}.{i}.{kind}") for i, kind in kinds}


def head(*guesses, prefix="head."):
    return {
        (f"{prefix}present.0.{kind}{guess}", f"{prefix}past.0.{kind}")
        for kind in ("key", "value")
        for guess in guesses
    }


LENGTH = ("next_length", "past_length")
TOKEN = ("next_token", "input_ids")
BOTH = ("conv", "recurrent")
VERIFIES = ("verify", "verify_sampled")


def written_over(provider):
    """Graph -> pairs of an output and an input on the same memory."""
    prefill = {LENGTH} | head("")
    verify = {LENGTH, TOKEN}
    if provider == "cpu":
        prefill |= in_place("past", states=BOTH)
        verify |= in_place("past", states=BOTH)
    else:
        prefill |= in_place("past", states=["recurrent"])
        prefill |= {("present.conv", f"past.{i}.conv") for i in GDN}
        verify |= in_place("past", states=[])
        for i, kind in itertools.product(GDN, BOTH):
            # the window of each layer begins before its slot, so the last ones reach all
            verify |= {(f"present.{kind}", f"past.{i}.{kind}")}
            verify |= {(f"rows.{i}.{kind}", f"rows.{kind}")}  # the view of what was kept
    decode = {LENGTH, TOKEN} | in_place("past", states=BOTH)
    return {
        "prefill": prefill,
        "decode": decode,
        "verify": verify,
        "draft": head("", ".2", prefix=""),
        "catch_up": head("", prefix=""),
        "decode_sampled": decode,
        "verify_sampled": verify,
    }


def test_outputs_lie_on_inputs_where_that_is_meant_and_nowhere_else(laid):
    layout, graphs = laid
    expected = written_over(layout.options.target.provider)
    for name, graph in graphs.items():
        pairs = itertools.product(graph.outputs, graph.inputs)
        found = {(a.name, b.name) for a, b in pairs if share(a, b)}
        assert found == expected[name], name


def test_two_outputs_of_a_graph_share_memory_only_where_a_guess_follows_another(laid):
    _, graphs = laid
    for name, graph in graphs.items():
        pairs = itertools.combinations(graph.outputs, 2)
        found = {(a.name, b.name) for a, b in pairs if share(a, b)}
        guesses = {(f"present.0.{kind}", f"present.0.{kind}.2") for kind in ("key", "value")}
        assert found == (guesses if name == "draft" else set()), name


def test_two_inputs_of_a_graph_share_memory_only_as_windows_of_states(laid):
    layout, graphs = laid
    on_cuda = layout.options.target.provider == "cuda"
    windows = {
        (f"past.{a}.{kind}", f"past.{b}.{kind}")
        for kind in BOTH
        for a, b in itertools.combinations(GDN, 2)
    }
    for name, graph in graphs.items():
        pairs = itertools.combinations(graph.inputs, 2)
        found = {(a.name, b.name) for a, b in pairs if share(a, b)}
        assert found == (windows if on_cuda and name in VERIFIES else set()), name


def test_only_the_rows_kept_for_accepting_are_views(laid):
    layout, graphs = laid
    on_cuda = layout.options.target.provider == "cuda"
    views = {
        (name, port.name)
        for name, graph in graphs.items()
        for port in (*graph.inputs, *graph.outputs)
        if port.view
    }
    rows = {(name, f"rows.{kind}") for name in VERIFIES for kind in BOTH}
    assert views == (rows if on_cuda else set())


def test_all_graphs_find_the_state_of_a_layer_at_one_place(laid):
    """The last slot of a verify's window is where prefill and decode leave the state."""
    _, graphs = laid
    for layer, (kind, shape) in itertools.product(GDN, STATE.items()):
        ends = {
            name: (port.buffer, span(port)[1])
            for name, graph in graphs.items()
            for port in graph.inputs
            if port.name == f"past.{layer}.{kind}"
        }
        assert ends.keys() == {"prefill", "decode", "decode_sampled", *VERIFIES}
        assert len(set(ends.values())) == 1, ends
        slot = math.prod(shape)
        decode = next(p for p in graphs["decode"].inputs if p.name == f"past.{layer}.{kind}")
        assert span(decode)[1] - span(decode)[0] == slot


def test_the_states_of_cuda_are_disjoint_slots_in_order(laid):
    layout, graphs = laid
    if layout.options.target.provider != "cuda":
        return
    for kind, shape in STATE.items():
        slot = math.prod(shape)
        places = [
            port.offset
            for port in graphs["decode"].outputs
            if port.name.endswith(kind) and port.name.startswith("present.")
        ]
        assert places == [(K + g) * slot for g in range(len(GDN))]
        buffers = layout.buffers()
        assert buffers[f"target.{kind}"] == Buffer("float32", (K + len(GDN), *shape))
        assert buffers[f"rows.{kind}"] == Buffer("float32", (len(GDN), K + 1, *shape))


def test_a_model_without_states_has_caches_alone(model):
    spec = dataclasses.replace(model.spec, layers=(LayerKind.ATTENTION,) * 2, gdn=None)
    for target in TARGETS:
        buffers = Layout(spec, options(0, target=target)).buffers()
        states = {name for name in buffers if "." in name}
        assert states == {f"target.{i}.{kind}" for i in (0, 1) for kind in ("key", "value")}


def test_a_port_without_a_buffer_is_named(model):
    layout = Layout(model.spec, options())
    stray = ir.Value(
        name="mystery", shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.FLOAT)
    )
    with pytest.raises(ValueError, match="verify has a port 'mystery' that no buffer"):
        layout.port("verify", stray)
