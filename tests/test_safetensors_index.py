import os

import numpy as np
import pytest
from checkpoint_cases import (
    DECODER,
    HEAD,
    MTP,
    WEIGHTS,
    assert_weights,
    config_values,
    entry,
    expected,
    header,
    one_file,
    refusal,
    write,
)

from export.checkpoint import read_checkpoint


def halves(weights):
    names = sorted(weights)
    cut = len(names) // 2
    return [{n: weights[n] for n in part} for part in (names[:cut], names[cut:])]


def shards(weights):
    parts = halves(weights)
    return {f"model-{i + 1:05}-of-00002.safetensors": part for i, part in enumerate(parts)}


def index_of(files):
    return {tensor: name for name, part in files.items() for tensor in part}


LAYOUTS = {
    "shards without an index": (shards(WEIGHTS), None),
    "shards with an index": (shards(WEIGHTS), index_of(shards(WEIGHTS))),
    "the head in a file of its own": (
        {"model.safetensors": DECODER, "mtp.safetensors": MTP},
        None,
    ),
    "the head in an indexed file of its own": (
        {**shards(DECODER), "mtp.safetensors": MTP},
        index_of({**shards(DECODER), "mtp.safetensors": MTP}),
    ),
    "the head in a file that the index does not name": (
        {**shards(DECODER), "mtp.safetensors": MTP},
        index_of(shards(DECODER)),
    ),
    "an index that does not name every tensor": (
        shards(WEIGHTS),
        dict(list(index_of(shards(WEIGHTS)).items())[::3]),
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_weights(tmp_path, layout):
    files, index = LAYOUTS[layout]
    checkpoint = read_checkpoint(write(tmp_path / "m", config_values(), files, index))
    assert_weights(checkpoint, expected(WEIGHTS))
    assert checkpoint.spec.head == HEAD
    assert checkpoint.left_out == ()


def test_a_second_copy_that_the_index_does_not_name_is_left_out_by_name(tmp_path):
    files = shards(WEIGHTS)
    folder = write(
        tmp_path / "m",
        config_values(),
        {**files, "consolidated.safetensors": WEIGHTS},
        index_of(files),
    )
    assert read_checkpoint(folder).left_out == ("consolidated.safetensors",)


UNSAFE = ["../m/x.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\0.safetensors"]


@pytest.mark.parametrize("name", UNSAFE)
def test_an_index_may_not_name_a_path(tmp_path, name):
    folder = write(
        tmp_path / "m", config_values(), shards(WEIGHTS), {"model.norm.weight": name}
    )
    message = refusal(folder)
    assert "model.safetensors.index.json: weight_map.model.norm.weight is" in message
    assert "it must be the name of a file in the same folder, not a path" in message


INDEXES = [
    ({"norm": "pytorch_model.bin"}, "it must be the name of a .safetensors file"),
    ({"norm": 5}, "weight_map.norm is 5; it must be a string"),
    ({"norm": "gone.safetensors"}, "gone.safetensors is missing; fetch the whole checkpoint"),
    ({"norm": "\ud800.safetensors"}, "safetensors"),
    ({"norm": "model.safetensors"}, "places 'norm' in model.safetensors, which does not hold"),
    ({}, "names no tensor; fetch it anew"),
    ([], "weight_map must be a JSON object, found []"),
]


@pytest.mark.parametrize(("weight_map", "message"), INDEXES)
def test_an_index_at_odds_with_the_folder_is_refused(tmp_path, weight_map, message):
    folder = write(tmp_path / "m", config_values(), {"model.safetensors": WEIGHTS}, weight_map)
    assert message in refusal(folder)


def test_a_tensor_in_the_other_shard_than_the_index_says_is_refused(tmp_path):
    files = shards(WEIGHTS)
    index = index_of(files) | {"mtp.norm.weight": min(files)}
    message = refusal(write(tmp_path / "m", config_values(), files, index))
    assert f"places 'mtp.norm.weight' in {min(files)}, which does not hold it" in message


@pytest.mark.parametrize("is_indexed", [True, False])
def test_a_tensor_in_two_files_is_refused(tmp_path, is_indexed):
    files = {"a.safetensors": WEIGHTS, "b.safetensors": {"mtp.norm.weight": np.zeros(64)}}
    index = index_of({"a.safetensors": WEIGHTS}) if is_indexed else None
    message = refusal(write(tmp_path / "m", config_values(), files, index))
    assert "'mtp.norm.weight' stands in both a.safetensors and b.safetensors" in message


def test_a_link_out_of_the_folder_is_refused(tmp_path):
    folder = one_file(tmp_path / "m", WEIGHTS)
    os.rename(folder / "model.safetensors", tmp_path / "elsewhere.safetensors")
    os.symlink("../elsewhere.safetensors", folder / "model.safetensors")
    message = refusal(folder)
    assert f"is a link to {tmp_path}/elsewhere.safetensors, outside the folder" in message


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "generation_config.json", "model.safetensors"]
)
def test_links_of_other_files_may_not_leave_the_folder_either(tmp_path, name):
    folder = one_file(tmp_path / "m", WEIGHTS)
    (folder / name).unlink(missing_ok=True)
    (tmp_path / "secret").write_text("{}")
    os.symlink("../secret", folder / name)
    assert "outside the folder; put the file itself there" in refusal(folder)


def test_links_within_the_folder_and_into_the_hub_cache_are_followed(tmp_path):
    folder = one_file(tmp_path / "m", WEIGHTS)
    os.rename(folder / "model.safetensors", folder / "weights")
    os.symlink("weights", folder / "model.safetensors")
    assert_weights(read_checkpoint(folder), expected(WEIGHTS))

    snapshot = tmp_path / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    for i, (name, source) in enumerate({"config.json": 0, "model.safetensors": 0}.items()):
        os.rename((folder / name).resolve(), tmp_path / "blobs" / f"{i}{source}")
        os.symlink(f"../../blobs/{i}{source}", snapshot / name)
    assert_weights(read_checkpoint(snapshot), expected(WEIGHTS))


def test_what_is_no_regular_file_is_refused_without_being_opened(tmp_path):
    folder = one_file(tmp_path / "pipe", WEIGHTS)
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    assert "config.json is not a regular file" in refusal(folder)
    folder = one_file(tmp_path / "folder", WEIGHTS)
    (folder / "x.safetensors").mkdir()
    assert "x.safetensors is not a regular file" in refusal(folder)
    folder = one_file(tmp_path / "loop", WEIGHTS)
    os.symlink("tokenizer.json", folder / "tokenizer.json")
    assert "tokenizer.json cannot be opened" in refusal(folder)


def test_a_folder_that_is_none_is_refused(tmp_path):
    assert "config.json is missing; fetch the whole checkpoint" in refusal(tmp_path / "gone")
    (tmp_path / "file").write_text("x")
    assert "config.json cannot be opened" in refusal(tmp_path / "file")
    assert "holds no .safetensors file" in refusal(write(tmp_path / "m", config_values(), {}))


DAMAGED = {
    "empty": b"",
    "shorter than a length": b"\1\0\0",
    "a length past the end": (2**60).to_bytes(8, "little") + b"{}",
    "no JSON": (4).to_bytes(8, "little") + b"abcd",
    "data past the end": header({"a": entry([4], 0, 16)}, 8),
    "offsets that overlap": header({"a": entry([1], 0, 4), "b": entry([1], 0, 4)}, 4),
    "a shape that overflows": header({"a": entry([2**40, 2**40], 0, 4)}, 4),
    "a dtype of no name": header({"a": entry([1], 0, 4, "Q9")}, 4),
    "a page of a web server": b"<html>" * 100,
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_one_clear_error(tmp_path, damage):
    folder = write(tmp_path / "m", config_values(), {})
    (folder / "model.safetensors").write_bytes(DAMAGED[damage])
    assert f"{folder}/model.safetensors cannot be read as safetensors" in refusal(folder)


def test_a_truncated_shard_is_named(tmp_path):
    folder = write(tmp_path / "m", config_values(), shards(WEIGHTS))
    path = folder / max(shards(WEIGHTS))
    path.write_bytes(path.read_bytes()[:-5])
    assert f"{path} cannot be read as safetensors" in refusal(folder)


def test_hidden_files_are_not_looked_at(tmp_path):
    folder = one_file(tmp_path / "m", WEIGHTS)
    (folder / "._model.safetensors").write_bytes(b"left by an archiver")
    assert_weights(read_checkpoint(folder), expected(WEIGHTS))
