"""`CachedAttention` in the CUDA provider, without a card: its launches and refusals."""

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

MULTIPROCESSORS = 132
KV_HEADS = {"qwen3.5-0.8b": 2, "qwen3.5-27b": 4}
NODES = {"decode": 1, "verify": 1, "draft": 3}


@pytest.fixture(scope="module", params=KV_HEADS)
def case(request, tmp_path_factory, kernel_home):
    cut = dataclasses.replace(geometries.GEOMETRIES[request.param], layers=4)
    folder = tmp_path_factory.mktemp("geometry") / "artifact"
    target = Target("cuda", "bfloat16", "int4", "own")
    options = BuildOptions(k=3, capacity=4000, prefill_rows=64, target=target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(geometries.GEOMETRIES, "cut", cut)
        patch.setattr(geometries, "VOCABULARY", 4096)
        return request.param, folder, build(synthetic("cut"), folder, options, run_check=False)


def inspected(case, graph, kernel_home, monkeypatch, in_place=True):
    _, folder, manifest = case
    monkeypatch.setenv("XDG_CACHE_HOME", str(kernel_home))
    alias = {
        output.name: port.name
        for output, port in manifest.graphs[graph].aliases()
        if (output.offset, output.shape) == (port.offset, port.shape)
        and (in_place or not output.name.endswith(".key"))
    }
    arguments = str(folder / f"{graph}.onnx"), str(kernel_library()), json.dumps(alias)
    return dryrun.run_script(HERE / "cuda_own_inspect.py", *arguments)["sessions"][0]


@pytest.mark.parametrize("graph", NODES)
def test_an_attention_is_two_kernels_that_a_capture_takes(
    case, graph, kernel_home, monkeypatch
):
    report = inspected(case, graph, kernel_home, monkeypatch)
    assert report["accepted"], report["refusal"]
    assert [run["error"] for run in report["runs"]] == [None] * 3
    plain, first, second = report["runs"]
    assert not first["forbidden"] and second["replays"] == 1 and not second["launches"]
    placed = [node["op"] for node in report["cuda_nodes"]]
    assert "GroupQueryAttention" not in placed and "GatedRMSNorm" not in placed
    split = [launch for launch in plain["launches"] if "split_attention" in launch]
    merged = [launch for launch in plain["launches"] if "attention::combine" in launch]
    assert len(split) == len(merged) == placed.count("CachedAttention") == NODES[graph]
    heads = KV_HEADS[case[0]]
    # the whole card, whatever the length
    assert all(f"grid={min(MULTIPROCESSORS // heads, 126)},{heads},1" in s for s in split)


def test_a_cache_that_is_not_in_place_is_refused(case, kernel_home, monkeypatch):
    report = inspected(case, "verify", kernel_home, monkeypatch, in_place=False)
    assert "present must be bound to the memory of past" in report["runs"][0]["error"]
