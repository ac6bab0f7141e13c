"""LastRowPass: only the last row goes through the LM head."""

import numpy as np
import pytest
from canonical import Run, assert_complete, tiny
from golden import assert_graph, check, parse, run, unchanged
from onnx_ir.passes import PreconditionError

from passes.last_row import LastRowPass
from passes.pin_shapes import PinShapesPass

WEIGHTS = "<float[2,3] head = {1, 2, 3, 4, 5, 6}>"
BEFORE = f"""
g (float[1,S,3] x) => (float[1,S,2] logits, float[1,S,3] hidden, float[1,S,3] rows) {WEIGHTS}
{{
    hidden = Neg(x)
    logits = com.microsoft.FusedMatMul<transB=1>(hidden, head)
    rows = Neg(hidden)
}}
"""
AFTER = f"""
g (float[1,S,3] x) => (float[1,1,2] logits, float[1,1,3] hidden, float[1,S,3] rows) {WEIGHTS}
{{
    all = Neg(x)
    last = Constant<value_ints = [-1]>()
    hidden = Gather<axis=1>(all, last)
    logits = com.microsoft.FusedMatMul<transB=1>(hidden, head)
    rows = Neg(all)
}}
"""


def test_the_head_reads_the_last_row_and_others_still_read_all():
    model, pass_ = parse(BEFORE), LastRowPass()
    check(model)
    assert pass_(model).modified
    assert pass_.changes == 1
    assert_graph(model, AFTER)
    assert_complete(model)


def test_second_run_changes_nothing():
    model, pass_ = parse(BEFORE), LastRowPass()
    pass_(model)
    assert unchanged(pass_, model)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_values_are_those_of_the_last_row(rows):
    model = parse(BEFORE)
    x = np.random.default_rng(0).standard_normal((1, rows, 3)).astype(np.float32)
    want = run(model, x=x)
    LastRowPass()(model)
    got = run(model, x=x)
    np.testing.assert_array_equal(got["hidden"], want["hidden"][:, -1:])
    np.testing.assert_allclose(got["logits"], want["logits"][:, -1:], rtol=1e-6)
    np.testing.assert_array_equal(got["rows"], want["rows"])


def test_a_graph_of_one_row_is_left():
    assert unchanged(LastRowPass(), parse(BEFORE.replace("S", "1")))


@pytest.mark.parametrize(
    ("line", "maker"),
    [
        ("f = com.microsoft.FusedMatMul<transB=1>(hidden, head) logits = Neg(f)", "Neg"),
        ("logits = com.microsoft.FusedMatMul(head, hidden)", "FusedMatMul"),
    ],
)
def test_logits_that_another_node_makes_are_refused_before_anything_changes(line, maker):
    text = BEFORE.replace("logits = com.microsoft.FusedMatMul<transB=1>(hidden, head)", line)
    model = parse(text)
    with pytest.raises(PreconditionError, match=f"by one node .it is the output of {maker}"):
        LastRowPass()(model)
    assert_graph(model, text)


@pytest.mark.parametrize("name", ["hidden", "logits"])
def test_a_missing_output_is_named(name):
    model = parse(BEFORE.replace(name, "other"))
    with pytest.raises(PreconditionError, match=f"no output '{name}'; there are"):
        LastRowPass()(model)


def test_a_random_target_gives_the_oracles_last_row():
    checkpoint, ids = tiny(seed=2), [9, 4, 77, 3]
    graph = checkpoint.target_graph(20)
    LastRowPass()(graph)
    PinShapesPass({"C": 20})(graph)
    assert_complete(graph)
    run_ = Run(graph)
    feeds = {"input_ids": np.array([ids]), "past_length": np.zeros(1, np.int32)}
    got = run_(feeds | run_.zeros(20))
    want = checkpoint.model.forward(ids, checkpoint.model.new_cache(), 0)
    np.testing.assert_allclose(got["logits"][0, 0], want["logits"][-1], atol=2e-4)
    np.testing.assert_allclose(got["hidden"][0, 0], want["hidden"][-1], atol=2e-4)
