"""AcceptPass and GreedyTailPass: what stands, what is committed, what the host reads."""

import numpy as np
import pytest
from canonical import Run, assert_complete, tiny
from golden import assert_graph, check, parse, run, unchanged
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx_ir.passes import PreconditionError

from passes.accept import AcceptPass, GreedyTailPass
from passes.causal_padding import CausalPaddingPass
from passes.pin_shapes import PinShapesPass


def verify_text(k, words=3):
    """A verify whose logits and row states are given from outside."""
    m = k + 1
    shapes = f"float[1,{m},{words}] {{}}, float[1,{2 + m},1] {{}}, float[{m},1,1,1,2] {{}}"
    return f"""
    g (int64[1,{m}] input_ids, int32[1] past_length, int32[1] draft_count,
       {shapes.format("l", "c", "r")})
        => ({shapes.format("logits", '"rows.0.conv"', '"rows.0.recurrent"')})
    {{
        logits = Identity(l)
        "rows.0.conv" = Identity(c)
        "rows.0.recurrent" = Identity(r)
    }}
    """


AFTER = """
g (int64[1,2] input_ids, int32[1] past_length, int32[1] draft_count,
   float[1,2,3] l, float[1,4,1] c, float[2,1,1,1,2] r)
    => (float[1,2,3] logits, float[1,2,1] "present.0.conv",
        float[1,1,1,2] "present.0.recurrent", int64[1,2] best,
        int64[1] accepted, int64[1,1] next_token, int32[1] next_length, int64[6] result)
{
    logits = Identity(l)
    conv = Identity(c)
    recurrent = Identity(r)
    best = ArgMax<axis=2, keepdims=0>(logits)
    a = Constant<value = int64[1] {1}>()
    b = Constant<value = int64[1] {2}>()
    d = Constant<value = int64[1] {1}>()
    drafts = Slice(input_ids, a, b, d)
    e = Constant<value = int64[1] {0}>()
    f = Constant<value = int64[1] {1}>()
    h = Constant<value = int64[1] {1}>()
    before = Slice(best, e, f, h)
    row = Constant<value = int32[1,1] {0}>()
    counts = Less(row, draft_count)
    equal = Equal(drafts, before)
    right = And(equal, counts)
    right32 = Cast<to=6>(right)
    i = Constant<value = int64 {1}>()
    running = CumSum(right32, i)
    all = Constant<value = int32[1,1] {1}>()
    stands = Equal(running, all)
    stands32 = Cast<to=6>(stands)
    j = Constant<value = int64[1] {1}>()
    total = ReduceSum<keepdims=0>(stands32, j)
    accepted = Cast<to=7>(total)
    n = Constant<value = int64[1] {0}>()
    count = Squeeze(accepted, n)
    o = Constant<value = int64[2] {1, 2}>()
    columns = Add(count, o)
    "present.0.conv" = Gather<axis=1>(conv, columns)
    "present.0.recurrent" = Gather<axis=0>(recurrent, count)
    next_token = Gather<axis=1>(best, accepted)
    p = Constant<value = int64[1] {1}>()
    more = Add(accepted, p)
    more32 = Cast<to=6>(more)
    next_length = Add(past_length, more32)
    q = Constant<value = int64[1] {-1}>()
    flat = Reshape(best, q)
    at = Constant<value = int64[1] {2}>()
    deep = Unsqueeze(best, at)
    peak = GatherElements<axis=2>(logits, deep)
    zero = Constant<value = float[1] {0}>()
    gap = Sub(peak, peak)
    number = Equal(gap, zero)
    number64 = Cast<to=7>(number)
    flatly = Constant<value = int64[1] {-1}>()
    finite = Reshape(number64, flatly)
    length64 = Cast<to=7>(next_length)
    result = Concat<axis=0>(accepted, length64, flat, finite)
}
"""


def test_a_verify_gets_its_end_inside_the_graph():
    model, pass_ = parse(verify_text(1)), AcceptPass(2)
    check(model)
    assert pass_(model).modified
    assert pass_.changes == 3  # two states and the tail
    assert_graph(model, AFTER)
    assert_complete(model)


def test_second_run_changes_nothing():
    for model, pass_ in (
        (parse(verify_text(2)), AcceptPass(3)),
        (parse(GREEDY), GreedyTailPass()),
    ):
        pass_(model)
        assert unchanged(pass_, model)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_count_is_that_of_a_plain_loop(data):
    k = data.draw(st.sampled_from([1, 2, 3, 7]))
    words = data.draw(st.sampled_from([2, 3]))
    m, rng = k + 1, np.random.default_rng(data.draw(st.integers(0, 2**32)))
    count = data.draw(st.integers(-1, k + 1))
    logits = rng.integers(0, 4, (1, m, words)).astype(np.float32)  # ties are common
    best = logits.argmax(-1)
    ids = rng.integers(0, words, (1, m))
    right = data.draw(st.integers(0, k))
    ids[0, 1 : 1 + right] = best[0, :right]
    want = 0
    while want < min(max(count, 0), k) and ids[0, want + 1] == best[0, want]:
        want += 1
    states = {
        "c": rng.standard_normal((1, 2 + m, 1)).astype(np.float32),
        "r": rng.standard_normal((m, 1, 1, 1, 2)).astype(np.float32),
    }
    feeds = {"past_length": np.array([9], np.int32), "l": logits, "input_ids": ids, **states}
    got = _verify(k, words)(feeds | {"draft_count": np.array([count], np.int32)})
    assert got["accepted"] == [want]
    np.testing.assert_array_equal(got["best"], best)
    np.testing.assert_array_equal(got["next_token"], best[:, want : want + 1])
    np.testing.assert_array_equal(got["next_length"], [9 + want + 1])
    np.testing.assert_array_equal(got["result"], [want, 9 + want + 1, *best[0], *[1] * m])
    np.testing.assert_array_equal(got["present.0.conv"], states["c"][:, want + 1 : want + 3])
    np.testing.assert_array_equal(got["present.0.recurrent"], states["r"][want])


VERIFIES = {}


def _verify(k, words):
    if (k, words) not in VERIFIES:
        model = parse(verify_text(k, words))
        AcceptPass(k + 1)(model)
        VERIFIES[k, words] = Run(model)
    return VERIFIES[k, words]


@pytest.mark.parametrize("rows", [-1, 0, 1])
def test_a_verify_of_fewer_than_two_rows_is_refused(rows):
    with pytest.raises(ValueError, match=f"at least 2 rows, not {rows}; use GreedyTailPass"):
        AcceptPass(rows)


def test_a_graph_of_other_rows_is_refused():
    model = parse(verify_text(2))
    with pytest.raises(PreconditionError, match=r"input_ids is \[1,3\] .* of 4 rows"):
        AcceptPass(4)(model)
    names = [v.name for v in model.graph.outputs]
    assert names == ["logits", "rows.0.conv", "rows.0.recurrent"]


@pytest.mark.parametrize("name", ["input_ids", "past_length", "draft_count"])
def test_a_missing_input_is_named(name):
    model = parse(verify_text(1).replace(f" {name}", f" other_{name}"))
    with pytest.raises(PreconditionError, match=f"no input '{name}'; there are"):
        AcceptPass(2)(model)


def test_states_after_the_last_row_are_refused():
    graph = tiny().target_graph(20)
    PinShapesPass({"S": 3, "C": 20})(graph)
    CausalPaddingPass(3)(graph)
    with pytest.raises(
        PreconditionError, match=r"'present\.0\.conv' is the state after the l"
    ):
        AcceptPass(3)(graph)


GREEDY = """
g (float[1,1,3] l, int32[1] past_length) => (float[1,1,3] logits, int32[1] used) {
    one = Constant<value = int32[1] {1}>()
    n = Add(past_length, one)
    last_row = Sub(n, one)
    used = Neg(last_row)
    logits = Identity(l)
}
"""
GREEDY_AFTER = """
g (float[1,1,3] l, int32[1] past_length)
    => (float[1,1,3] logits, int32[1] used, int64[1,1] best, int64[1] accepted,
        int64[1,1] next_token, int32[1] next_length, int64[4] result) {
    one = Constant<value = int32[1] {1}>()
    n = Add(past_length, one)
    last_row = Sub(n, one)
    used = Neg(last_row)
    logits = Identity(l)
    best = ArgMax<axis=2, keepdims=0>(logits)
    a = Constant<value = int64[1] {0}>()
    flat = Squeeze(best, a)
    b = Constant<value = int64[1] {0}>()
    accepted = Mul(flat, b)
    c = Constant<value = int32[1] {1}>()
    next_length = Add(last_row, c)
    next_token = Identity(best)
    d = Constant<value = int64[1] {-1}>()
    again = Reshape(best, d)
    at = Constant<value = int64[1] {2}>()
    deep = Unsqueeze(best, at)
    peak = GatherElements<axis=2>(logits, deep)
    zero = Constant<value = float[1] {0}>()
    gap = Sub(peak, peak)
    number = Equal(gap, zero)
    number64 = Cast<to=7>(number)
    flatly = Constant<value = int64[1] {-1}>()
    finite = Reshape(number64, flatly)
    long = Cast<to=7>(next_length)
    result = Concat<axis=0>(accepted, long, again, finite)
}
"""


def test_a_greedy_graph_gets_the_same_outputs():
    model, pass_ = parse(GREEDY), GreedyTailPass()
    assert pass_(model).modified
    assert_graph(model, GREEDY_AFTER)
    assert_complete(model)
    logits = np.array([[[1, 5, 5]]], np.float32)
    got = run(model, l=logits, past_length=np.array([6], np.int32))
    assert got["best"].tolist() == got["next_token"].tolist() == [[1]]
    assert got["accepted"].tolist() == [0]
    assert got["next_length"].tolist() == [7]
    assert got["result"].tolist() == [0, 7, 1, 1]


def test_a_greedy_tail_over_more_rows_is_refused():
    model = parse(GREEDY.replace("float[1,1,3]", "float[1,S,3]"))
    with pytest.raises(
        PreconditionError, match=r"logits is \[1,S,3\]; a greedy tail takes one"
    ):
        GreedyTailPass()(model)


def test_a_graph_without_last_row_is_refused():
    model = parse(GREEDY.replace("last_row", "final_row"))
    with pytest.raises(PreconditionError, match="computes no last_row"):
        GreedyTailPass()(model)


@pytest.mark.parametrize("worst", [np.nan, np.inf])
def test_a_row_whose_highest_logit_is_no_number_is_told(worst):
    logits = np.zeros((1, 3, 2), np.float32)
    logits[0, 1] = worst
    states = {"c": np.zeros((1, 5, 1), np.float32), "r": np.zeros((3, 1, 1, 1, 2), np.float32)}
    feeds = {"past_length": np.array([9], np.int32), "l": logits, **states}
    ids = {"input_ids": np.zeros((1, 3), np.int64), "draft_count": np.array([2], np.int32)}
    assert _verify(2, 2)(feeds | ids)["result"][-3:].tolist() == [1, 0, 1]
