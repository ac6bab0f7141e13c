import json
import os
from pathlib import Path

import pytest
from counting_artifact import WEIGHTS, Counting

from artifacts import ParseError
from runtime.decode import Decoder
from runtime.errors import LoadError
from runtime.load import load, packed_graphs


@pytest.fixture
def folder(tmp_path) -> Path:
    return Counting().write(tmp_path)


def edit(folder: Path, *keys_and_value) -> None:
    """Overwrite one value of the manifest."""
    path = folder / "manifest.json"
    whole = json.loads(path.read_text())
    *keys, last, value = keys_and_value
    inner = whole
    for key in keys:
        inner = inner[key]
    inner[last] = value
    path.write_text(json.dumps(whole))


def test_every_graph_gets_a_slot_and_is_announced(folder):
    names: list[str] = []
    loaded = load(folder, threads=1, progress=names.append)
    assert sorted(loaded.slots) == sorted(names) == ["decode", "draft", "prefill", "verify"]
    loaded.close()


@pytest.mark.parametrize(
    ("weight_bytes", "packed"),
    [
        (2**20, {"prefill", "decode", "verify", "draft"}),
        (64 * 2**20, {"prefill", "decode", "verify", "draft"}),
        (64 * 2**20 + 1, {"verify", "draft"}),
        (2**30, {"verify", "draft"}),
        (2**30 + 1, set()),
    ],
)
def test_graphs_copy_weights_where_that_is_worth_the_memory(monkeypatch, weight_bytes, packed):
    memory = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**33 // 4096}
    monkeypatch.setattr(os, "sysconf", memory.__getitem__)
    assert set(packed_graphs(weight_bytes)) == packed


@pytest.mark.parametrize("prepack", [True, False, None])
def test_prepacking_changes_no_token(folder, prepack):
    with Decoder(load(folder, prepack=prepack)) as decoder:
        steps = decoder.generate([3, 1, 4], 20)
        assert [t for step in steps for t in step.tokens] == Counting().greedy([3, 1, 4], 20)


def test_a_folder_without_a_manifest_is_no_artifact(tmp_path):
    with pytest.raises(ParseError, match="is no artifact"):
        load(tmp_path)


def test_a_graph_that_was_changed_is_refused(folder):
    path = folder / "verify.onnx"
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(LoadError, match=r"verify.onnx has the SHA-256 .* changed after"):
        load(folder)


def test_weights_that_are_cut_short_are_refused(folder):
    path = folder / WEIGHTS
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(
        LoadError, match=r"weights.safetensors has \d+ bytes, the manifest says"
    ):
        load(folder)


def test_a_missing_file_is_named(folder):
    (folder / "draft.onnx").unlink()
    with pytest.raises(LoadError, match=r"draft.onnx is missing in"):
        load(folder)


def test_a_pipe_in_place_of_a_file_does_not_hang(folder):
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)
    with pytest.raises(LoadError, match=r"weights.safetensors is no regular file"):
        load(folder)


def test_a_dangling_link_is_missing(folder):
    (folder / "decode.onnx").unlink()
    (folder / "decode.onnx").symlink_to(folder / "nowhere.onnx")
    with pytest.raises(LoadError, match=r"decode.onnx is missing"):
        load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("k", 0), "k = 0 has the graphs decode, prefill; this one has decode, draft"),
        (("k", 2), r"'ids' is int64\[1, 4\]; it must be int64\[1, 3\]"),
        (("capacity", 65), "cache_rows is 68; .* 65 tokens and 4 rows of a verify need 69"),
        (
            ("buffers", "result", "shape", [6]),
            r"'result' is int64\[6\]; it must be int64\[10\]",
        ),
        (("graphs", "verify", "inputs", 0, "offset", 1), "from element 1 on"),
        (("prefill_rows", 17), "'prompt_ids' is"),
        (("buffers", "length", "dtype", "int64"), r"'length' is int64\[1\]; it must be int32"),
        (("buffers", "best", "shape", [1, 10**9]), "'best' is"),
        (("spec", "vocab_size", 319), "'logits' is"),
        (("target", "dtype", "float16"), "'hidden' is float32"),
        (("graphs", "verify", "rows", 3), "verify graph has 3 rows; it must have 4"),
        (("graphs", "decode", "inputs", 0, "buffer", "idz"), "'idz', and there is no such"),
        (("graphs", "decode", "inputs", 0, "shape", [1, 9]), "does not go on|in the manifest"),
        (("weights", "size", 3), "the manifest says 3"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(folder, change, message):
    edit(folder, *change)
    with pytest.raises(LoadError, match=message):
        load(folder)


def test_a_manifest_that_leaves_the_folder_is_refused(folder):
    edit(folder, "graphs", "decode", "file", "../decode.onnx")
    with pytest.raises(ParseError, match="not a path"):
        load(folder)
