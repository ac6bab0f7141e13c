"""KeepRowStatesPass: the state after every row, bit for bit that of one row at a time."""

import numpy as np
import pytest
from canonical import Run, assert_complete, tiny
from golden import assert_graph, check, parse, run, unchanged
from onnx_ir.passes import PreconditionError

from passes.contrib import infer_outputs
from passes.pin_shapes import PinShapesPass
from passes.row_states import KeepRowStatesPass

ATTRIBUTES = 'q_num_heads=1, kv_num_heads=2, scale=0.5, update_rule="gated_delta"'
RECURRENT_IN = """float[1,2,4] q, float[1,2,4] k, float[1,2,6] v, float[1,2,2] decay,
    float[1,2,2] beta, float[1,2,4,3] "past.0.recurrent\""""
RECURRENT = f"""
g ({RECURRENT_IN}) => (float[1,2,6] y, float[1,2,4,3] "present.0.recurrent")
{{
    y0, "present.0.recurrent" = com.microsoft.LinearAttention<{ATTRIBUTES}>
        (q, k, v, "past.0.recurrent", decay, beta)
    y = Neg(y0)
}}
"""
ROWS = f"""
g ({RECURRENT_IN}) => (float[1,2,6] y, float[2,1,2,4,3] "rows.0.recurrent")
{{
    sizes = Constant<value_ints = [1, 1]>()
    q0, q1 = Split<axis=1>(q, sizes)
    k0, k1 = Split<axis=1>(k, sizes)
    v0, v1 = Split<axis=1>(v, sizes)
    d0, d1 = Split<axis=1>(decay, sizes)
    b0, b1 = Split<axis=1>(beta, sizes)
    y0, s0 = com.microsoft.LinearAttention<{ATTRIBUTES}>
        (q0, k0, v0, "past.0.recurrent", d0, b0)
    y1, s1 = com.microsoft.LinearAttention<{ATTRIBUTES}>(q1, k1, v1, s0, d1, b1)
    y01 = Concat<axis=1>(y0, y1)
    y = Neg(y01)
    new0 = Constant<value_ints = [0]>()
    r0 = Unsqueeze(s0, new0)
    new1 = Constant<value_ints = [0]>()
    r1 = Unsqueeze(s1, new1)
    "rows.0.recurrent" = Concat<axis=0>(r0, r1)
}}
"""
CONV_TAPS = "<float[3,1,4] taps = {1,2,3,4,5,6,7,8,9,10,11,12}>"
CONV_ATTRIBUTES = "ndim=1, channels_last=1"
CONV = f"""
g (float[1,2,3] x, float[1,3,3] "past.0.conv")
    => (float[1,2,3] y, float[1,3,3] "present.0.conv") {CONV_TAPS}
{{
    y, "present.0.conv" = com.microsoft.CausalConvWithState<{CONV_ATTRIBUTES}>
        (x, taps, , "past.0.conv")
}}
"""
WINDOW = f"""
g (float[1,2,3] x, float[1,3,3] "past.0.conv")
    => (float[1,2,3] y, float[1,5,3] "rows.0.conv") {CONV_TAPS}
{{
    y, last = com.microsoft.CausalConvWithState<{CONV_ATTRIBUTES}>(x, taps, , "past.0.conv")
    "rows.0.conv" = Concat<axis=1>("past.0.conv", x)
}}
"""


def typed(text):
    model = parse(text)
    for node in model.graph:
        if node.domain == "com.microsoft":
            infer_outputs(node)
    check(model)
    return model


@pytest.mark.parametrize(("before", "after"), [(RECURRENT, ROWS), (CONV, WINDOW)])
def test_states_of_all_rows_take_the_place_of_the_last(before, after):
    model, pass_ = typed(before), KeepRowStatesPass(2)
    assert pass_(model).modified
    assert pass_.changes == 1
    assert_graph(model, after)
    assert_complete(model)


@pytest.mark.parametrize("before", [RECURRENT, CONV])
def test_second_run_changes_nothing(before):
    model, pass_ = typed(before), KeepRowStatesPass(2)
    pass_(model)
    assert unchanged(pass_, model)


def test_a_graph_without_recurrent_nodes_is_left():
    model = parse("g (float[1,2,3] x) => (float[1,2,3] y) { y = Neg(x) }")
    assert unchanged(KeepRowStatesPass(2), model)


def test_an_operator_of_the_same_name_elsewhere_is_left():
    """ONNX has a LinearAttention of its own, which this project does not write."""
    text = RECURRENT.replace("com.microsoft.", "elsewhere.")
    model = parse(text)
    assert unchanged(KeepRowStatesPass(2), model)


def test_recurrent_states_are_those_of_one_row_at_a_time_bit_for_bit():
    rng = np.random.default_rng(0)
    shapes = {"q": 4, "k": 4, "v": 6, "decay": 2, "beta": 2}
    feeds = {n: rng.standard_normal((1, 2, w)).astype(np.float32) for n, w in shapes.items()}
    feeds["decay"] = -np.abs(feeds["decay"])
    past = {"past.0.recurrent": rng.standard_normal((1, 2, 4, 3)).astype(np.float32)}
    model = typed(RECURRENT)
    want = run(model, **feeds, **past)
    KeepRowStatesPass(2)(model)
    got = run(model, **feeds, **past)
    np.testing.assert_array_equal(got["y"], want["y"])
    np.testing.assert_array_equal(got["rows.0.recurrent"][1], want["present.0.recurrent"])
    # NumPy's own gated delta rule, row by row
    state = past["past.0.recurrent"][0].astype(np.float64)
    for row in range(2):
        q, k, v, g, b = (feeds[n][0, row].astype(np.float64) for n in shapes)
        state = state * np.exp(g)[:, None, None]
        delta = (v.reshape(2, 3) - np.einsum("hkv,k->hv", state, k)) * b[:, None]
        state = state + k[None, :, None] * delta[:, None, :]
        out = np.einsum("hkv,k->hv", state, q * 0.5).reshape(-1)
        np.testing.assert_allclose(got["rows.0.recurrent"][row, 0], state, atol=1e-5)
        np.testing.assert_allclose(-got["y"][0, row], out, atol=1e-5)


def test_a_window_of_the_kept_columns_is_the_state_after_each_row():
    rng = np.random.default_rng(1)
    feeds = {
        "x": rng.standard_normal((1, 2, 3)).astype(np.float32),
        "past.0.conv": rng.standard_normal((1, 3, 3)).astype(np.float32),
    }
    model = typed(CONV)
    want = run(model, **feeds)
    KeepRowStatesPass(2)(model)
    got = run(model, **feeds)
    columns = np.concatenate([feeds["past.0.conv"], feeds["x"]], axis=1)
    np.testing.assert_array_equal(got["y"], want["y"])
    np.testing.assert_array_equal(got["rows.0.conv"], columns)
    np.testing.assert_array_equal(want["present.0.conv"], columns[:, 2:5])


CLASHES = {
    "other rows": (RECURRENT, "2 rows; the states of 3", 3),
    "other rows of a convolution": (CONV, "2 rows; the states of 3", 3),
    "state that is no output": (
        RECURRENT.replace(', float[1,2,4,3] "present.0.recurrent")', ")"),
        "must be an output that no other node reads",
        2,
    ),
    "state that is read": (
        RECURRENT.replace("float[1,2,6] y,", "float[1,2,6] y, float[1,2,4,3] z,").replace(
            "y = Neg(y0)", 'y = Neg(y0) z = Neg("present.0.recurrent")'
        ),
        "must be an output that no other node reads",
        2,
    ),
    "state that is no input": (
        RECURRENT.replace("y0, ", 'p = Neg("past.0.recurrent") y0, ').replace(
            '(q, k, v, "past.0.recurrent"', "(q, k, v, p"
        ),
        "must be an input named past",
        2,
    ),
    "no state before": (CONV.replace('taps, , "past.0.conv")', "taps)"), "no input 3", 2),
    "no decay": (RECURRENT.replace(", decay, beta)", ", , beta)"), "no input 4", 2),
}


@pytest.mark.parametrize(("text", "said", "rows"), CLASHES.values(), ids=CLASHES)
def test_what_cannot_be_kept_is_refused_before_anything_changes(text, said, rows):
    model = parse(text)
    before = list(model.graph)
    with pytest.raises(PreconditionError, match=said):
        KeepRowStatesPass(rows)(model)
    assert list(model.graph) == before
    assert not [v for v in model.graph.outputs if v.name.startswith("rows.")]


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_states_of_a_random_target_are_the_oracles_after_each_row(rows):
    checkpoint = tiny(seed=2)
    ids, more = [5, 9, 100, 3, 7], np.random.default_rng(2).integers(0, 128, rows).tolist()
    graph = checkpoint.target_graph(40)
    first = Run(graph)
    feeds = {"input_ids": np.array([ids]), "past_length": np.zeros(1, np.int32)}
    out = first(feeds | first.zeros(40))
    states = {n.replace("present", "past"): v for n, v in out.items() if "present" in n}
    PinShapesPass({"S": rows, "C": 40})(graph)
    KeepRowStatesPass(rows)(graph)
    assert_complete(graph)
    feeds = {"input_ids": np.array([more]), "past_length": np.array([5], np.int32)}
    out = Run(graph)(feeds | states)
    cache = checkpoint.model.new_cache()
    checkpoint.model.forward(ids, cache, 0)
    snaps = checkpoint.model.forward(more, cache, len(ids))["snaps"]
    for layer in (0, 1, 2):
        for row in range(rows):
            window = out[f"rows.{layer}.conv"][0, row + 1 : row + 4]
            np.testing.assert_allclose(window.T, snaps[layer][row].conv, atol=2e-4)
            state = out[f"rows.{layer}.recurrent"][row, 0]
            np.testing.assert_allclose(state, snaps[layer][row].S, atol=2e-4)
