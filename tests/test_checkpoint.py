import hashlib
import json

import numpy as np
import pytest
from checkpoint_cases import (
    BF16,
    CONFIG,
    DECODER,
    DEMO,
    WEIGHTS,
    assert_weights,
    config_values,
    expected,
    fused,
    load_weights,
    one_file,
    random_weights,
    refusal,
    tied_config,
    tiny_config,
    wrapped,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from export.checkpoint import Checkpoint, read_checkpoint
from export.errors import CheckpointError, ExportError


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
