"""Artifacts built from bundles, against the bundles' own graphs in a plain loop."""

import shutil
from pathlib import Path

import pytest
from bundle_loop import greedy, on_the_cpu, speculative
from third_party import NAMES, Target, lay_out_whole

from artifacts import Target as BuiltFor
from export.build import build
from export.options import BuildOptions
from export.repair import repair_bundle
from export.sources import read_source
from runtime.decode import Decoder

PROMPTS = ([1, 5, 9, 2, 30, 77], [1, 140, 33], [1, 8, 210, 64, 7, 7, 19, 300, 12, 91, 4, 60])
COUNT = 64
WITH_HEAD = [name for name in NAMES if name != "cli-bf16-cuda"]
RUN_AS_THEY_ARE = ["artifact-f16-cuda", "artifact-f16-default-noisy", "artifact-f32-default"]
RUN_AS_THEY_ARE += ["oga-fp32-cpu-w0"]


def built(bundle: Path, folder: Path, k: int) -> Decoder:
    options = BuildOptions(
        k=k, capacity=256, prefill_rows=16, target=BuiltFor("cpu", "float32")
    )
    build(read_source(bundle), folder, options, run_check=k == 2)
    return Decoder.open(folder)


def runnable(name: str, bundle: Path, folder: Path) -> Path:
    """The target graph of a bundle, made to load on the CPU where it does not."""
    if "bf16" in name:
        repair_bundle(bundle, folder / "repaired", prefer="fp32")
        return folder / "repaired" / "model.onnx"
    if name.endswith("w3"):
        shutil.copytree(bundle, folder / "unwindowed")
        on_the_cpu(folder / "unwindowed" / "model.onnx")
        return folder / "unwindowed" / "model.onnx"
    return bundle / "model.onnx"


@pytest.mark.parametrize("name", NAMES)
def test_mtp_gives_the_tokens_of_the_bundles_own_graph(tmp_path: Path, name: str) -> None:
    bundle = lay_out_whole(name, tmp_path)
    graph = runnable(name, bundle, tmp_path)
    with built(bundle, tmp_path / "artifact", k=2) as decoder:
        assert decoder.manifest.source.kind == "bundle"
        assert decoder.manifest.k == (2 if name in WITH_HEAD else 0)
        for prompt in PROMPTS:
            steps = decoder.generate(prompt, COUNT, k=decoder.manifest.k, stop_ids=())
            tokens = [token for step in steps for token in step.tokens]
            assert tokens == greedy(Target(graph), prompt, COUNT)
        if name in WITH_HEAD:
            assert sum(accepted for _, accepted in decoder.stats.positions) > 0


@pytest.mark.parametrize("name", RUN_AS_THEY_ARE)
def test_its_head_drafts_what_the_bundles_head_drafts(tmp_path: Path, name: str) -> None:
    bundle = lay_out_whole(name, tmp_path)
    with built(bundle, tmp_path / "artifact", k=1) as decoder:
        for prompt in PROMPTS:
            tokens, tried, accepted = speculative(bundle, prompt, COUNT)
            ours = list(decoder.prefill(prompt).tokens)
            steps = hits = 0
            while len(ours) < COUNT:
                got = decoder.step(1).tokens
                ours += got
                steps, hits = steps + 1, hits + len(got) - 1
            assert ours[:COUNT] == tokens
            assert (steps, hits) == (tried, accepted)
