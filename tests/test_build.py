"""Builds: what an artifact holds, what stops one, and what is left behind then."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import onnx
import pytest
from checkpoint import load_config
from checkpoint_cases import DEMO, expected, load_weights, random_weights
from safetensors.numpy import load_file
from tiny_builds import HYBRID, build_tiny, digests, loads, names, options, write_hybrid

from artifacts import Buffer, Manifest, Target
from artifacts.rules import check_artifact
from export.build import build
from export.errors import BuildError, ExportError
from export.ports import Layout
from export.sources import read_source
from passes.streamed import from_array

ROOT = Path(__file__).parent.parent
CUDA = Target("cuda", "float16")
ELEMENTS = {1: "float32", 6: "int32", 7: "int64", 10: "float16"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_hybrid(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def artifact(checkpoint, tmp_path_factory):
    output = tmp_path_factory.mktemp("built") / "artifact"
    build_tiny(checkpoint, output, k=2)
    return output


def external(path):
    """Names of the initializers whose values lie in the weight file."""
    graph = onnx.load(path, load_external_data=False).graph
    return {t.name for t in graph.initializer if t.external_data}


def shape_of(value):
    sizes = value.type.tensor_type.shape.dim
    return tuple(size.dim_param or size.dim_value for size in sizes)


def test_the_manifest_says_what_was_asked_and_what_there_is(artifact):
    manifest = Manifest.read(artifact)
    assert (manifest.k, manifest.rows, manifest.capacity) == (2, 3, 40)
    assert manifest.cache_rows == 43
    assert manifest.prefill_rows == 16
    assert manifest.eos_token_ids == (7,)
    assert {name: graph.rows for name, graph in manifest.graphs.items()} == {
        "prefill": None,
        "decode": 1,
        "verify": 3,
        "draft": 3,
        "catch_up": None,
    }
    assert manifest.source.kind == "checkpoint"
    assert names(artifact) == sorted(
        ["manifest.json", manifest.weights.file]
        + [graph.file for graph in manifest.graphs.values()]
    )
    found = digests(artifact)
    assert found[manifest.weights.file] == manifest.weights.sha256
    for graph in manifest.graphs.values():
        assert found[graph.file] == graph.sha256


def test_ports_are_the_inputs_and_outputs_of_the_graphs(artifact):
    for graph in Manifest.read(artifact).graphs.values():
        declared = onnx.load(artifact / graph.file, load_external_data=False).graph
        for ports, values in (
            (graph.inputs, declared.input),
            (graph.outputs, declared.output),
        ):
            assert [(p.name, p.dtype, p.shape) for p in ports] == [
                (v.name, ELEMENTS[v.type.tensor_type.elem_type], shape_of(v)) for v in values
            ]


def test_every_weight_is_in_the_file_once_with_its_values_and_used(artifact):
    want = expected(random_weights(HYBRID), HYBRID)
    stored = load_file(artifact / "weights.safetensors")
    assert stored.keys() == want.keys() | {"rotary.cos", "rotary.sin"}
    for name, value in want.items():
        np.testing.assert_array_equal(stored[name], value.astype(np.float32), err_msg=name)
    graphs = Manifest.read(artifact).graphs.values()
    assert set().union(*(external(artifact / g.file) for g in graphs)) == stored.keys()


def test_the_demo_checkpoint_builds_with_all_its_weights_and_files(tmp_path):
    manifest = build(read_source(DEMO), tmp_path / "demo", options(3, capacity=64))
    want = expected(load_weights(str(DEMO)), load_config(str(DEMO)))
    assert manifest.weights.tensors.keys() == want.keys() | {"rotary.cos", "rotary.sin"}
    copied = {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert manifest.files.keys() == copied
    found = digests(tmp_path / "demo")
    source = digests(DEMO)
    for name in copied:
        assert manifest.files[name] == found[name] == source[name]
    assert check_artifact(tmp_path / "demo") == []


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_head_is_the_embedding_and_is_stored_once(tmp_path, tied):
    config = dataclasses.replace(HYBRID, tie_word_embeddings=tied)
    source = write_hybrid(tmp_path / "c", config)
    manifest = build_tiny(source, tmp_path / "a", run_check=True)
    assert ("lm_head" in manifest.weights.tensors) is not tied
    assert manifest.spec.tied_embedding is tied


def test_without_a_head_nothing_is_drafted(tmp_path):
    source = write_hybrid(tmp_path / "c", without=["mtp."])
    manifest = build_tiny(source, tmp_path / "a", k=3, run_check=True)
    assert (manifest.k, manifest.rows, list(manifest.graphs)) == (0, 1, ["prefill", "decode"])
    assert not [n for n in (*manifest.weights.tensors, *manifest.buffers) if "head" in n[:5]]
    assert loads(tmp_path / "a")


def test_k_0_leaves_the_head_out_of_a_checkpoint_that_has_one(checkpoint, tmp_path):
    manifest = build_tiny(checkpoint, tmp_path / "a", k=0, run_check=True)
    assert list(manifest.graphs) == ["prefill", "decode"]
    assert not [name for name in manifest.weights.tensors if name.startswith("head.")]


@pytest.mark.parametrize("k", range(1, 9))
def test_every_k_builds_and_runs_rightly(checkpoint, tmp_path, k):
    manifest = build_tiny(checkpoint, tmp_path / "a", k=k, run_check=True)
    assert (manifest.k, manifest.buffers["ids"].shape) == (k, (1, k + 1))
    draft = manifest.graphs["draft"].outputs
    assert len([port for port in draft if port.name.startswith("present.0.key")]) == k
    assert check_artifact(tmp_path / "a") == []


@pytest.mark.parametrize("k", [0, 3])
def test_a_capacity_without_room_for_a_step_is_refused_before_anything_is_made(
    checkpoint, tmp_path, k
):
    least = k + 3
    with pytest.raises(BuildError, match=f"capacity of {least - 1} .* at least {least}$"):
        build(read_source(checkpoint), tmp_path / "a", options(k, capacity=least - 1))
    assert names(tmp_path) == []
    build(read_source(checkpoint), tmp_path / "a", options(k, capacity=least))


def changed(source, **weights):
    """A model with some weights replaced, or taken away where None."""
    model = read_source(source)
    kept = {n: w for n, w in {**model.weights, **weights}.items() if w is not None}
    return dataclasses.replace(model, weights=kept)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"layers.9.mlp.up": from_array(np.ones((2, 2), np.float32))}, "1 weights .*layers.9"),
        ({"layers.1.mlp.up": None}, r"'layers.1.mlp.up' \[96,64\] is not in the source"),
        ({"head.fc": None}, r"'head.fc' \[64,128\] is not in the source"),
        (
            {"layers.0.gdn.z": from_array(np.ones((95, 64), np.float32))},
            r"'layers.0.gdn.z' is \[95,64\], the graph takes \[96,64\]",
        ),
    ],
    ids=["unused", "missing", "missing of the head", "wrong shape"],
)
def test_weights_that_do_not_fit_are_named(checkpoint, tmp_path, weights, message):
    with pytest.raises(BuildError, match=message):
        build(changed(checkpoint, **weights), tmp_path / "a", options())
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"layer_types": ["linear_attention"] * 2}, "no attention layer"),
        ({"partial_rotary_factor": 0.25}, "rotary_dim = 8"),
    ],
)
def test_what_no_kernel_computes_is_refused_in_a_sentence(tmp_path, config, message):
    rope = {"rope_type": "default", "rope_theta": 1e4}
    rope["partial_rotary_factor"] = config.pop("partial_rotary_factor", 0.5)
    source = write_hybrid(tmp_path / "c", dataclasses.replace(HYBRID, **config))
    values = json.loads((source / "config.json").read_text()) | {"rope_parameters": rope}
    (source / "config.json").write_text(json.dumps(values))
    with pytest.raises(BuildError, match=message):
        build_tiny(source, tmp_path / "a")
    assert names(tmp_path) == ["c"]


class Interrupt:
    """A progress callback that stops the build at its `at`-th call."""

    def __init__(self, at, error=KeyboardInterrupt):
        self.at, self.error, self.told = at, error, []

    def __call__(self, what, done, total):
        self.told.append(what)
        if len(self.told) == self.at:
            raise self.error


def test_an_interrupt_at_any_progress_leaves_all_as_it_was(checkpoint, tmp_path):
    model, output = read_source(checkpoint), tmp_path / "a"
    counter = Interrupt(0)
    build(model, tmp_path / "whole", options(1), progress=counter)
    build_tiny(checkpoint, output, k=0)
    before = digests(output)
    phases, told = set(), counter.told
    # of the many blocks of weights the first, the last, and some between
    places = [n for n, w in enumerate(told, 1) if w != "write weights" or n % 9 == 0]
    places += [told.index("write weights") + 1, told.index("write prefill")]
    for at in places:
        interrupt = Interrupt(at)
        with pytest.raises(KeyboardInterrupt):
            build(model, output, options(1), force=True, progress=interrupt)
        assert names(tmp_path) == ["a", "whole"]
        assert digests(output) == before
        phases.add(interrupt.told[-1].partition(":")[0])
    graphs = {"prefill", "decode", "verify", "draft"}
    assert phases >= graphs | {f"write {name}" for name in graphs}
    assert phases >= {"write weights", "check files", "check run"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, OSError("no space")])
def test_a_first_build_that_stops_leaves_an_empty_place(checkpoint, tmp_path, error):
    at = 60  # while weights are written
    with pytest.raises((KeyboardInterrupt, MemoryError, BuildError)):
        build(
            read_source(checkpoint), tmp_path / "a", options(1), progress=Interrupt(at, error)
        )
    assert names(tmp_path) == []


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from artifacts import Target
    from export.build import build
    from export.options import BuildOptions
    from export.sources import read_source

    source, output, phase = sys.argv[1:]

    def progress(what, done, total):
        if what == phase:
            os.kill(os.getpid(), signal.SIGKILL)

    target = Target("cpu", "float32")
    options = BuildOptions(k=1, capacity=40, prefill_rows=16, target=target)
    build(read_source(Path(source)), Path(output), options, force=True, progress=progress)
"""


def python(*args, **env):
    command = [sys.executable, *map(str, args)]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True
    )


@pytest.mark.parametrize("phase", ["draft: DraftPass", "write weights", "write verify"])
@pytest.mark.parametrize("there", [False, True])
def test_a_killed_build_leaves_no_more_than_a_folder_that_does_not_load(
    checkpoint, tmp_path, phase, there
):
    output = tmp_path / "a"
    if there:
        build_tiny(checkpoint, output, k=0)
    before = digests(output) if there else None
    ended = python("-c", textwrap.dedent(KILLED), checkpoint, output, phase)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    stale = [name for name in names(tmp_path) if name != "a"]
    assert len(stale) == (0 if "Pass" in phase else 1)
    for name in stale:
        assert name.startswith(".a.")
        assert not loads(tmp_path / name)
    if there:
        assert digests(output) == before
    assert output.exists() is there
    build_tiny(checkpoint, output, k=0, force=there)  # what is stale is in nobody's way
    assert loads(output)


def test_a_build_killed_in_its_last_check_has_nothing_at_its_output(checkpoint, tmp_path):
    args = ("-c", textwrap.dedent(KILLED), checkpoint, tmp_path / "a", "check files")
    assert python(*args).returncode == -signal.SIGKILL
    (stale,) = names(tmp_path)
    assert stale.startswith(".a.")


def test_an_artifact_in_the_way_is_replaced_whole_and_only_with_force(checkpoint, tmp_path):
    output = tmp_path / "a"
    build_tiny(checkpoint, output, k=2)
    before = digests(output)
    with pytest.raises(ExportError, match="Replace it with --force"):
        build_tiny(checkpoint, output, k=0)
    assert digests(output) == before
    build_tiny(checkpoint, output, k=0, force=True)
    assert names(output) == ["decode.onnx", "manifest.json", "prefill.onnx", WEIGHTS_FILE]
    assert Manifest.read(output).k == 0
    assert names(tmp_path) == ["a"]


WEIGHTS_FILE = "weights.safetensors"


def test_an_artifact_that_fails_its_static_check_is_not_kept(
    checkpoint, tmp_path, monkeypatch
):
    right = Layout.buffers
    monkeypatch.setattr(
        Layout, "buffers", lambda self: right(self) | {"accepted": Buffer("int32", (1,))}
    )
    with pytest.raises(BuildError, match=r"fails its own check .* First: .*accepted"):
        build_tiny(checkpoint, tmp_path / "a")
    assert names(tmp_path) == []


def test_an_artifact_that_fails_its_run_check_is_not_kept(checkpoint, tmp_path):
    bad = np.full((64, 96), np.nan, np.float32)
    model = changed(checkpoint, **{"layers.1.mlp.down": from_array(bad)})
    with pytest.raises(BuildError, match=r"fails its own check .* First: run\.finite"):
        build(model, tmp_path / "a", options(1))
    assert names(tmp_path) == []


def test_a_file_that_went_away_meanwhile_is_told_in_a_sentence(checkpoint, tmp_path):
    gone = {"tokenizer.json": tmp_path / "gone" / "tokenizer.json"}
    model = dataclasses.replace(read_source(checkpoint), files=gone)
    with pytest.raises(BuildError, match=r"cannot be written: .*gone.*No such file") as caught:
        build(model, tmp_path / "a", options(1), run_check=False)
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == []


TWICE = """
    import sys
    from pathlib import Path
    from artifacts import Target
    from export.build import build
    from export.options import BuildOptions
    from export.sources import read_source

    for target in (
        Target("cpu", "float32"), Target("cuda", "bfloat16"), Target("cuda", "float16", "int4")
    ):
        options = BuildOptions(k=2, capacity=40, prefill_rows=16, target=target)
        output = Path(sys.argv[2]) / f"{target.provider}-{target.weights}"
        build(read_source(Path(sys.argv[1])), output, options, run_check=False)
"""


def test_two_builds_are_equal_to_the_last_bit(checkpoint, tmp_path):
    """Also where sets and dicts of other processes are in another order."""
    for seed in ("1", "2"):
        (tmp_path / seed).mkdir()
        args = ("-c", textwrap.dedent(TWICE), checkpoint, tmp_path / seed)
        ended = python(*args, PYTHONHASHSEED=seed)
        assert ended.returncode == 0, ended.stderr
    assert names(tmp_path / "1") == ["cpu-dense", "cuda-dense", "cuda-int4"]
    for name in names(tmp_path / "1"):
        assert digests(tmp_path / "1" / name) == digests(tmp_path / "2" / name)


def test_another_seed_is_another_artifact(checkpoint, artifact, tmp_path):
    other = write_hybrid(tmp_path / "c", seed=1)
    build_tiny(other, tmp_path / "a", k=2)
    assert digests(tmp_path / "a")[WEIGHTS_FILE] != digests(artifact)[WEIGHTS_FILE]
