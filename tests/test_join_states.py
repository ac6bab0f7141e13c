"""States of convolutions written together, once all of them were read."""

import numpy as np
import pytest
from golden import assert_graph, check, parse, run, typed, unchanged
from onnx_ir.passes import PreconditionError

from passes.join_states import CommitConvStatesPass, JoinConvStatesPass

TAPS = "<float[2,1,4] taps = {1,2,3,4,5,6,7,8}>"
CONV = "com.microsoft.CausalConvWithState<ndim=1, channels_last=1>"
IN = 'float[1,S,2] x, float[1,3,2] "past.0.conv", float[1,3,2] "past.2.conv", int64[1] n'
INNER = f"""
    y0, FIRST = {CONV}(x, taps, , "past.0.conv")
    y, SECOND = {CONV}(y0, taps, , "past.2.conv")
    accepted = Identity(n)
"""
BEFORE = f"""
g ({IN}) => (float[1,S,2] y, float[1,3,2] "present.0.conv", float[1,3,2] "present.2.conv",
    int64[1] accepted) {TAPS} {{
    {INNER.replace("FIRST", '"present.0.conv"').replace("SECOND", '"present.2.conv"')}
}}
"""
COMMITTED = f"""
g ({IN}, float[2,4,3,2] "rows.conv") => (float[1,S,2] y, float[1,3,2] "rows.0.conv",
    float[1,3,2] "rows.2.conv", int64[1] accepted, float[2,3,2] "present.conv") {TAPS} {{
    {INNER.replace("FIRST", '"rows.0.conv"').replace("SECOND", '"rows.2.conv"')}
    axes = Constant<value_ints: ints = [0]>()
    count = Squeeze(accepted, axes)
    "present.conv" = Gather<axis: int = 1>("rows.conv", count)
}}
"""
JOINED = f"""
g ({IN}) => (float[1,S,2] y, int64[1] accepted, float[2,3,2] "present.conv") {TAPS} {{
    {INNER.replace("FIRST", "s0").replace("SECOND", "s2")}
    "present.conv" = Concat<axis: int = 0>(s0, s2)
}}
"""
CASES = pytest.mark.parametrize(
    ("pass_", "after"),
    [(CommitConvStatesPass(4), COMMITTED), (JoinConvStatesPass(), JOINED)],
    ids=["commit", "join"],
)


@CASES
def test_states_of_all_layers_become_one_output(pass_, after):
    model = typed(BEFORE)
    assert pass_(model).modified
    assert pass_.changes == 2
    check(model)
    assert_graph(model, after)


@CASES
def test_a_second_run_changes_nothing(pass_, after):
    model = typed(BEFORE)
    pass_(model)
    assert unchanged(pass_, model)


@pytest.mark.parametrize("accepted", [0, 3])
def test_what_is_committed_is_the_accepted_row_of_the_view(accepted):
    model = typed(BEFORE)
    CommitConvStatesPass(4)(model)
    rng = np.random.default_rng(0)
    shapes = {"x": (1, 1, 2), "past.0.conv": (1, 3, 2), "past.2.conv": (1, 3, 2)}
    shapes |= {"rows.conv": (2, 4, 3, 2)}
    feeds = {n: rng.standard_normal(shape).astype(np.float32) for n, shape in shapes.items()}
    got = run(model, **feeds, n=np.array([accepted]))
    np.testing.assert_array_equal(got["present.conv"], feeds["rows.conv"][:, accepted])
    window = np.concatenate([feeds["past.0.conv"], feeds["x"]], axis=1)
    np.testing.assert_array_equal(got["rows.0.conv"], window[:, 1:])


@pytest.mark.parametrize("pass_", [CommitConvStatesPass(4), JoinConvStatesPass()])
def test_states_of_another_kind_or_name_stay(pass_):
    text = BEFORE.replace("present.0.conv", "rows.0.conv").replace("present.2", "rows.2")
    assert unchanged(pass_, typed(text))


def test_recurrent_states_stay():
    text = 'g (float[1,3] x) => (float[1,3] "present.0.recurrent") {\n' \
           '    "present.0.recurrent" = Neg(x)\n}'  # fmt: skip
    assert unchanged(CommitConvStatesPass(4), parse(text))


def test_a_convolution_that_gives_no_state_stays():
    text = f"g (float[1,3,2] x, float[2,1,4] t) => (float[1,3,2] y) {{ y = {CONV}(x, t) }}"
    assert unchanged(JoinConvStatesPass(), parse(text))


def test_without_an_accepted_count_the_commit_is_refused_and_nothing_is_changed():
    text = BEFORE.replace(",\n    int64[1] accepted)", ")").replace(
        "accepted = Identity(n)", ""
    )
    model = typed(text)
    with pytest.raises(PreconditionError, match="has no output 'accepted'; there are y"):
        CommitConvStatesPass(4)(model)
    assert_graph(model, text)
