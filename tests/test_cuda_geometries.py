"""Graphs of public widths on the CUDA provider's own host code: placement, capture, kernels.

Layers and vocabulary are cut, since they add nothing but repetitions: a period of four
layers (three Gated DeltaNet, one attention) has every kernel there is.
"""

import dataclasses
import sys
from pathlib import Path

import pytest

from artifacts import Target
from export import geometries
from export.build import build
from export.options import BuildOptions
from export.synthetic import synthetic

sys.path.insert(0, str(Path(__file__).parent / "cuda_dryrun"))
import dryrun

KERNELS = {
    # size: kernels of decode, verify, draft (k = 3) of four layers in four bits
    "qwen3.5-0.8b": (82, 99, 79),
    "qwen3.5-27b": (83, 99, 81),
}
GRAPHS = ("decode", "verify", "draft")


@pytest.fixture(scope="module", params=KERNELS)
def case(request, tmp_path_factory):
    cut = dataclasses.replace(geometries.GEOMETRIES[request.param], layers=4)
    folder = tmp_path_factory.mktemp("geometry") / "artifact"
    options = BuildOptions(
        k=3, capacity=1000, prefill_rows=64, target=Target("cuda", "float16", "int4")
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(geometries.GEOMETRIES, "cut", cut)
        patch.setattr(geometries, "VOCABULARY", 4096)
        manifest = build(synthetic("cut"), folder, options, run_check=False)
    return request.param, folder, manifest


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_graph_is_captured_whole_with_as_many_kernels_as_it_had(case, graph):
    size, folder, manifest = case
    in_place = {
        output.name: port.name
        for output, port in manifest.graphs[graph].aliases()
        if (output.offset, output.shape) == (port.offset, port.shape)
    }
    report = dryrun.inspect(str(folder / f"{graph}.onnx"), runs=2, graph=True, alias=in_place)
    assert report["accepted"], report["refusal"]
    assert report["cpu_nodes"] == report["memcpys"] == []
    plain, first, second = report["runs"]
    assert not first["forbidden"]
    assert second["replays"] == 1 and not second["copies"]
    assert len(plain["launches"]) == KERNELS[size][GRAPHS.index(graph)]
