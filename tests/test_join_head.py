"""JoinHeadPass: one prefill fills the target's caches and the head's."""

import numpy as np
import pytest
from canonical import (
    Run,
    assert_complete,
    assert_in_place_order,
    demo,
    greedy_cases,
    prefill_graph,
    tiny,
)
from golden import assert_graph, check, parse, unchanged
from onnx_ir.passes import PreconditionError

from passes.join_head import JoinHeadPass
from passes.last_row import LastRowPass

SHARED = "float[3,2] embed = {1, 2, 3, 4, 5, 6}"
TARGET = f"""
g (int64[1,S] input_ids, int32[1] past_length, int32[1] n) => (float[1,S,2] hidden) <{SHARED}>
{{
    last_row = Add(past_length, n)
    hidden = Gather(embed, input_ids)
}}
"""
HEAD = f"""
head (int64[1,S] next_ids, float[1,S,2] hidden, int32[1] past_length,
      float[1,C,2] "past.0.key")
    => (float[1,S,2] logits, float[1,C,2] "present.0.key")
<{SHARED}, float[2] w = {{1, 2}}, float[2] unused = {{1, 2}}>
{{
    one = Constant<value = int32[1] {{1}}>()
    last_row = Sub(past_length, one)
    e = Gather(embed, next_ids)
    sum = Add(e, hidden)
    float = Cast<to=1>(last_row)
    u = Mul(sum, w)
    s = ReduceSum(u)
    t = Add(s, float)
    "present.0.key" = Add("past.0.key", t)
    logits = Mul(u, unused)
}}
"""
JOINED = f"""
g (int64[1,S] input_ids, int32[1] past_length, int32[1] n, int64[1,S] next_ids,
   float[1,C,2] "head.past.0.key")
    => (float[1,S,2] hidden, float[1,C,2] "head.present.0.key")
<{SHARED}, float[2] w = {{1, 2}}>
{{
    last_row = Add(past_length, n)
    hidden = Gather(embed, input_ids)
    e = Gather(embed, next_ids)
    sum = Add(e, hidden)
    float = Cast<to=1>(last_row)
    u = Mul(sum, w)
    s = ReduceSum(u)
    t = Add(s, float)
    "head.present.0.key" = Add("head.past.0.key", t)
}}
"""


def test_the_head_is_appended_without_what_only_its_logits_need():
    target, head = parse(TARGET), parse(HEAD)
    pass_ = JoinHeadPass(head)
    assert pass_(target).modified
    assert pass_.changes == 1
    assert_graph(target, JOINED)
    assert_complete(target)
    assert_graph(head, HEAD)  # left as it was


def test_second_run_changes_nothing():
    target, pass_ = parse(TARGET), JoinHeadPass(parse(HEAD))
    pass_(target)
    assert unchanged(pass_, target)


def test_the_length_has_one_reader():
    """A second one could run after the next length has been written onto its memory."""
    target = parse(TARGET)
    JoinHeadPass(parse(HEAD))(target)
    length = next(v for v in target.graph.inputs if v.name == "past_length")
    assert [node.op_type for node, _ in length.uses()] == ["Add"]


CLASHES = {
    "another width": (HEAD.replace("float[1,S,2] hidden", "float[1,S,4] hidden"), "cannot be"),
    "another embedding": (HEAD.replace("5, 6}", "5, 7}"), "initializer 'embed' has other"),
    "another vocabulary": (
        HEAD.replace(SHARED, "float[2,2] embed = {1, 2, 3, 4}"),
        r"'embed' is FLOAT\[3,2\] in one graph and FLOAT\[2,2\]",
    ),
}


@pytest.mark.parametrize(("head", "said"), CLASHES.values(), ids=CLASHES)
def test_a_head_of_another_target_is_refused_before_anything_changes(head, said):
    target = parse(TARGET)
    with pytest.raises(PreconditionError, match=f"head and target do not fit: .*{said}"):
        JoinHeadPass(parse(head))(target)
    assert_graph(target, TARGET)
    check(target)


def test_rotary_tables_of_other_lengths_or_angles_are_refused():
    target = tiny().target_graph(20)
    with pytest.raises(
        PreconditionError, match=r"'rotary\.(cos|sin)' is FLOAT\[20,8\] in one"
    ):
        JoinHeadPass(tiny().head_graph(21))(target)
    other = tiny(rope_theta=500.0)
    with pytest.raises(PreconditionError, match=r"'rotary\.(cos|sin)' has other values"):
        JoinHeadPass(other.head_graph(20))(target)


@pytest.mark.parametrize("name", ["hidden", "past_length"])
def test_a_target_without_what_the_head_needs_is_refused(name):
    target = parse(TARGET.replace(name, "other"))
    with pytest.raises(PreconditionError, match=f"'{name}'; there are"):
        JoinHeadPass(parse(HEAD))(target)


def test_a_target_cut_to_its_last_row_is_refused():
    target, head = tiny().target_graph(20), tiny().head_graph(20)
    LastRowPass()(target)
    with pytest.raises(PreconditionError, match=r"'hidden' of 'head' is FLOAT\[1,S,64\]"):
        JoinHeadPass(head)(target)


CASES = {
    "trained": (demo, greedy_cases()[0]["prompt_ids"]),
    "untied": (lambda: tiny(seed=3), [5, 99, 3, 17, 64, 2]),
}


@pytest.mark.parametrize("chunk", [None, 1, 4])
@pytest.mark.parametrize(("make", "ids"), CASES.values(), ids=CASES)
def test_a_prompt_fills_the_heads_cache_as_the_oracles(make, ids, chunk):
    checkpoint = make()
    rows = 64
    graph = prefill_graph(checkpoint.target_graph(rows), checkpoint.head_graph(rows), rows)
    assert_complete(graph)
    assert_in_place_order(graph)
    run = Run(graph)
    states, following = run.zeros(rows), [*ids[1:], 0]
    chunk = chunk or len(ids)
    for start in range(0, len(ids), chunk):
        feeds = {
            "input_ids": np.array([ids[start : start + chunk]]),
            "next_ids": np.array([following[start : start + chunk]]),
            "past_length": np.array([start], np.int32),
        }
        out = run(feeds | states)
        states = {n.replace("present.", "past."): v for n, v in out.items() if "present." in n}
    cache, head_cache = checkpoint.model.new_cache(), checkpoint.head.new_cache()
    want = checkpoint.model.forward(ids, cache, 0)
    checkpoint.head.forward(following, want["hidden"], head_cache, 0)
    np.testing.assert_allclose(out["logits"][0, 0], want["logits"][-1], rtol=0, atol=2e-4)
    assert out["next_length"] == [len(ids)]
    assert out["result"].tolist() == [0, len(ids), want["logits"][-1].argmax(), 1]
    for part, rows_want in (("key", head_cache[0].k), ("value", head_cache[0].v)):
        got = states[f"head.past.0.{part}"][0, :, : len(ids)].transpose(1, 0, 2)
        np.testing.assert_allclose(got, rows_want, rtol=0, atol=2e-4)
