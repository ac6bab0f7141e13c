"""InlineSingleTripPass: what runs once becomes straight-line, what may not is left."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from gdn_scan import checked, gdn_inputs, gdn_model, run, text
from onnx_ir.passes import common
from oracle.tiny_reference import gdn_step

from passes.inline_single_trip import InlineSingleTripPass

HEAD = '<ir_version: 10, opset_import: ["": 21]>'


def parse(body: str, head: str = HEAD) -> ir.Model:
    return ir.from_onnx_text(head + body)


def inline(model: ir.Model, *, changes: int) -> ir.Model:
    inliner = InlineSingleTripPass()
    result = inliner(model)
    assert result.modified is bool(changes)
    assert inliner.changes == changes
    return checked(result.model)


def ops(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph.all_nodes()]


def assert_same_values(before: ir.Model, after: ir.Model, **feeds: np.ndarray) -> None:
    expected, got = run(before, feeds), run(after, feeds)
    assert list(expected) == list(got)
    for name, value in expected.items():
        assert value.dtype == got[name].dtype and value.shape == got[name].shape, name
        np.testing.assert_array_equal(got[name], value, err_msg=name)


SCAN = """
g (float[2] past, float[1,2] x) => (float[2] present, float[1,2] y) {
  present, y = Scan <num_scan_inputs = 1, body = b (float[2] s, float[2] e)
    => (float[2] s2, float[2] o) { s2 = Add (s, e)  o = Exp (s2) }> (past, x)
}"""


def test_a_scan_over_one_row_becomes_its_body() -> None:
    got = inline(parse(SCAN), changes=1)
    for node in got.graph:
        node.name = None  # names of nodes say nothing here
    golden = parse("""
g (float[2] past, float[1,2] x) => (float[2] present, float[1,2] y)
<int64[1] axes, float[2] e, float[2] s2, float[2] o, int64[1] axes_2> {
  axes = Constant <value = int64[1] {0}> ()
  e = Squeeze (x, axes)
  s2 = Add (past, e)
  o = Exp (s2)
  present = Identity (s2)
  axes_2 = Constant <value = int64[1] {0}> ()
  y = Unsqueeze (o, axes_2)
}""")
    for node in golden.graph:
        node.name = None
    assert text(got) == text(golden)


def test_second_run_changes_nothing() -> None:
    model = inline(parse(SCAN), changes=1)
    once = text(model)
    assert text(inline(model, changes=0)) == once


@pytest.mark.parametrize("rows", ["2", "0", "T"])
def test_a_scan_of_no_two_or_unknown_rows_is_left(rows: str) -> None:
    source = SCAN.replace("[1,2]", f"[{rows},2]")
    model = parse(source)
    assert text(inline(model, changes=0)) == text(parse(source))


def test_axes_are_followed_from_either_end() -> None:
    source = """
g (float[3] past, float[2,1,3] x, float[3,1] z)
  => (float[3] present, float[3,1] y, float[3,1] w) {
  present, y, w = Scan <num_scan_inputs = 2, scan_input_axes = [-2, 1],
      scan_input_directions = [1, 0], scan_output_directions = [1, 1],
      scan_output_axes = [1, -1], body = b (float[3] s, float[2,3] e, float[3] f)
    => (float[3] s2, float[3] o, float[3] p) {
      zero = Constant <value = int64[1] {0}> ()
      r = ReduceSum <keepdims = 0> (e, zero)  s2 = Add (s, r)  o = Exp (s2)  p = Mul (o, f)
    }> (past, x, z)
}"""
    got = inline(parse(source), changes=1)
    assert "Scan" not in ops(got)
    rng = np.random.default_rng(0)
    feeds = {
        n: rng.standard_normal(s).astype(np.float32)
        for n, s in {"past": (3,), "x": (2, 1, 3), "z": (3, 1)}.items()
    }
    assert_same_values(parse(source), got, **feeds)


def test_before_opset_13_axes_are_attributes() -> None:
    head = '<ir_version: 7, opset_import: ["": 11]>'
    got = inline(parse(SCAN, head), changes=1)
    assert ops(got) == ["Squeeze", "Add", "Exp", "Identity", "Unsqueeze"]
    feeds = {"past": np.float32([1, 2]), "x": np.float32([[0.5, -1]])}
    assert_same_values(parse(SCAN, head), got, **feeds)


def test_either_spelling_of_onnxs_own_domain_gives_the_opset() -> None:
    inline(parse(SCAN, '<ir_version: 10, opset_import: ["ai.onnx": 21]>'), changes=1)


def test_scan_of_opset_8_is_another_op_and_left() -> None:
    model = parse(SCAN, '<ir_version: 4, opset_import: ["": 8]>')
    assert not InlineSingleTripPass()(model).modified


def test_outputs_nobody_reads_are_not_made() -> None:
    source = SCAN.replace(
        "g (float[2] past, float[1,2] x) => (float[2] present, float[1,2] y)",
        "g (float[2] past, float[1,2] x) => (float[2] present)",
    )
    got = inline(parse(source), changes=1)
    assert "Unsqueeze" not in ops(got)


def test_a_state_handed_through_and_one_given_twice_keep_their_outputs() -> None:
    source = """
g (float[2] a, float[2] b, float[1,2] x)
  => (float[2] a2, float[2] b2, float[1,2] y, float[1,2] z) {
  a2, b2, y, z = Scan <num_scan_inputs = 1, body = body (float[2] s, float[2] t, float[2] e)
    => (float[2] s, float[2] t2, float[2] t2, float[2] e) { t2 = Add (t, e) }> (a, b, x)
}"""
    got = inline(parse(source), changes=1)
    rng = np.random.default_rng(1)
    a, b, x = (rng.standard_normal(s).astype(np.float32) for s in ((2,), (2,), (1, 2)))
    result = run(got, {"a": a, "b": b, "x": x})
    np.testing.assert_array_equal(result["a2"], a)
    np.testing.assert_array_equal(result["b2"], b + x[0])
    np.testing.assert_array_equal(result["y"], (b + x[0])[None])
    np.testing.assert_array_equal(result["z"], x)


def loop(trips: str, condition: str, goes_on: str, makers: str = "") -> ir.Model:
    return parse(f"""
g (float[2] x, int64 n, bool c) => (float[2] y, float[K,2] ys)
<int64 one = {{1}}, int64 two = {{2}}, int64 zero = {{0}}, bool yes = {{1}},
 bool no = {{0}}> {{
  {makers}
  y, ys = Loop <body = b (int64 i, bool go, float[2] s)
    => (bool go2, float[2] s2, float[2] o) {{
    truth = Constant <value = bool {{1}}> ()
    lie = Constant <value = bool {{0}}> ()
    go2 = Identity ({goes_on})
    step = Cast <to = 1> (i)
    s2 = Add (s, step)
    half = Constant <value = float {{0.5}}> ()
    o = Mul (s, half)
  }}> ({trips}, {condition}, x)
}}""")


FEEDS = {"x": np.float32([1, -3]), "n": np.int64(1), "c": np.bool_(True)}


@pytest.mark.parametrize(
    ("trips", "condition", "goes_on"),
    [
        ("one", "", "truth"),
        ("one", "yes", "lie"),
        ("one", "yes", "go"),
        ("", "yes", "lie"),
        ("", "yes", "no"),
        ("two", "yes", "lie"),
        ("two", "", "lie"),
        ("", "", "lie"),
    ],
)
def test_a_loop_of_one_trip_becomes_its_body(trips: str, condition: str, goes_on: str) -> None:
    source = loop(trips, condition, goes_on)
    got = inline(loop(trips, condition, goes_on), changes=1)
    assert "Loop" not in ops(got)
    feeds = {name: np.asarray(value) for name, value in FEEDS.items()}
    assert_same_values(source, got, **feeds)


@pytest.mark.parametrize(
    ("trips", "condition", "goes_on"),
    [
        ("zero", "", "truth"),
        ("two", "", "truth"),
        ("two", "yes", "go"),
        ("n", "", "lie"),
        ("one", "no", "truth"),
        ("one", "c", "truth"),
        ("", "yes", "truth"),
        ("", "c", "lie"),
        ("zero", "yes", "lie"),
    ],
)
def test_a_loop_of_other_or_unknown_trips_is_left(
    trips: str, condition: str, goes_on: str
) -> None:
    got = inline(loop(trips, condition, goes_on), changes=0)
    assert ops(got).count("Loop") == 1


def test_a_trip_count_is_followed_through_identities() -> None:
    inline(
        loop("m", "", "truth", "m0 = Constant <value_int = 1> ()  m = Identity (m0)"),
        changes=1,
    )


def test_an_initializer_that_a_caller_may_override_is_no_constant() -> None:
    model = loop("one", "", "truth")
    model.graph.inputs.append(model.graph.initializers["one"])
    assert not InlineSingleTripPass()(model).modified


NESTED = """
g (float[2] past, float[1,2] x, float[2] w) => (float[2] present, float[1,1,2] y)
<int64 one = {1}> {
  o = Neg (w)
  present, y = Scan <num_scan_inputs = 1, body = outer (float[2] s, float[2] e)
    => (float[2] s2, float[1,2] ys) {
      m = Identity (one)
      s2, ys = Loop <body = inner (int64 i, bool go, float[2] t)
        => (bool go2, float[2] t2, float[2] u) {
          go2 = Identity (go)
          p = Mul (o, e)
          t2 = Add (t, p)
          u = Mul (t2, w)
        }> (m, , s)
    }> (past, x)
}"""


def test_bodies_within_bodies_are_inlined_and_captured_values_keep_their_meaning() -> None:
    got = inline(parse(NESTED), changes=2)
    assert not {"Scan", "Loop"} & set(ops(got))
    rng = np.random.default_rng(2)
    feeds = {
        n: rng.standard_normal(s).astype(np.float32)
        for n, s in {"past": (2,), "x": (1, 2), "w": (2,)}.items()
    }
    assert_same_values(parse(NESTED), got, **feeds)


def test_names_of_two_bodies_and_of_the_graph_do_not_meet() -> None:
    source = """
g (float[1,2] x, float[1,2] z) => (float[1,2] y, float[1,2] e_2) {
  y = Scan <num_scan_inputs = 1, body = b1 (float[2] e) => (float[2] o)
    <float[2] bias = {1, 2}> { d = Add (e, bias)  o = Exp (d) }> (x)
  e_2 = Scan <num_scan_inputs = 1, body = b2 (float[2] e) => (float[2] o)
    <float[2] bias = {3, 4}> { d = Add (e, bias)  o = Neg (d) }> (z)
}"""
    got = inline(parse(source), changes=2)
    names = [v.name for n in got.graph for v in n.outputs] + list(got.graph.initializers)
    assert len(names) == len(set(names))
    feeds = {"x": np.float32([[1, 2]]), "z": np.float32([[-1, 5]])}
    assert_same_values(parse(source), got, **feeds)


def test_a_scan_in_a_branch_is_inlined_and_the_branch_stays() -> None:
    source = """
g (bool c, float[1,2] x) => (float[1,2] y) {
  y = If (c) <
    then_branch = t () => (float[1,2] a) {
      a = Scan <num_scan_inputs = 1, body = b (float[2] e) => (float[2] o) { o = Exp (e) }> (x)
    },
    else_branch = f () => (float[1,2] d) { d = Neg (x) }>
}"""
    got = inline(parse(source), changes=1)
    assert sorted(set(ops(got))) == ["Constant", "Exp", "If", "Neg", "Squeeze", "Unsqueeze"]
    for c in (True, False):
        assert_same_values(parse(source), got, c=np.array(c), x=np.float32([[1, 2]]))


def test_functions_that_remain_are_inlined_too_without_initializers() -> None:
    source = """<ir_version: 10, opset_import: ["": 21, "l": 1]>
g (float[1,2] x) => (float[1,2] y) { y = l.f (x) }
<domain: "l", opset_import: ["": 21]>
f (x) => (y) {
  a = Constant <value = int64 {1}> ()
  y, ys = Loop <body = b (int64 i, bool go, float[1,2] s)
    => (bool go, float[1,2] s2, float[1,2] o)
    <float[2] bias = {1, 2}> { s2 = Add (s, bias)  o = Neg (s) }> (a, , x)
}"""
    got = inline(ir.from_onnx_text(source), changes=1)
    (function,) = got.functions.values()
    assert [node.op_type for node in function] == [
        "Constant",
        "Constant",
        "Add",
        "Neg",
        "Identity",
    ]
    assert_same_values(ir.from_onnx_text(source), got, x=np.float32([[1, 2]]))


def test_malformed_nodes_are_left_with_their_reason() -> None:
    model = parse(SCAN)
    scan = next(iter(model.graph))
    scan.attributes.add(ir.AttrInt64s("scan_input_axes", [0, 0]))
    with pytest.raises(ir.passes.PreconditionError, match="has 2 axes, it must have 1"):
        InlineSingleTripPass(strict=True)(model)
    scan.attributes.add(ir.AttrInt64s("scan_input_axes", [7]))
    with pytest.raises(ir.passes.PreconditionError, match=r"axis 7 .* does not exist"):
        InlineSingleTripPass(strict=True)(model)
    scan.attributes.add(ir.AttrInt64("num_scan_inputs", 9))
    assert not InlineSingleTripPass()(model).modified


def test_strict_names_every_node_that_would_remain_and_changes_nothing() -> None:
    source = """
g (bool c, float[1,2] x, float[T,2] z, int64 n)
  => (float[1,2] y, float[T,2] w, float[2] v, float[1,2] u) {
  y = Scan <num_scan_inputs = 1, body = b (float[2] e) => (float[2] o) { o = Exp (e) }> (x)
  w = Scan <num_scan_inputs = 1, body = b (float[2] e) => (float[2] o) { o = Exp (e) }> (z)
  zero = Constant <value = float[2] {0, 0}> ()
  v = Loop <body = b (int64 i, bool go, float[2] s) => (bool go2, float[2] s2)
    { go2 = Identity (go)  s2 = Exp (s) }> (n, , zero)
  u = If (c) <then_branch = t () => (float[1,2] a) { a = Exp (x) },
              else_branch = f () => (float[1,2] d) { d = Neg (x) }>
}"""
    model = parse(source)
    with pytest.raises(ir.passes.PreconditionError) as refusal:
        InlineSingleTripPass(strict=True)(model)
    message = str(refusal.value)
    assert message.startswith(
        "a captured CUDA graph allows no control flow, and 3 nodes remain"
    )
    assert "g:w(Scan): its scan input 'z' has extent T on axis 0, it must be 1" in message
    assert "g:v(Loop): its trip count 'n' is not a constant" in message
    assert "g:u(If): it chooses a branch at run time" in message
    assert "y(Scan)" not in message
    assert text(model) == text(parse(source))


def test_strict_accepts_what_becomes_straight_line() -> None:
    inliner = InlineSingleTripPass(strict=True)
    assert inliner(parse(NESTED)).modified
    assert inliner.changes == 2
    assert not inliner(parse("g (float[2] x) => (float[2] y) { y = Exp (x) }")).modified
    assert inliner.changes == 0


def test_the_carried_recurrence_keeps_its_bits_and_is_the_oracles() -> None:
    before, after = gdn_model(rows=1), gdn_model(rows=1)
    common.InlinePass()(after)
    inline(after, changes=1)
    assert "Scan" not in ops(after)
    rng = np.random.default_rng(3)
    states = [np.zeros((3, 4, 5), np.float32)] * 2
    oracle = np.zeros((3, 4, 5))
    for _ in range(6):
        feeds = gdn_inputs(rng, 1)
        expected, got = (
            run(model, feeds | {"past": state})
            for model, state in zip((before, after), states, strict=True)
        )
        np.testing.assert_array_equal(got["y"], expected["y"])
        np.testing.assert_array_equal(got["present"], expected["present"])
        states = [expected["present"], got["present"]]
        row = [feeds[n][0].astype(np.float64) for n in ("q", "k", "v", "g", "beta")]
        oracle, y, _ = gdn_step(oracle, *row)
        # float32 against float64 over six steps of numbers near one
        np.testing.assert_allclose(got["y"][0], y, rtol=0, atol=2e-6)
        np.testing.assert_allclose(got["present"], oracle, rtol=0, atol=2e-6)


def test_the_recurrence_over_rows_is_left_even_when_its_function_is_gone() -> None:
    for rows in (None, 2):
        model = gdn_model(rows)
        common.InlinePass()(model)
        inline(model, changes=0)
