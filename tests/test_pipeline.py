"""The table of passes: which ran, what each found, and that the proofs see every graph."""

import onnx_ir as ir
import pytest
from checkpoint_cases import CONFIG
from tiny_builds import build_tiny, names, options, write_hybrid

from artifacts import Target
from export import pipeline
from export.build import build
from export.decoder import build_target
from export.errors import BuildError
from export.graphs import make_graphs
from export.head import build_head
from export.pipeline import derive
from export.ports import Layout
from export.sources import read_source

CPU, CUDA = Target("cpu", "float32"), Target("cuda", "float16")
GRAPHS = ("prefill", "decode", "verify", "draft")
ANY = -1
"""As many as the graph has symbolic sizes."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Three Gated DeltaNet layers, one attention layer, a head."""
    return write_hybrid(tmp_path_factory.mktemp("checkpoint"), CONFIG)


def derived(checkpoint, target, k=2, on_pass=lambda what, done: None, sampling=False):
    model, asked = read_source(checkpoint), options(k, target=target, sampling=sampling)
    layout = Layout(model.spec, asked)
    return make_graphs(
        model.spec, model.weights, asked, layout=layout, pack=model.pack, on_pass=on_pass
    )


# 3 layers have states to keep (two each) and one convolution's padding is one mask for all;
# accepting chooses 3 x 2 states and writes one tail; the draft has k = 2 guesses
EXPECTED = {
    CPU: {
        "prefill": {"JoinHead": 1, "LastRow": 1, "GreedyTail": 1, "PinShapes": ANY},
        "decode": {"PinShapes": ANY, "InlineSingleTrip": 0, "GreedyTail": 1},
        "verify": {"PinShapes": ANY, "CausalPadding": 1, "KeepRowStates": 6, "Accept": 7},
        "draft": {"Draft": 2, "PinShapes": ANY},
        "catch_up": {"CachesOnly": 2, "PinShapes": ANY},
        "decode_sampled": {
            "PinShapes": ANY,
            "InlineSingleTrip": 0,
            "GreedyTail": 1,
            "Sample": 1,
        },
        "verify_sampled": {
            "PinShapes": ANY,
            "CausalPadding": 1,
            "KeepRowStates": 6,
            "Accept": 7,
            "Sample": 1,
        },
    },
    # one buffer a kind of state: prefill joins 3 convolutions, accepting writes 2 and a tail;
    # q/k norms of each attention layer in a graph are fused
    CUDA: {
        "prefill": {
            "JoinHead": 1,
            "LastRow": 1,
            "GreedyTail": 1,
            "PinShapes": ANY,
            "JoinConvStates": 3,
            "FuseQkNorm": 2,
        },
        "decode": {"PinShapes": ANY, "InlineSingleTrip": 0, "GreedyTail": 1, "FuseQkNorm": 1},
        "verify": {
            "PinShapes": ANY,
            "CausalPadding": 1,
            "StateWindow": 6,
            "Accept": 3,
            "FuseQkNorm": 1,
        },
        "draft": {"Draft": 2, "PinShapes": ANY, "FuseQkNorm": 2},
        "catch_up": {"CachesOnly": 2, "PinShapes": ANY, "FuseQkNorm": 1},
        "decode_sampled": {
            "PinShapes": ANY,
            "InlineSingleTrip": 0,
            "GreedyTail": 1,
            "FuseQkNorm": 1,
            "Sample": 1,
        },
        "verify_sampled": {
            "PinShapes": ANY,
            "CausalPadding": 1,
            "StateWindow": 6,
            "Accept": 3,
            "FuseQkNorm": 1,
            "Sample": 1,
        },
    },
}


@pytest.mark.parametrize("target", [CPU, CUDA], ids=["cpu", "cuda"])
def test_each_pass_of_the_table_finds_what_is_there_for_it(checkpoint, target):
    for name, graph in derived(checkpoint, target, sampling=True).items():
        found = {record.name.removesuffix("Pass"): record.changes for record in graph.passes}
        for pass_name, changes in EXPECTED[target][name].items():
            if changes == ANY:
                assert found[pass_name] > 0
            else:
                assert found[pass_name] == changes, (name, pass_name)
        further = found.keys() - EXPECTED[target][name].keys()
        assert not further if target is CPU else further <= {"FuseGates"}


@pytest.mark.parametrize("target", [CPU, CUDA], ids=["cpu", "cuda"])
def test_every_final_graph_is_proved_after_its_last_pass(checkpoint, target):
    told = []
    derived(
        checkpoint,
        target,
        on_pass=lambda what, done: told.append(what.split(": ")),
        sampling=True,
    )
    for name in EXPECTED[target]:
        steps = [step for graph, step in told if graph == name]
        assert steps[-2:] == ["StraightLinePass", "AliasOrderPass"]
        assert steps.count("StraightLinePass") == steps.count("AliasOrderPass") == 1


def test_a_graph_of_k_0_is_target_alone(checkpoint):
    graphs = derived(checkpoint, CPU, k=0)
    assert list(graphs) == ["prefill", "decode"]
    assert "JoinHeadPass" not in [record.name for record in graphs["prefill"].passes]


def test_deriving_leaves_the_canonical_models_as_they_are(checkpoint):
    model, asked = read_source(checkpoint), options(2)
    sizes = {"dtype": asked.dtype, "cache_rows": asked.cache_rows}
    canonical = build_target(model.spec, **sizes), build_head(model.spec, **sizes)

    def written():
        protos = [ir.to_proto(model) for model in canonical]
        for node in (node for proto in protos for node in proto.graph.node):
            for attribute in node.attribute:  # constants are shared, and named when lifted
                attribute.t.name = ""
        return [proto.SerializeToString(deterministic=True) for proto in protos]

    before = written()
    derive(*canonical, asked, layout=Layout(model.spec, asked))
    assert written() == before


class Plant(ir.passes.InPlacePass):
    """Puts a fault into the graph that is derived as the `number`-th."""

    def __init__(self, number, fault):
        super().__init__()
        self.left, self.fault = number, fault

    def call(self, model):
        if self.left == 0:
            self.fault(model.graph)
        self.left -= 1
        return ir.passes.PassResult(model, modified=True)


def read_late(graph):
    """Read a state; nothing says that it be before the state is overwritten."""
    state = next(v for v in graph.inputs if "past." in v.name and v.name.endswith(".value"))
    graph.append(ir.node("Neg", [state]))


def choose(graph):
    graph.append(ir.node("If", [graph.inputs[0]]))


def leave_open(graph):
    graph.inputs[0].shape = ir.Shape([1, "S"])


@pytest.mark.parametrize("number", range(4), ids=GRAPHS)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (read_late, "AliasOrderPass of the {} graph refuses: .*Neg"),
        (choose, "StraightLinePass of the {} graph refuses: .*If.* is control flow"),
    ],
)
@pytest.mark.parametrize("target", [CPU, CUDA], ids=["cpu", "cuda"])
def test_a_fault_in_any_final_graph_stops_the_build(
    checkpoint, tmp_path, monkeypatch, number, fault, message, target
):
    last, plant = pipeline._finish, Plant(number, fault)
    monkeypatch.setattr(pipeline, "_finish", lambda: [*last(), plant])
    with pytest.raises(BuildError, match=message.format(GRAPHS[number])):
        build(read_source(checkpoint), tmp_path / "a", options(2, target=target))
    assert names(tmp_path) == []


@pytest.mark.parametrize("number", [1, 2, 3], ids=GRAPHS[1:])
def test_a_size_left_open_stops_the_build_where_it_must_be_fixed(
    checkpoint, tmp_path, monkeypatch, number
):
    last, plant = pipeline._finish, Plant(number, leave_open)
    monkeypatch.setattr(pipeline, "_finish", lambda: [*last(), plant])
    with pytest.raises(BuildError, match=f"StraightLinePass of the {GRAPHS[number]} graph"):
        build_tiny(checkpoint, tmp_path / "a")
    assert names(tmp_path) == []
