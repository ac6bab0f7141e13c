import re

import onnx
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from one_node import GRID, models, verdict
from onnx import helper
from planted import Planted, planted_models

from artifacts.types.check import check_types
from passes.unify_types import UnifyTypesPass

F32, F16 = 1, 10
value = helper.make_tensor_value_info


def model(text: str) -> onnx.ModelProto:
    made = onnx.parser.parse_model(
        '<ir_version: 11, opset_import: ["" : 24, "own" : 1]>\n' + text
    )
    return made


def unified(proto: onnx.ModelProto, prefer: str | None = None) -> tuple[bool, onnx.ModelProto]:
    parsed = ir.from_proto(proto)
    result = UnifyTypesPass(prefer)(parsed)
    return result.modified, ir.to_proto(result.model)


def lines(proto: onnx.ModelProto) -> list[str]:
    text = (onnx.printer.to_text(node) for node in proto.graph.node)
    return [re.sub(r"^\[.*?\] ", "", " ".join(line.split())) for line in text]


def mended(text: str, prefer: str | None = None) -> list[str]:
    """Mend, and see that types agree, that ORT takes it, and that a second run idles."""
    modified, proto = unified(model(text), prefer)
    assert modified
    assert check_types(proto, "g") == []
    assert verdict(proto)[0] == "loads"
    assert unified(proto, prefer) == (False, proto)
    return lines(proto)


def test_a01_the_odd_residual_is_cast_once_for_all_its_readers() -> None:
    text = """g (float16[2] h, float[2] r) => (float16[2] y) {
        a = Add(h, r)
        y = Mul(a, r)
    }"""
    assert mended(text) == [
        "r_float16_for_a = Cast <to: int = 10> (r)",
        "a = Add (h, r_float16_for_a)",
        "y = Mul (a, r_float16_for_a)",
    ]


def test_a02_a_branch_left_wide_by_a_converter_is_stepped_over() -> None:
    text = """g (float16[2] x) => (float16[2] y) {
        w = Cast<to = 1>(x)
        y = Add(x, w)
    }"""
    assert mended(text) == ["y = Add (x, x)"]


def test_a03_a_constant_is_converted_and_the_activation_left_alone() -> None:
    text = """g (float16[2] x) => (float16[2] y) {
        eps = Constant<value = float {0.5}>()
        y = Add(x, eps)
    }"""
    assert mended(text) == ["y = Add (x, eps_float16)"]


def test_a03_a_constant_that_the_narrow_type_cannot_hold_is_not_converted() -> None:
    text = """g (float16[2] x) => (float[2] y) {
        eps = Constant<value = float {1e-30}>()
        y = Add(x, eps)
    }"""
    assert mended(text) == [
        "eps = Constant <value: tensor = float eps {1e-30}> ()",
        "x_float_for_y = Cast <to: int = 1> (x)",
        "y = Add (x_float_for_y, eps)",
    ]


def test_a05_the_integer_side_goes_to_the_floats() -> None:
    text = "g (int64[2] n, float[2] x) => (float[2] y) { y = Mul(n, x) }"
    assert mended(text) == [
        "n_float_for_y = Cast <to: int = 1> (n)",
        "y = Mul (n_float_for_y, x)",
    ]


def test_a07_a_pad_value_follows_its_data() -> None:
    text = """g (float16[2] x) => (float16[4] y)
        <int64[2] pads = {1, 1}, float zero = {0}> { y = Pad(x, pads, zero) }"""
    assert mended(text) == ["y = Pad (x, pads, zero_float16)"]


def test_a08_a_stale_declaration_is_corrected_without_a_node() -> None:
    text = """g (float[2] x) => (float16[2] y) <float[2] h> {
        h = Cast<to = 10>(x)
        y = Sqrt(h)
    }"""
    assert mended(text) == ["h = Cast <to: int = 10> (x)", "y = Sqrt (h)"]


def test_a09_a_cast_stands_before_its_reader() -> None:
    _, proto = unified(
        model("g (float16[2] h, float[2] r) => (float16[2] y) { y = Add(h, r) }")
    )
    onnx.checker.check_model(proto, full_check=True)


def test_a10_a_narrowing_pair_is_not_collapsed() -> None:
    text = """g (float[2] x) => (float[2] y) {
        narrow = Cast<to = 10>(x)
        y = Add(x, narrow)
    }"""
    assert mended(text) == [
        "narrow = Cast <to: int = 10> (x)",
        "narrow_float_for_y = Cast <to: int = 1> (narrow)",
        "y = Add (x, narrow_float_for_y)",
    ]


def test_a12_a_norms_scale_is_converted_to_its_data() -> None:
    text = """g (float[2] x) => (float[2] y) <float16[2] w = {1, 1}> {
        y = LayerNormalization(x, w)
    }"""
    assert mended(text) == ["y = LayerNormalization (x, w_float)"]


def test_an_output_keeps_its_declared_type() -> None:
    text = "g (float[2] x) => (float16[2] y) { y = Sqrt(x) }"
    assert mended(text) == [
        "y_before_float16 = Sqrt (x)",
        "y = Cast <to: int = 10> (y_before_float16)",
    ]


@pytest.mark.parametrize(("prefer", "element"), [("float16", 10), ("float", 1)])
def test_the_preferred_type_decides_between_equals(prefer: str, element: int) -> None:
    text = "g (float16[2] a, float[2] b) => (int64[1] y) { s = Add(a, b) y = Shape(s) }"
    assert f"Cast <to: int = {element}>" in mended(text, prefer)[0]


def test_a_clean_model_is_left_byte_for_byte() -> None:
    clean = model("g (float16[2] a) => (float[2] y) { w = Cast<to = 1>(a) y = Sqrt(w) }")
    assert unified(clean) == (False, ir.to_proto(ir.from_proto(clean)))


def test_a_function_shared_by_two_types_stays_one_function() -> None:
    text = """g (float[2] x, float16[2] h) => (float[2] y, float16[2] z) {
        y = own.Plus(x)
        z = own.Plus(h)
    }
    <domain: "own", opset_import: ["" : 24]> Plus (a) => (b) {
        one = Constant<value = float {1}>()
        b = Add(a, one)
    }"""
    assert mended(text) == ["y = own.Plus (x)", "z = own.Plus (h)"]


def test_a_large_stored_weight_is_cast_and_not_rewritten() -> None:
    weight = helper.make_tensor("w", F32, [8192], b"\0" * 32768, raw=True)
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])], "g",
        [value("x", F16, [8192])], [value("y", F16, [8192])], [weight],
    )  # fmt: skip
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)])
    _, after = unified(proto)
    assert after.graph.initializer[0] == weight
    assert lines(after)[0].endswith("Cast <to: int = 10> (w)")


def test_a_float_in_the_place_of_an_index_is_left_to_its_author() -> None:
    wrong = model("g (float[4] x, float[2] i) => (float[2] y) { y = Gather(x, i) }")
    modified, after = unified(wrong)
    assert not modified
    assert [f.place for f in check_types(after, "g")] == ["g:'y'(Gather):indices"]


@pytest.mark.parametrize("case", GRID, ids=lambda case: f"{case.domain}{case.op}")
def test_every_float_clash_of_every_op_is_mended_for_the_cpu_provider(case) -> None:
    for name, proto in models(case):
        kinds = [i.type.tensor_type.elem_type for i in proto.graph.input]
        other = not set(kinds) <= {1, 10} or case.op == "Gather"
        other = other or (case.op == "Where" and kinds[0] == 1)
        if verdict(proto)[0] != "types" or other:
            continue
        parsed = ir.from_proto(proto)
        UnifyTypesPass(provider="cpu")(parsed)
        after = ir.to_proto(parsed)
        assert verdict(after)[0] == "loads", f"{name}: {verdict(after)[1]}"
        assert casts(after) <= len(proto.graph.input) - 1


def casts(proto: onnx.ModelProto) -> int:
    graphs = [proto.graph, *(a.g for n in proto.graph.node for a in n.attribute if a.g.node)]
    return sum(node.op_type == "Cast" for graph in graphs for node in graph.node)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(planted_models())
def test_planted_faults_are_all_found_at_once_mended_and_load(planted: Planted) -> None:
    found = [f for f in check_types(planted.model, "g") if f.code == "types.clash"]
    names = {match for f in found for match in re.findall(r"(n\d+)\(\w+\):", f.place)}
    assert names == planted.faulty
    modified, proto = unified(planted.model)
    assert modified is bool(planted.faulty)
    assert check_types(proto, "g") == []
    assert verdict(proto)[0] == "loads", verdict(proto)[1]
    assert casts(proto) <= casts(planted.model) + len(planted.faulty)
    assert unified(proto) == (False, proto)
