"""An artifact for own kernels where they are not to be had: told once, run in stock ones.

One process lives through all cases in the dry run (cuda_fallback.py).
"""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from cuda_artifacts import build_demo, run_in_dry_run
from safetensors.numpy import load_file

from artifacts import Manifest
from artifacts.rules import check_artifact

HERE = Path(__file__).parent
CAPTURED = ("decode", "verify", "draft")
COLD = ("prefill", "decode_sampled", "verify_sampled", "catch_up")
"""Of open rows, or loaded when they are first run."""
KERNELS = {"decode": 150, "verify": 167, "draft": 79}
"""Of the demo in stock operators, this way."""
WITHOUT = ("another card", "no compiler")


class Lives:
    def __init__(self, scratch, home):
        self.folder = build_demo(scratch / "own", "float16", 3, "int4", "own")
        self.stock = build_demo(scratch / "stock", "float16", 3, "int4")
        run = shutil.copytree(self.folder, scratch / "run")
        script = HERE / "cuda_fallback.py"
        environment = {"XDG_CACHE_HOME": str(home)}
        self.recordings, self.facts = run_in_dry_run(script, run, scratch, **environment)
        self.manifest = Manifest.read(self.folder)


@pytest.fixture(scope="module")
def lives(tmp_path_factory, kernel_home):
    return Lives(tmp_path_factory.mktemp("fallback"), kernel_home)


def test_the_artifact_with_its_fallback_passes_the_static_check(lives):
    assert check_artifact(lives.folder) == []
    files = {path.name for path in lives.folder.glob("*.onnx")}
    assert files == {f"{n}{kind}.onnx" for n in (*CAPTURED, *COLD) for kind in ("", ".stock")}


def test_packed_weights_lie_in_the_file_once(lives):
    stored = load_file(lives.folder / "weights.safetensors")
    assert not any(name.endswith((".q4", ".q4.scales")) for name in stored)
    assert {tensor.source for tensor in lives.manifest.weights.derived.values()} == {
        name for name in stored if name.endswith(".w4")
    }


def test_with_the_library_own_kernels_run_and_nobody_warns(lives):
    facts = lives.facts["own"]
    assert facts["warnings"] == []
    assert facts["kernels"] == {"in_use": "own", "built_for": "own", "reason": ""}
    assert set(facts["weights"]) == set(lives.manifest.weights.tensors)
    for graph in CAPTURED:
        launches = lives.recordings[f"own: {graph}"]["launches"]
        assert any("w4::multiply" in kernel for kernel in launches)
        assert any("gdn_rows" in kernel for kernel in launches) == (graph != "draft")


REASONS = {
    "another card": "built for compute capability 9.0, and this GPU has 8.0",
    "no compiler": "nvcc was not found",
}


@pytest.mark.parametrize("name", WITHOUT)
def test_without_it_one_warning_says_why_and_what_runs(lives, name):
    (warning,) = lives.facts[name]["warnings"]
    assert REASONS[name] in warning
    assert "Stock operators run in their place, with the same weights and slower" in warning


@pytest.mark.parametrize("name", WITHOUT)
def test_without_it_stock_kernels_run_and_are_captured(lives, name):
    facts = lives.facts[name]
    assert facts["states"] == dict.fromkeys(COLD, "cold") | dict.fromkeys(CAPTURED, "captured")
    for graph in CAPTURED:
        assert facts[f"on host {graph}"] == []
        launches = lives.recordings[f"{name}: {graph}"]["launches"]
        assert not any("w4::" in kernel or "gdn_rows" in kernel for kernel in launches)
        assert (graph, len(launches)) in KERNELS.items()
    decode = lives.recordings[f"{name}: decode"]["launches"]
    # two of eight mixers, gates, values and down of their feed-forwards, and the LM head
    assert sum("MatMulFloat4Bits" in kernel for kernel in decode) == 8 * 5 + 1


@pytest.mark.parametrize("name", WITHOUT)
def test_counters_tell_of_captures_and_replays_as_ever(lives, name):
    assert lives.facts[name]["lines"] == lives.facts["own"]["lines"] == [
        "cuda_graph: captures=1 replays=1 fallbacks=0 invalidations=0",
        "cuda_graph_verify: captures=1 replays=1 fallbacks=0 invalidations=0",
        "cuda_graph_draft: captures=1 replays=1 fallbacks=0 invalidations=0",
    ]  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT)
def test_what_is_unpacked_is_what_a_build_for_stock_kernels_stores(lives, name):
    """There gates and values are one matrix, gates first."""
    uploaded, stored = (
        lives.facts[name]["weights"],
        load_file(lives.stock / "weights.safetensors"),
    )
    own = load_file(lives.folder / "weights.safetensors")
    assert not set(uploaded) & {n for n in own if n.endswith(".w4")}
    assert set(lives.manifest.weights.derived) <= set(uploaded)
    expected = {}
    for key, array in stored.items():
        scope, merged, last = key.partition("mlp.gate|up")
        if not merged:
            expected[key] = array
            continue
        middle = len(array) // 2
        expected[f"{scope}mlp.gate{last}"] = array[:middle]
        expected[f"{scope}mlp.up{last}"] = array[middle:]
    assert set(uploaded) == set(expected)
    for key, digest in uploaded.items():
        assert digest == hashlib.sha256(expected[key].tobytes()).hexdigest(), key


@pytest.mark.parametrize("name", WITHOUT)
def test_reports_say_which_kernels_run(lives, name):
    facts, own = lives.facts[name], lives.facts["own"]
    said = {"in_use": "stock", "built_for": "own"}
    for place in ("kernels", "json", "bench"):
        assert {key: facts[place][key] for key in said} == said
        assert REASONS[name] in facts[place]["reason"]
        assert own[place] == {"in_use": "own", "built_for": "own", "reason": ""}
    assert facts["figures"]["kernels"].startswith("stock, although built for own: ")
    assert own["figures"]["kernels"] == "own"
    assert "int4 weights, stock kernels" in facts["bench lines"][0]
    assert facts["bench lines"][1].startswith("not with own kernels: ")
    assert "int4 weights, own kernels" in own["bench lines"][0]
    assert facts["bench bytes"].keys() == own["bench bytes"].keys()


def test_an_artifact_without_fallback_is_an_error_that_says_what_is_missing(lives):
    assert lives.facts["nothing to fall back to"].startswith("KernelError: nvcc was not found")


def test_a_manifest_with_a_fallback_is_read_as_it_was_written(lives):
    text = json.loads((lives.folder / "manifest.json").read_text())
    assert lives.manifest.to_json() == text
    assert lives.manifest.has_fallback
    running = lives.manifest.in_stock()
    assert running.target.kernels == "stock"
    assert running.buffers == lives.manifest.buffers
    for name, graph in running.graphs.items():
        sibling = lives.manifest.graphs[name]
        assert (graph.inputs, graph.outputs) == (sibling.inputs, sibling.outputs)
        assert graph.file == f"{name}.stock.onnx"
