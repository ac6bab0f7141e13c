"""Graphs that an artifact may have besides the four: which go together, and what they need."""

import pytest
from artifact_samples import edit_manifest
from small_artifacts import build_tiny

from artifacts.manifest import GRAPHS, OPTIONAL_GRAPHS
from artifacts.rules import check_artifact
from runtime.decode import Decoder
from runtime.errors import LoadError
from runtime.load import load
from runtime.sampling import SamplingOptions


@pytest.fixture
def folder(tmp_path):
    return build_tiny(tmp_path / "tiny")


def codes(folder):
    return {finding.code for finding in check_artifact(folder)}


def test_all_of_them_are_built_and_clean(folder):
    assert codes(folder) == set()
    loaded = load(folder)
    assert loaded.slots.keys() == {*GRAPHS, *OPTIONAL_GRAPHS}
    loaded.close()


@pytest.mark.parametrize("graph", ["decode_sampled", "verify_sampled"])
def test_graphs_that_sample_come_together(folder, graph):
    edit_manifest(folder, lambda values: values["graphs"].pop(graph))
    assert "graphs.rows" in codes(folder)
    with pytest.raises(LoadError, match="only one of the graphs decode_sampled and verify_s"):
        load(folder)


@pytest.mark.parametrize("buffer", ["sample.noise", "sample.top_k", "catch_up.hidden"])
def test_their_buffers_are_part_of_the_contract(folder, buffer):
    edit_manifest(folder, lambda values: values["buffers"][buffer].update(shape=[1]))
    if buffer != "sample.top_k":
        assert "manifest.spec" in codes(folder)
        with pytest.raises(LoadError, match=f"the buffer '{buffer}' is"):
            load(folder)
    edit_manifest(folder, lambda values: values["buffers"].pop(buffer))
    assert "manifest.spec" in codes(folder)
    with pytest.raises(LoadError, match=f"the buffer '{buffer}' is missing"):
        load(folder)


def test_a_state_that_a_sampled_graph_does_not_write_is_found(folder):
    def forget(values):
        outputs = values["graphs"]["verify_sampled"]["outputs"]
        outputs[:] = [port for port in outputs if port["name"] != "present.3.key"]

    edit_manifest(folder, forget)
    assert "manifest.spec" in codes(folder)


def test_a_graph_changed_after_the_build_is_refused_before_it_is_needed(folder):
    (folder / "decode_sampled.onnx").write_bytes(b"")
    with pytest.raises(LoadError, match=r"decode_sampled\.onnx has the SHA-256"):
        load(folder)


def test_a_graph_changed_after_the_load_is_refused_when_it_is_needed(folder):
    with Decoder.open(folder) as decoder:
        (folder / "decode_sampled.onnx").write_bytes(b"")
        want = [token for step in decoder.generate([1, 2], 4) for token in step.tokens]
        assert len(want) == 4
        with pytest.raises(LoadError, match=r"decode_sampled\.onnx has the SHA-256"):
            decoder.prefill([1, 2], sampling=SamplingOptions(seed=1))


def test_without_sampling_neither_graphs_nor_buffers_are_there(tmp_path):
    folder = build_tiny(tmp_path / "greedy", sampling=False)
    assert codes(folder) == set()
    loaded = load(folder)
    assert loaded.slots.keys() == {*GRAPHS, "catch_up"}
    assert not [name for name in loaded.manifest.buffers if name.startswith("sample.")]
    loaded.close()


def test_without_a_head_decode_alone_samples(tmp_path):
    folder = build_tiny(tmp_path / "headless", k=0)
    assert codes(folder) == set()
    with Decoder.open(folder) as decoder:
        assert decoder.loaded.slots.keys() == {"prefill", "decode", "decode_sampled"}
        options = SamplingOptions(seed=4, presence_penalty=1.0)
        texts = [
            [t for s in decoder.generate([5, 6], 12, sampling=options) for t in s.tokens]
            for _ in range(2)
        ]
        assert texts[0] == texts[1]
    with Decoder.open(build_tiny(tmp_path / "head")) as decoder:
        steps = decoder.generate([5, 6], 12, sampling=options)
        assert [token for step in steps for token in step.tokens] == texts[0]
