"""Graphs of public widths on the CUDA provider's own host code: placement, capture, kernels.

Layers and vocabulary are cut, since they add nothing but repetitions: a period of four
layers (three Gated DeltaNet, one attention) has every kernel there is.
"""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from artifacts import Target
from export import geometries
from export.build import build
from export.options import BuildOptions
from export.synthetic import synthetic
from runtime.kernels.cache import kernel_library

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "cuda_dryrun"))
import dryrun  # noqa: E402

KERNELS = {
    # size: kernels of decode, verify, draft (k = 3) of four layers in four bits
    "qwen3.5-0.8b": (82, 99, 79),
    "qwen3.5-27b": (83, 99, 81),
}
OWN_KERNELS = {"qwen3.5-0.8b": (45, 60, 63), "qwen3.5-27b": (45, 60, 63)}
"""The same with this project's operators."""
GRAPHS = ("decode", "verify", "draft")


def build_cut(size, folder, kernels):
    cut = dataclasses.replace(geometries.GEOMETRIES[size], layers=4)
    options = BuildOptions(
        k=3,
        capacity=1000,
        prefill_rows=64,
        target=Target("cuda", "float16", "int4", kernels),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(geometries.GEOMETRIES, "cut", cut)
        patch.setattr(geometries, "VOCABULARY", 4096)
        return build(synthetic("cut"), folder, options, run_check=False)


def in_place(graph):
    """Outputs that lie exactly over an input -> that input."""
    return {
        output.name: port.name
        for output, port in graph.aliases()
        if (output.offset, output.shape) == (port.offset, port.shape)
    }


def assert_captured_whole(report, kernels):
    assert report["accepted"], report["refusal"]
    assert report["cpu_nodes"] == report["memcpys"] == []
    plain, first, second = report["runs"]
    assert [run["error"] for run in report["runs"]] == [None] * 3
    assert not first["forbidden"]
    assert second["replays"] == 1 and not second["copies"]
    assert len(plain["launches"]) == kernels


@pytest.fixture(scope="module", params=KERNELS)
def case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("geometry") / "artifact"
    return request.param, folder, build_cut(request.param, folder, "stock")


@pytest.fixture(scope="module", params=OWN_KERNELS)
def own(request, tmp_path_factory, kernel_home):
    folder = tmp_path_factory.mktemp("geometry") / "artifact"
    return request.param, folder, build_cut(request.param, folder, "own")


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_graph_is_captured_whole_with_as_many_kernels_as_it_had(case, graph):
    size, folder, manifest = case
    alias = in_place(manifest.graphs[graph])
    report = dryrun.inspect(str(folder / f"{graph}.onnx"), runs=2, graph=True, alias=alias)
    assert_captured_whole(report, KERNELS[size][GRAPHS.index(graph)])


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_graph_of_own_operators_is_captured_whole_too(own, graph, kernel_home, monkeypatch):
    size, folder, manifest = own
    monkeypatch.setenv("XDG_CACHE_HOME", str(kernel_home))
    alias = json.dumps(in_place(manifest.graphs[graph]))
    arguments = str(folder / f"{graph}.onnx"), str(kernel_library()), alias
    report = dryrun.run_script(HERE / "cuda_own_inspect.py", *arguments)["sessions"][0]
    assert_captured_whole(report, OWN_KERNELS[size][GRAPHS.index(graph)])
    placed = [node["op"] for node in report["cuda_nodes"]]
    assert "MatMulNBits" not in placed
    assert placed.count("GdnRows") == (0 if graph == "draft" else 3)
    launched = [kernel for kernel in report["runs"][0]["launches"] if "w4::multiply" in kernel]
    # two of each mixer, two of each feed-forward (gates and values are one), and the LM head;
    # a guess has the head's layer, what joins its two inputs, and the LM head
    assert (
        len(launched) == placed.count("MatMulW4") == (3 * 6 if graph == "draft" else 4 * 4 + 1)
    )
