"""StateWindowPass: the kernels' own window of states; the CPU's have none to compare with."""

import pytest
from golden import assert_graph, check, parse, typed, unchanged
from onnx_ir.passes import PreconditionError

from passes.state_window import MAX_WINDOW, StateWindowPass

RULE = 'q_num_heads=1, kv_num_heads=2, scale=0.5, update_rule="gated_delta"'
RECURRENT = f"""
g (float[1,3,4] q, float[1,3,4] k, float[1,3,6] v, float[1,3,2] d, float[1,3,2] b,
    float[1,2,4,3] "past.0.recurrent")
    => (float[1,3,6] y, float[1,2,4,3] "present.0.recurrent") {{
    y0, "present.0.recurrent" = com.microsoft.LinearAttention<{RULE}>
        (q, k, v, "past.0.recurrent", d, b)
    y = Neg(y0)
}}
"""
WINDOW = f"""
g (float[1,3,4] q, float[1,3,4] k, float[1,3,6] v, float[1,3,2] d, float[1,3,2] b,
    float[3,1,2,4,3] "past.0.recurrent")
    => (float[1,3,6] y, float[3,1,2,4,3] "rows.0.recurrent") {{
    y0, "rows.0.recurrent" = com.microsoft.LinearAttention<{RULE}, state_window=3>
        (q, k, v, "past.0.recurrent", d, b)
    y = Neg(y0)
}}
"""
TAPS = "<float[2,1,4] taps = {1,2,3,4,5,6,7,8}>"
FORM = 'ndim=1, channels_last=1, activation="silu"'
CONV = f"""
g (float[1,3,2] x, float[1,3,2] "past.0.conv")
    => (float[1,3,2] y, float[1,3,2] "present.0.conv") {TAPS} {{
    y0, "present.0.conv" = com.microsoft.CausalConvWithState<{FORM}>
        (x, taps, , "past.0.conv")
    y = Neg(y0)
}}
"""
CONV_WINDOW = f"""
g (float[1,3,2] x, float[3,1,3,2] "past.0.conv")
    => (float[1,3,2] y, float[3,1,3,2] "rows.0.conv") {TAPS} {{
    y0, "rows.0.conv" = com.microsoft.CausalConvWithState<{FORM}, state_window=3>
        (x, taps, , "past.0.conv")
    y = Neg(y0)
}}
"""
BOTH = pytest.mark.parametrize(
    ("before", "after"), [(RECURRENT, WINDOW), (CONV, CONV_WINDOW)], ids=["recurrent", "conv"]
)


@BOTH
def test_the_states_of_all_rows_take_the_place_of_the_last(before, after):
    model, pass_ = typed(before), StateWindowPass(3)
    assert pass_(model).modified
    assert pass_.changes == 1
    check(model)
    assert_graph(model, after)


@BOTH
def test_a_second_run_changes_nothing(before, after):
    model, pass_ = typed(before), StateWindowPass(3)
    pass_(model)
    assert unchanged(pass_, model)


NEAR = {
    "a state that is no output": RECURRENT.replace('"present.0.recurrent"', "s").replace(
        ", float[1,2,4,3] s)", ")"
    ),
    "a state of another name": RECURRENT.replace("present.0.recurrent", "last.0.recurrent"),
    "no state at all": "g (float[1,3,2] x) => (float[1,3,2] y) { y = Neg(x) }",
}


@pytest.mark.parametrize("name", NEAR)
def test_near_misses_stay(name):
    assert unchanged(StateWindowPass(3), typed(NEAR[name]))


def test_a_convolution_that_gives_no_state_stays():
    text = """
    g (float[1,3,2] x, float[2,1,4] taps) => (float[1,3,2] y) {
        y = com.microsoft.CausalConvWithState<ndim=1, channels_last=1>(x, taps)
    }
    """
    assert unchanged(StateWindowPass(3), parse(text))


@pytest.mark.parametrize("text", [RECURRENT, CONV])
def test_another_number_of_rows_is_refused_and_nothing_is_changed(text):
    model = typed(text)
    with pytest.raises(PreconditionError, match="has 3 rows; the states of 4 are to be kept"):
        StateWindowPass(4)(model)
    assert_graph(model, text)


def test_a_state_that_is_computed_is_refused():
    text = RECURRENT.replace(
        '    y0, "present', '    s = Neg("past.0.recurrent")\n    y0, "present'
    )
    text = text.replace('v, "past.0.recurrent", d', "v, s, d")
    with pytest.raises(PreconditionError, match="does not take its state from a graph input"):
        StateWindowPass(3)(typed(text))


@pytest.mark.parametrize("rows", [0, MAX_WINDOW + 1])
def test_more_rows_than_kernels_keep_are_refused(rows):
    with pytest.raises(ValueError, match=f"{rows} rows: the kernels keep at most 8 states"):
        StateWindowPass(rows)
