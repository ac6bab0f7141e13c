import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from checkpoint_cases import (
    BF16,
    CONFIG,
    DEMO,
    config_values,
    expected,
    fused,
    load_weights,
    one_file,
    random_weights,
    stored_as,
    tied_config,
    tiny_config,
    wrapped,
    write,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import export.safetensors_index
import export.stored_weights
import passes.streamed
from artifacts import HeadSpec
from export.checkpoint import Checkpoint, read_checkpoint
from export.errors import CheckpointError, ExportError

WEIGHTS = random_weights(CONFIG)
MTP = {name: value for name, value in WEIGHTS.items() if name.startswith("mtp.")}
DECODER = {name: value for name, value in WEIGHTS.items() if name not in MTP}
HEAD = HeadSpec(
    layers=1,
    hidden_source="post_norm",
    feedback="post_norm",
    concat="embed_first",
    cache="own",
    intermediate_size=96,
)


def assert_weights(checkpoint, want):
    """Equal to the last bit, dtype and name included."""
    assert checkpoint.weights.keys() == want.keys()
    for name, value in want.items():
        got = checkpoint.weights[name]
        assert got.name == name
        assert got.dtype.numpy() == value.dtype, name
        assert tuple(got.shape.numpy()) == value.shape, name
        np.testing.assert_array_equal(got.numpy(), value, err_msg=name)


def refusal(folder):
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_demo_gives_the_values_of_the_oracle_reader():
    checkpoint = read_checkpoint(DEMO)
    values = {
        name: value if name.endswith("A_log") else value.astype(BF16)
        for name, value in load_weights(DEMO).items()
    }
    config = tiny_config(
        hidden_size=256,
        num_attention_heads=4,
        head_dim=64,
        layer_types=json.loads((DEMO / "config.json").read_text())["layer_types"],
        tie_word_embeddings=True,
    )
    assert_weights(checkpoint, expected(values, config))
    assert checkpoint.spec.tied_embedding
    assert checkpoint.spec.head is not None
    assert checkpoint.spec.head.intermediate_size == 512
    assert checkpoint.left_out == ()
    assert checkpoint.eos_token_ids == (0,)
    assert sorted(checkpoint.files) == [
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert all(path == DEMO / name for name, path in checkpoint.files.items())
    digest = hashlib.sha256((DEMO / "config.json").read_bytes()).hexdigest()
    assert checkpoint.config_sha256 == digest


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
def test_values_keep_their_stored_dtype_and_fold_in_float32(tmp_path, dtype):
    weights = stored_as(WEIGHTS, dtype)
    checkpoint = read_checkpoint(one_file(tmp_path / "m", weights))
    assert_weights(checkpoint, expected(weights))
    assert checkpoint.spec.head == HEAD
    assert checkpoint.weights["layers.0.gdn.conv"].dtype.numpy() == dtype
    assert checkpoint.weights["layers.0.input_norm"].dtype == ir.DataType.FLOAT


def test_small_blocks_give_the_same_values(tmp_path, monkeypatch):
    packed, split = fused(CONFIG)
    folder = one_file(tmp_path / "m", packed, config_values(model_type="qwen3_next"))
    monkeypatch.setattr(passes.streamed, "BLOCK_BYTES", 5 * 4 * CONFIG.hidden_size)
    checkpoint = read_checkpoint(folder)
    assert_weights(checkpoint, expected(split))
    blocks = [len(block) for block in checkpoint.weights["layers.0.gdn.qkv"].blocks()]
    assert blocks == [5] * 32
    assert [len(b) for b in checkpoint.weights["layers.0.gdn.b"].blocks()] == [5, 1]


def test_fused_projections_are_split_as_the_oracle_splits_them(tmp_path):
    packed, split = fused(CONFIG)
    folder = one_file(tmp_path / "m", packed, config_values(model_type="qwen3_next"))
    checkpoint = read_checkpoint(folder)
    assert checkpoint.spec.family == "qwen3_next"
    assert_weights(checkpoint, expected(split))


def test_the_multimodal_wrapper_gives_the_text_model_and_names_the_rest(tmp_path):
    prefix = "model.language_model."
    weights = random_weights(CONFIG, prefix=prefix)
    vision = {f"model.visual.blocks.{i}.attn.qkv.weight": np.ones((2, 2)) for i in (0, 1)}
    folder = one_file(tmp_path / "m", weights | vision, wrapped(config_values()))
    checkpoint = read_checkpoint(folder)
    assert_weights(checkpoint, expected(weights, prefix=prefix))
    assert checkpoint.left_out == tuple(vision)
    assert_weights(checkpoint, expected(WEIGHTS))


@pytest.mark.parametrize("values", [config_values(), wrapped(config_values())])
@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_the_tensors_say_which_prefix_holds(tmp_path, values, prefix):
    weights = random_weights(CONFIG, prefix=prefix)
    checkpoint = read_checkpoint(one_file(tmp_path / "m", weights, values))
    assert_weights(checkpoint, expected(WEIGHTS))


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


def test_a_head_that_is_announced_but_absent_is_none(tmp_path):
    folder = one_file(tmp_path / "m", DECODER, config_values(mtp_num_hidden_layers=1))
    checkpoint = read_checkpoint(folder)
    assert checkpoint.spec.head is None
    assert_weights(checkpoint, expected(DECODER))


def test_a_head_with_a_feed_forward_of_its_own_width_says_so(tmp_path):
    own = random_weights(tiny_config(intermediate_size=32))
    head = {name: value for name, value in own.items() if name.startswith("mtp.")}
    checkpoint = read_checkpoint(one_file(tmp_path / "m", DECODER | head))
    assert checkpoint.spec.head is not None
    assert checkpoint.spec.head.intermediate_size == 32
    assert_weights(checkpoint, expected(DECODER | head))


def test_a_tied_model_has_no_lm_head_even_where_an_equal_one_is_stored(tmp_path):
    tied = random_weights(tied_config())
    want = expected(tied, tied_config())
    values = config_values(tied_config())
    assert_weights(read_checkpoint(one_file(tmp_path / "a", tied, values)), want)
    equal = tied | {"lm_head.weight": tied["model.embed_tokens.weight"].copy()}
    assert_weights(read_checkpoint(one_file(tmp_path / "b", equal, values)), want)


def test_a_tied_model_with_another_lm_head_is_refused(tmp_path):
    tied = random_weights(tied_config())
    embed = tied["model.embed_tokens.weight"]
    last_bit = embed.copy()
    last_bit.view(np.uint32)[-1, -1] ^= 1
    for i, lm_head in enumerate((last_bit, embed[:-1], embed.astype(BF16), np.float32([1]))):
        folder = one_file(
            tmp_path / f"{i}",
            tied | {"lm_head.weight": np.ascontiguousarray(lm_head)},
            config_values(tied_config()),
        )
        message = refusal(folder)
        assert "'lm_head.weight'" in message
        assert "differs from the embedding" in message
        assert "set tie_word_embeddings to false" in message


def test_signed_zeros_of_a_tied_pair_are_different_bits(tmp_path):
    tied = random_weights(tied_config())
    tied["model.embed_tokens.weight"][0, 0] = 0.0
    lm_head = tied["model.embed_tokens.weight"].copy()
    lm_head[0, 0] = -0.0
    weights = tied | {"lm_head.weight": lm_head}
    assert "differs" in refusal(
        one_file(tmp_path / "m", weights, config_values(tied_config()))
    )


def test_rotary_buffers_are_left_out_by_name(tmp_path):
    buffers = {"model.rotary_emb.inv_freq": np.ones(4, np.float32)}
    checkpoint = read_checkpoint(one_file(tmp_path / "m", WEIGHTS | buffers))
    assert checkpoint.left_out == tuple(buffers)


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [
        ({"eos_token_id": [3, 4]}, 7, (3, 4)),
        ({"eos_token_id": 3}, 7, (3,)),
        ({}, 7, (7,)),
        (None, [8, 9], (8, 9)),
        (None, None, ()),
    ],
)
def test_end_tokens_come_from_the_generation_config_first(tmp_path, generation, config, ids):
    folder = one_file(tmp_path / "m", WEIGHTS, config_values(eos_token_id=config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert read_checkpoint(folder).eos_token_ids == ids


def test_matrices_are_read_only_when_they_are_asked_for(tmp_path, monkeypatch):
    reads = []
    read = export.safetensors_index.StoredTensor.read

    def recorded(self, ranges):
        reads.append(self.name)
        return read(self, ranges)

    monkeypatch.setattr(export.safetensors_index.StoredTensor, "read", recorded)
    checkpoint = read_checkpoint(one_file(tmp_path / "m", WEIGHTS))
    assert reads
    assert all(WEIGHTS[name].ndim == 1 for name in reads)
    reads.clear()
    checkpoint.weights["layers.3.attention.gate"].numpy()
    assert reads == ["model.layers.3.self_attn.q_proj.weight"]


@pytest.mark.parametrize("name", sorted(WEIGHTS))
def test_each_missing_tensor_is_named_with_its_shape(tmp_path, name):
    weights = {n: value for n, value in WEIGHTS.items() if n != name}
    message = refusal(one_file(tmp_path / "m", weights))
    assert f"{name!r} {list(WEIGHTS[name].shape)} is missing from {tmp_path}" in message


@pytest.mark.parametrize("name", sorted(WEIGHTS))
def test_each_wrong_shape_names_both(tmp_path, name):
    wrong = np.zeros((*WEIGHTS[name].shape, 3), np.float32)
    message = refusal(one_file(tmp_path / "m", WEIGHTS | {name: wrong}))
    assert f"{name!r} in {tmp_path}/m/model.safetensors is {list(wrong.shape)}" in message
    assert f"it must be {list(WEIGHTS[name].shape)}" in message


EXTRA = [
    ("model.layers.4.input_layernorm.weight", "is no tensor of the model that config.json"),
    ("model.layers.0.linear_attn.in_proj_qkv.bias", "is no tensor of the model"),
    ("mtp.embed_tokens.weight", "is no tensor of the model"),
    ("score.weight", "building without it would give another model"),
    ("model.language.weight", "is no tensor of the model"),
    ("mtp.layers.1.input_layernorm.weight", "an MTP head of several layers cannot be built"),
    ("model.layers.0.mlp.experts.0.up_proj.weight", "belongs to a mixture of experts"),
    ("model.layers.0.mlp.shared_expert_gate.weight", "belongs to a mixture of experts"),
    ("mtp.layers.0.mlp.gate.weight", "belongs to a mixture of experts"),
]


@pytest.mark.parametrize(("name", "message"), EXTRA)
def test_a_tensor_that_nobody_reads_stops_the_build(tmp_path, name, message):
    found = refusal(one_file(tmp_path / "m", WEIGHTS | {name: np.zeros(3, np.float32)}))
    assert repr(name) in found
    assert message in found


def test_several_unread_tensors_are_counted(tmp_path):
    extra = {f"x.{i}": np.zeros(1) for i in range(3)}
    assert "'x.0' and 2 more in" in refusal(one_file(tmp_path / "m", WEIGHTS | extra))


def test_dense_matrices_replaced_by_experts_are_called_a_mixture(tmp_path):
    weights = {
        name.replace(".mlp.", ".mlp.experts.0."): value for name, value in WEIGHTS.items()
    }
    assert "belongs to a mixture of experts" in refusal(one_file(tmp_path / "m", weights))


def test_a_head_announced_with_two_layers_is_refused_when_it_is_there(tmp_path):
    values = config_values(mtp_num_hidden_layers=2)
    assert "config.json announces more than one" in refusal(
        one_file(tmp_path / "a", WEIGHTS, values)
    )
    assert read_checkpoint(one_file(tmp_path / "b", DECODER, values)).spec.head is None


@pytest.mark.parametrize("dtype", [np.int8, np.float64, np.uint8])
def test_quantised_and_other_dtypes_are_refused_by_name(tmp_path, dtype):
    name = "model.layers.0.mlp.up_proj.weight"
    weights = WEIGHTS | {name: WEIGHTS[name].astype(dtype)}
    message = refusal(one_file(tmp_path / "m", weights))
    assert f"{name!r} in" in message
    assert "only F32, F16, BF16 can be built from" in message


BAD_VALUES = [
    ("model.layers.0.linear_attn.A_log", 89.0, "holds 89.0 at 2, which becomes -inf"),
    ("model.layers.0.linear_attn.A_log", -np.inf, "holds -inf at 2"),
    ("model.layers.0.linear_attn.dt_bias", np.nan, "holds nan at 2"),
    ("model.layers.0.linear_attn.norm.weight", np.inf, "holds inf at 2"),
    ("model.norm.weight", np.nan, "holds nan at 2"),
    ("mtp.layers.0.self_attn.q_norm.weight", -np.inf, "holds -inf at 2"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD_VALUES)
def test_values_that_are_not_finite_are_refused_by_name(tmp_path, name, value, message):
    weights = WEIGHTS | {name: WEIGHTS[name].copy()}
    weights[name][2] = value
    found = refusal(one_file(tmp_path / "m", weights))
    assert f"{name!r} in" in found
    assert message in found


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


def header(values, size):
    text = json.dumps(values).encode()
    return len(text).to_bytes(8, "little") + text + bytes(size)


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


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


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "BOOL"])
def test_eight_bit_tensors_are_refused_before_they_are_read(tmp_path, dtype):
    folder = write(tmp_path / "m", config_values(), {})
    data = header({"model.embed_tokens.weight": entry([128, 64], 0, 8192, dtype)}, 8192)
    (folder / "model.safetensors").write_bytes(data)
    assert f"is stored as {dtype}; only F32, F16, BF16" in refusal(folder)


def test_a_file_that_changes_during_the_build_is_an_error_when_it_is_read(tmp_path):
    folder = one_file(tmp_path / "m", WEIGHTS)
    embed = read_checkpoint(folder).weights["embed"]
    one_file(folder, WEIGHTS | {"model.embed_tokens.weight": np.zeros((4, 4), np.float32)})
    with pytest.raises(CheckpointError, match="changed during the build"):
        embed.numpy()
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        embed.numpy()


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "must be a JSON object"),
        ('{"a": 1, "a": 2}', "stands twice"),
        ("[" * 100_000, "nested too deeply"),
        ('{"eos_token_id": ' + "9" * 5000 + "}", "is not JSON"),
    ],
)
def test_json_that_is_none_is_refused_by_file(tmp_path, name, text, message):
    folder = one_file(tmp_path / "m", WEIGHTS)
    (folder / name).write_text(text)
    found = refusal(folder)
    assert name in found
    assert message in found


def test_the_refusals_of_the_config_name_the_folder_and_the_key(tmp_path):
    message = refusal(one_file(tmp_path / "m", WEIGHTS, config_values(num_experts=8)))
    assert message == (
        f"{tmp_path}/m is no checkpoint to build from: config.json: num_experts is 8; "
        "it must be 0: only dense feed-forwards can be built"
    )


def test_every_checkpoint_error_is_an_export_error():
    assert issubclass(CheckpointError, ExportError)
    assert not issubclass(CheckpointError, ValueError)


BASE = config_values(mtp_num_hidden_layers=1, output_gate_type="swish", num_experts=0)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.sampled_from(
        [2**31, 2**63, 10**400, 0.25, 0.5, 1e300, "silu", "x", [], {}, [1], ["x"]]
    ),
    st.sampled_from([["full_attention"] * 4, {"rope_theta": 2}, {"rope_type": "yarn"}]),
)
CHANGES = st.dictionaries(st.sampled_from(sorted(BASE)), VALUES, min_size=1, max_size=3)


@settings(deadline=None, suppress_health_check=list(HealthCheck))  # a shared machine
@given(changes=CHANGES, is_wrapped=st.booleans())
def test_any_config_gives_a_checkpoint_or_one_error(tmp_path, changes, is_wrapped):
    folder = tmp_path / "m"
    if not folder.exists():
        one_file(folder, WEIGHTS)
    values = BASE | changes
    text = json.dumps(wrapped(values) if is_wrapped else values)
    (folder / "config.json").write_text(text)
    try:
        checkpoint = read_checkpoint(folder)
    except CheckpointError:
        return
    assert isinstance(checkpoint, Checkpoint)
    assert checkpoint.weights["embed"].numpy().shape == (128, 64)


MEASURE = """
import resource
from pathlib import Path
from export.safetensors_index import read_index
from export.family import Piece
from export.stored_weights import weight

stored, _ = read_index(Path({folder!r}))
tensor = weight(stored["embed"], Piece("embed"))
start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
size = sum(block.nbytes for block in tensor.blocks())
print(size, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start)
"""


def test_streaming_a_matrix_needs_the_memory_of_a_few_blocks(tmp_path):
    size = 2**28
    text = json.dumps({"embed": entry([2**16, 2**11], 0, size, "BF16")}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size)  # a sparse file: nothing is written
    root = Path(export.__file__).parent.parent
    output = subprocess.run(
        [sys.executable, "-c", MEASURE.format(folder=str(tmp_path))],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    read, grown = map(int, output.split())
    assert read == size
    assert grown < 6 * passes.streamed.BLOCK_BYTES // 1024  # kilobytes
