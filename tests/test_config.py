import pytest
from checkpoint_cases import config_values, wrapped
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from artifacts import AttentionSpec, Fields, GdnSpec, LayerKind, ParseError
from export.config import parse_config

PUBLISHED = {
    "attention_bias": False,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 24,
    "num_hidden_layers": 64,
    "num_key_value_heads": 4,
    "output_gate_type": "swish",
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "tie_word_embeddings": False,
    "vocab_size": 248320,
    "eos_token_id": 248044,
}


def parse(values):
    return parse_config(Fields(values, "config.json"))


def spec_of(**changes):
    return parse(config_values(**changes)).spec


def test_the_published_27b_wrapper_gives_its_published_sizes():
    config = parse(wrapped(PUBLISHED, tie_word_embeddings=False, vision_config={}))
    spec = config.spec
    assert config.is_wrapped
    assert config.announced_head_layers == 1
    assert config.eos_token_ids == (248044,)
    assert spec.attention == AttentionSpec(
        query_heads=24, kv_heads=4, head_dim=256, rotary_dim=64, rope_theta=1e7
    )
    assert spec.gdn == GdnSpec(
        key_heads=16,
        value_heads=48,
        key_dim=128,
        value_dim=128,
        conv_kernel=4,
        output_gate="silu",
    )
    assert spec.gdn.conv_dim == 10240
    assert spec.layers_of(LayerKind.ATTENTION) == tuple(range(3, 64, 4))
    assert (spec.hidden_size, spec.intermediate_size, spec.vocab_size) == (5120, 17408, 248320)
    assert (spec.max_positions, spec.rms_norm_eps) == (262144, 1e-6)
    assert not spec.tied_embedding
    assert spec.head is None
    assert spec.family == "qwen3_5_text"


def test_the_family_defaults_stand_in_for_missing_keys():
    spec = spec_of(rope_parameters=None, head_dim=None, layer_types=None)
    assert spec.attention.rope_theta == 1e7
    assert spec.attention.head_dim == 256
    assert spec.attention.rotary_dim == 64
    assert spec.rms_norm_eps == 1e-6
    assert spec.layers == (LayerKind.GDN,) * 3 + (LayerKind.ATTENTION,)


def test_null_means_a_missing_key():
    values = config_values() | {"layer_types": None, "rope_parameters": None, "head_dim": None}
    values |= {"quantization_config": None, "rope_scaling": None, "num_experts": None}
    assert parse(values).spec == spec_of(rope_parameters=None, head_dim=None)


def test_rope_parameters_win_over_the_top_level():
    nested = {"rope_theta": 5.0, "partial_rotary_factor": 0.5}
    attention = spec_of(
        rope_parameters=nested, rope_theta=9.0, partial_rotary_factor=1.0
    ).attention
    assert (attention.rope_theta, attention.rotary_dim) == (5.0, 16)


def test_each_rope_key_is_looked_up_by_itself():
    attention = spec_of(
        rope_parameters={"rope_theta": 5.0}, rope_theta=9.0, partial_rotary_factor=1.0
    ).attention
    assert (attention.rope_theta, attention.rotary_dim) == (5.0, 32)
    attention = spec_of(rope_parameters=None, rope_theta=9).attention
    assert (attention.rope_theta, attention.rotary_dim) == (9.0, 8)


def test_the_interval_places_attention_layers_where_no_list_does():
    spec = spec_of(layer_types=None, full_attention_interval=2)
    assert [str(kind) for kind in spec.layers] == ["gdn", "attention"] * 2


def test_a_list_of_layer_types_wins_over_the_interval():
    spec = spec_of(layer_types=["full_attention"] * 4, full_attention_interval=2)
    assert spec.layers == (LayerKind.ATTENTION,) * 4
    assert spec.gdn is None


@pytest.mark.parametrize("outer", [True, False, None])
@pytest.mark.parametrize("inner", [True, False, None])
def test_tying_counts_at_either_level(outer, inner):
    levels = {} if outer is None else {"tie_word_embeddings": outer}
    config = parse(wrapped(config_values(tie_word_embeddings=inner), **levels))
    assert config.spec.tied_embedding is bool(outer or inner)


@pytest.mark.parametrize(
    ("stated", "built"),
    [(None, "silu"), ("silu", "silu"), ("swish", "silu"), ("sigmoid", "sigmoid")],
)
def test_the_output_gate_is_honoured(stated, built):
    assert spec_of(output_gate_type=stated).gdn.output_gate == built


def test_a_wrapped_text_config_needs_no_model_type():
    assert parse(wrapped(config_values(model_type=None))).spec.family == "qwen3_5_text"


def test_qwen3_next_is_a_family_of_its_own():
    config = parse(config_values(model_type="qwen3_next", num_nextn_predict_layers=1))
    assert config.spec.family == "qwen3_next"
    assert config.announced_head_layers == 1


@pytest.mark.parametrize(("eos", "ids"), [(None, ()), (3, (3,)), ([5, 3], (5, 3)), ([], ())])
def test_the_end_tokens_are_one_or_a_list(eos, ids):
    assert parse(config_values(eos_token_id=eos)).eos_token_ids == ids


def test_the_end_tokens_of_the_wrapper_come_first():
    assert parse(wrapped(config_values(), eos_token_id=1)).eos_token_ids == (1,)
    assert parse(wrapped(config_values())).eos_token_ids == (7,)


REFUSALS = [
    ({"model_type": "qwen4_exp"}, 'model_type is "qwen4_exp"; it must be one of qwen3_5,'),
    ({"model_type": "qwen3_5_moe_text"}, 'model_type is "qwen3_5_moe_text"'),
    ({"model_type": None}, "model_type is null; it must be one of qwen3_5, qwen3_5_text"),
    ({"model_type": 5}, "model_type is 5; it must be a string"),
    ({"model_type": "qwen3_5"}, "config.json: text_config is missing"),
    ({"quantization_config": {"bits": 4}}, "it must be absent: build from the unquantised"),
    ({"num_experts": 512}, "num_experts is 512; it must be 0: only dense"),
    ({"hidden_act": "gelu"}, 'hidden_act is "gelu"; it must be silu'),
    ({"attention_bias": True}, "attention_bias is true; it must be false"),
    ({"attn_output_gate": False}, "attn_output_gate is false; it must be true"),
    ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings is true"),
    (
        {"output_gate_type": "tanh"},
        'output_gate_type is "tanh"; it must be one of silu, swish',
    ),
    (
        {"rope_parameters": {"rope_type": "yarn", "factor": 4}},
        'rope_parameters.rope_type is "yarn"; it must be default',
    ),
    (
        {"rope_scaling": {"type": "linear", "factor": 4}},
        'rope_scaling.type is "linear"; it must be default',
    ),
    ({"num_attention_heads": 3}, "is 3; it must be a multiple of num_key_value_heads, 2"),
    ({"linear_num_value_heads": 5}, "is 5; it must be a multiple of linear_num_key_heads, 2"),
    (
        {"rope_parameters": {"partial_rotary_factor": 0.1}},
        "rope_parameters.partial_rotary_factor is 0.1; it must be such that an even number",
    ),
    (
        {"rope_parameters": None, "partial_rotary_factor": 0.01},
        "config.json: partial_rotary_factor is 0.01",
    ),
    ({"rope_parameters": {"partial_rotary_factor": 1.5}}, "is 1.5; it must be above zero and"),
    (
        {"rope_parameters": {"rope_theta": 10**400}},
        "it must be above zero and not above 1e+15",
    ),
    ({"rope_parameters": {"rope_theta": -(10**400)}}, "it must be above zero"),
    ({"rope_parameters": {"rope_theta": "1e7"}}, 'is "1e7"; it must be a number'),
    ({"rope_parameters": []}, "rope_parameters must be a JSON object, found []"),
    ({"num_hidden_layers": 1025}, "num_hidden_layers is 1025; it must be between 1 and 1024"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be between 1 and 1024"),
    ({"num_hidden_layers": 5}, "it must be as long as num_hidden_layers, 5; it has 4 entries"),
    (
        {"layer_types": ["sliding_attention"] * 4},
        "a list of linear_attention | full_attention",
    ),
    ({"layer_types": "full_attention"}, "it must be a list of strings"),
    (
        {"layer_types": None, "full_attention_interval": 0},
        "full_attention_interval is 0; it must be between 1 and 1024",
    ),
    ({"hidden_size": 2**20 + 1}, "hidden_size is 1048577; it must be between 1 and 1048576"),
    ({"hidden_size": 64.0}, "hidden_size is 64.0; it must be a whole number"),
    ({"hidden_size": True}, "hidden_size is true; it must be a whole number"),
    ({"hidden_size": None}, "config.json: hidden_size is missing"),
    ({"intermediate_size": -1}, "intermediate_size is -1; it must be between 1 and"),
    ({"vocab_size": 2**24 + 1}, "vocab_size is 16777217; it must be between 1 and 16777216"),
    ({"head_dim": 2**14 + 2}, "head_dim is 16386; it must be between 1 and 16384"),
    ({"linear_num_key_heads": None}, "linear_num_key_heads is missing"),
    (
        {"linear_conv_kernel_dim": 1},
        "linear_conv_kernel_dim is 1; it must be between 2 and 64",
    ),
    ({"max_position_embeddings": 2**31}, "max_position_embeddings is 2147483648"),
    ({"rms_norm_eps": 0}, "rms_norm_eps is 0; it must be above zero and not above 1"),
    ({"tie_word_embeddings": "yes"}, 'tie_word_embeddings is "yes"; it must be true or false'),
    ({"eos_token_id": 128}, "eos_token_id is 128; it must be token ids below vocab_size, 128"),
    ({"eos_token_id": ["a"]}, "eos_token_id is"),
    ({"mtp_num_hidden_layers": "one"}, 'mtp_num_hidden_layers is "one"'),
]


@pytest.mark.parametrize(("changes", "message"), REFUSALS)
def test_what_cannot_be_built_is_refused_where_it_stands(changes, message):
    with pytest.raises(ParseError) as refusal:
        parse(config_values(**changes))
    assert message in str(refusal.value)
    assert str(refusal.value).startswith("config.json")


def test_refusals_inside_a_wrapper_name_the_text_config():
    with pytest.raises(ParseError, match=r"config\.json: text_config\.num_experts is 8"):
        parse(wrapped(config_values(num_experts=8)))


def test_a_wrapper_may_not_be_quantised_either():
    with pytest.raises(ParseError, match=r"config\.json: quantization_config is"):
        parse(wrapped(config_values(), quantization_config={"quant_method": "fp8"}))


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, 1, 2, 3, 2**31, 2**63, 10**400, -(10**400)]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text("a1\0\ud800", max_size=4),
    st.sampled_from(["silu", "default", "qwen3_5", "qwen3_next", "full_attention"]),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["rope_type", "rope_theta", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a shared machine
@given(changes=st.dictionaries(st.sampled_from(sorted(PUBLISHED)), JSON, max_size=5))
def test_any_values_give_a_config_or_a_refusal(changes):
    try:
        config = parse(PUBLISHED | changes)
    except ParseError:
        return
    attention, gdn = config.spec.attention, config.spec.gdn
    assert attention.query_heads % attention.kv_heads == 0
    assert 0 < attention.rotary_dim <= attention.head_dim
    assert gdn is None or gdn.value_heads % gdn.key_heads == 0
