"""StraightLinePass: nodes in a row, sizes that are numbers."""

from __future__ import annotations

import onnx_ir as ir
import pytest
from gdn_scan import gdn_model, text

from passes.decode_inline import decode_inline_passes
from passes.straight_line import StraightLinePass

HEAD = '<ir_version: 10, opset_import: ["": 21, "l": 1]>'


def parse(source: str) -> ir.Model:
    return ir.from_onnx_text(HEAD + source)


def accept(model: ir.Model, *, static: bool = False) -> None:
    before = text(model)
    result = StraightLinePass(static=static)(model)
    assert result.model is model and not result.modified
    assert text(model) == before


def refuse(model: ir.Model, *, static: bool = False) -> str:
    with pytest.raises(ir.passes.PreconditionError) as refusal:
        StraightLinePass(static=static)(model)
    return str(refusal.value)


PLAIN = "g (float[{rows},2] x) => (float[{rows},2] y) {{ t = Exp (x)  y = Neg (t) }}"


def test_nodes_in_a_row_are_accepted() -> None:
    accept(parse(PLAIN.format(rows="1")), static=True)
    accept(parse(PLAIN.format(rows="S")))


def test_control_flow_is_listed_node_by_node() -> None:
    message = refuse(
        parse("""
g (bool c, float[1,2] x, int64 n) => (float[1,2] y, float[1,2] z, float[1,2] w) {
  y = Scan <num_scan_inputs = 1, body = b (float[2] e) => (float[2] o) { o = Exp (e) }> (x)
  z = If (c) <then_branch = t () => (float[1,2] a) {
      a = Loop <body = l (int64 i, bool go, float[1,2] s) => (bool go, float[1,2] s2)
        { s2 = Exp (s) }> (n, , x)
    }, else_branch = f () => (float[1,2] d) { d = Neg (x) }>
  w = Neg (x)
}""")
    )
    assert message.startswith("the graph is not straight-line, for 3 reasons: ")
    for name in ("g:y(Scan)", "g:z(If)", "t:a(Loop)"):
        assert f"{name} is control flow; pin its trips or its condition" in message
    assert "w(Neg)" not in message


def test_calls_of_functions_are_listed() -> None:
    message = refuse(
        parse("""
g (float[1,2] x) => (float[1,2] y) { [call] y = l.F (x) }
<domain: "l", opset_import: ["": 21]> F (a) => (b) { b = Exp (a) }""")
    )
    assert "g:call(F) calls the function l.F; inline it, or keep it" in message


def test_an_op_of_the_runtime_is_no_call() -> None:
    accept(parse("g (float[1,2] x) => (float[1,2] y) { y = l.F (x) }"), static=True)


def test_sizes_that_are_no_numbers_are_listed_with_their_values() -> None:
    model = parse(
        "g (float[S,2] x) => (float[1,2] y) <float[S,2] t> { t = Exp (x)  y = Neg (t) }"
    )
    message = refuse(model, static=True)
    assert "for 2 reasons" in message
    assert "input 'x' is [S,2]; pin its sizes" in message
    assert "g:t(Exp) gives 't' as [S,2]; pin and infer its shape" in message
    accept(model)


def test_an_output_of_unknown_shape_is_refused_and_a_value_inside_is_not() -> None:
    model = parse(PLAIN.format(rows="1"))
    accept(model, static=True)
    model.graph.outputs[0].shape = None
    message = refuse(model, static=True)
    assert "the shape of output 'y' is unknown; declare it" in message


def test_what_the_decode_sequence_makes_is_accepted_and_what_it_took_is_not() -> None:
    model = gdn_model(rows=1)
    assert "calls the function local.GatedDelta" in refuse(model, static=True)
    for step in decode_inline_passes():
        step(model)
    accept(model, static=True)
