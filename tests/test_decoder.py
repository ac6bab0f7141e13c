"""The canonical target against the NumPy oracle."""

import dataclasses

import numpy as np
import onnx_ir as ir
import pytest
from canonical import Run, assert_complete, attach, demo, greedy_cases, tiny

from artifacts import LayerKind
from export.decoder import build_target, rotary_table

ROWS = 96
TOLERANCE = 2e-4  # float32 sums in another order; the oracle is as far from transformers


def states_of(cache, config, rows):
    """The oracle's states under the names and layouts of the graph."""
    out = {}
    for i, kind in enumerate(config.layer_types):
        if kind == "full_attention":
            out[f"present.{i}.key"] = cache[i].k[:rows].transpose(1, 0, 2)[None]
            out[f"present.{i}.value"] = cache[i].v[:rows].transpose(1, 0, 2)[None]
        else:
            out[f"present.{i}.conv"] = cache[i].conv.T[None]
            out[f"present.{i}.recurrent"] = cache[i].S[None]
    return out


def forward(run, ids, states, length):
    feeds = {"input_ids": np.array([ids]), "past_length": np.array([length], np.int32)}
    out = run(feeds | states)
    return out, {
        name.replace("present.", "past."): value
        for name, value in out.items()
        if name.startswith("present.")
    }


def in_chunks(run, ids, size):
    """Logits and hidden of all rows, states after the last."""
    states, logits, hidden = run.zeros(ROWS), [], []
    for start in range(0, len(ids), size):
        out, states = forward(run, ids[start : start + size], states, start)
        logits.append(out["logits"][0])
        hidden.append(out["hidden"][0])
    return np.concatenate(logits), np.concatenate(hidden), states


def check_states(states, want, rows):
    for name, value in want.items():
        got = states[name.replace("present.", "past.")]
        if name.endswith((".key", ".value")):
            got = got[:, :, :rows]
        np.testing.assert_allclose(got, value, rtol=0, atol=TOLERANCE, err_msg=name)


@pytest.fixture(scope="module")
def trained():
    return Run(demo().target_graph(ROWS))


SHAPES = {
    "r=3, untied": {},
    "tied, r=1": {"tie_word_embeddings": True, "linear_num_value_heads": 2},
    "attention first": {"layer_types": ("full_attention", "linear_attention") * 2},
    "two taps": {"linear_conv_kernel_dim": 2},
    "two words": {"vocab_size": 2},
}


@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES)
def test_random_targets_give_what_the_oracle_gives(sizes):
    sizes = {"num_hidden_layers": 4, **sizes}
    checkpoint = tiny(seed=1, **sizes)
    graph = checkpoint.target_graph(ROWS)
    assert_complete(graph)
    ids = np.random.default_rng(0).integers(0, checkpoint.config.vocab_size, 23).tolist()
    cache = checkpoint.model.new_cache()
    want = checkpoint.model.forward(ids, cache, 0)
    for size in (23, 1, 5):
        logits, hidden, states = in_chunks(Run(graph), ids, size)
        np.testing.assert_allclose(logits, want["logits"], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(hidden, want["hidden"], rtol=0, atol=TOLERANCE)
        check_states(states, states_of(cache, checkpoint.config, 23), 23)


@pytest.mark.parametrize("case", range(3))
def test_the_trained_target_gives_logits_hidden_and_states_of_the_oracle(trained, case):
    ids, model = greedy_cases()[case]["prompt_ids"], demo().model
    cache = model.new_cache()
    want = model.forward(ids, cache, 0)
    for size in (len(ids), 64, 7, 1):
        logits, hidden, states = in_chunks(trained, ids, size)
        np.testing.assert_allclose(logits, want["logits"], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(hidden, want["hidden"], rtol=0, atol=TOLERANCE)
        check_states(states, states_of(cache, demo().config, len(ids)), len(ids))


@pytest.mark.parametrize("case", range(3))
def test_the_trained_target_continues_as_transformers_did(trained, case):
    stored = greedy_cases()[case]
    ids, tokens = stored["prompt_ids"], []
    out, states = forward(trained, ids, trained.zeros(ROWS), 0)
    for length in range(len(ids), len(ids) + len(stored["output_ids"])):
        tokens.append(int(out["logits"][0, -1].argmax()))
        out, states = forward(trained, tokens[-1:], states, length)
    assert tokens == stored["output_ids"]


def test_what_stands_behind_the_length_is_never_read(trained):
    ids = greedy_cases()[0]["prompt_ids"]
    clean, _ = forward(trained, ids, trained.zeros(ROWS), 0)
    states = trained.zeros(ROWS)
    for name in states:
        if name.endswith((".key", ".value")):
            states[name][...] = np.nan
    dirty, _ = forward(trained, ids, states, 0)
    np.testing.assert_array_equal(dirty["logits"], clean["logits"])


def test_the_signature_is_the_contract():
    checkpoint = tiny()
    graph = checkpoint.target_graph(ROWS).graph
    c = checkpoint.config
    ports = {}
    for i, kind in enumerate(c.layer_types):
        if kind == "full_attention":
            cache = f"FLOAT[1,{c.num_key_value_heads},C,{c.head_dim}]"
            ports |= {f"{i}.key": cache, f"{i}.value": cache}
        else:
            ports[f"{i}.conv"] = f"FLOAT[1,{c.linear_conv_kernel_dim - 1},{c.conv_dim}]"
            heads, dk, dv = (
                c.linear_num_value_heads,
                c.linear_key_head_dim,
                c.linear_value_head_dim,
            )
            ports[f"{i}.recurrent"] = f"FLOAT[1,{heads},{dk},{dv}]"

    def shown(values):
        return {value.name: f"{value.dtype}{value.shape}" for value in values}

    assert shown(graph.inputs) == {
        "input_ids": "INT64[1,S]",
        "past_length": "INT32[1]",
        **{f"past.{name}": shape for name, shape in ports.items()},
    }
    assert shown(graph.outputs) == {
        "logits": f"FLOAT[1,S,{c.vocab_size}]",
        "hidden": f"FLOAT[1,S,{c.hidden_size}]",
        **{f"present.{name}": shape for name, shape in ports.items()},
    }


def test_half_precision_keeps_the_recurrence_in_float32():
    graph = build_target(tiny().spec, dtype=ir.DataType.FLOAT16, cache_rows=8).graph
    for node in graph:
        if node.op_type in ("CausalConvWithState", "LinearAttention", "LinearAttentionGate"):
            assert {v.dtype for v in node.inputs if v is not None} == {ir.DataType.FLOAT}
    kinds = {v.name: v.dtype for v in graph.inputs}
    assert kinds["past.0.recurrent"] == kinds["past.0.conv"] == ir.DataType.FLOAT
    assert kinds["past.3.key"] == ir.DataType.FLOAT16
    assert {graph.outputs[0].dtype, graph.outputs[1].dtype} == {ir.DataType.FLOAT16}


def test_the_rotary_table_is_cosine_and_sine_of_position_times_frequency():
    spec = dataclasses.replace(tiny().spec.attention, rotary_dim=16, rope_theta=100.0)
    cos, sin = rotary_table(spec, 5)
    for position in range(5):
        for pair in range(8):
            angle = position / 100.0 ** (2 * pair / 16)
            assert cos[position, pair] == pytest.approx(np.cos(angle), abs=1e-7)
            assert sin[position, pair] == pytest.approx(np.sin(angle), abs=1e-7)


@pytest.mark.parametrize("rotary", [0, 8, 40, 48])
def test_a_rotary_width_that_the_kernel_cannot_turn_is_refused(rotary):
    attention = dataclasses.replace(tiny().spec.attention, rotary_dim=rotary)
    spec = dataclasses.replace(tiny().spec, attention=attention)
    with pytest.raises(ValueError, match=rf"rotary_dim = {rotary}.*multiple of 16.*32"):
        build_target(spec, dtype=ir.DataType.FLOAT, cache_rows=8)


def test_a_model_without_attention_is_refused():
    spec = dataclasses.replace(tiny().spec, layers=(LayerKind.GDN, LayerKind.GDN))
    with pytest.raises(ValueError, match="no attention layer"):
        build_target(spec, dtype=ir.DataType.FLOAT, cache_rows=8)


def test_building_twice_gives_the_same_bytes():
    first, second = (
        ir.to_proto(attach(tiny().target_graph(8), {})).SerializeToString(deterministic=True)
        for _ in range(2)
    )
    assert first == second
