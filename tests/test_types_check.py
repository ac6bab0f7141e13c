import re

import onnx
import pytest
from one_node import GRID, models, verdict
from onnx import TensorProto, helper

from artifacts.findings import Severity
from artifacts.types.check import check_types

F32, F16, BF16, I64 = 1, 10, 16, 7
value = helper.make_tensor_value_info


def model(nodes, inputs, outputs, stored=(), functions=(), opset=24, value_info=()):
    graph = helper.make_graph(
        nodes,
        "g",
        [value(name, kind, [None]) for name, kind in inputs.items()],
        [value(name, kind, [None]) for name, kind in outputs.items()],
        [helper.make_tensor(name, kind, [1], [1.0]) for name, kind in dict(stored).items()],
        value_info=[value(name, kind, [None]) for name, kind in dict(value_info).items()],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    opsets.append(helper.make_opsetid("own", 1))
    return helper.make_model(
        graph, opset_imports=opsets, ir_version=11, functions=list(functions)
    )


def node(op, inputs, outputs, name="", **attributes):
    return helper.make_node(op, inputs.split(), outputs.split(), name, **attributes)


@pytest.mark.parametrize("case", GRID, ids=lambda case: f"{case.domain}{case.op}")
def test_every_verdict_is_that_of_onnxruntimes_cpu_provider(case) -> None:
    for name, one in models(case):
        codes = {finding.code for finding in check_types(one, "g")}
        told = next((k for k in ("clash", "kernel") if f"types.{k}" in codes), "loads")
        expected, text = verdict(one)
        assert told.replace("clash", "types") == expected, f"{name}: {text}"


def test_a01_each_clash_is_told_at_once_with_the_producers_of_all_operands() -> None:
    bad = model(
        [
            node("Cast", "x", "wide", "up", to=F32),
            node("Add", "x wide", "s", "first"),
            node("Mul", "s w", "t", "second"),
            node("Sqrt", "x", "r", "clean"),
            node("Sub", "r v", "y", "third"),
        ],
        {"x": F16},
        {"t": F16, "y": F16},
        {"w": F16, "v": F32},
    )
    clashes = [f for f in check_types(bad, "g") if f.code == "types.clash"]
    assert [f.place for f in clashes] == ["g:first(Add):B", "g:third(Sub):B"]
    assert "A is float16 from input 'x'; B is float from Cast 'up'" in clashes[0].message
    assert "B is float from initializer 'v'" in clashes[1].message


def test_a03_the_constant_is_pointed_at_and_not_the_activation() -> None:
    epsilon = node("Constant", "", "eps", "c", value=helper.make_tensor("e", F32, [], [1e-6]))
    bad = model([epsilon, node("Add", "eps x", "y", "n")], {"x": F16}, {"y": F16})
    (finding,) = check_types(bad, "g")
    assert "A is float from Constant 'c'" in finding.message


def test_a05_float_beside_int64_is_a_clash() -> None:
    bad = model([node("Mul", "x n", "y", "m")], {"x": F32, "n": I64}, {"y": F32})
    (finding,) = check_types(bad, "g")
    assert finding.place == "g:m(Mul):B"


def test_a08_a_declaration_that_a_cast_contradicts_is_stale() -> None:
    bad = model(
        [node("Cast", "x", "h", "c", to=F16), node("Sqrt", "h", "y")],
        {"x": F32}, {"y": F16}, value_info={"h": F32},
    )  # fmt: skip
    (finding,) = check_types(bad, "g")
    assert (finding.code, finding.place) == ("types.value_info", "g:h")
    assert "declared float, Cast 'c' makes it float16" in finding.message
    assert verdict(bad)[0] == "types"


def test_a12_layer_normalization_with_a_scale_of_another_type_is_a_clash() -> None:
    bad = model(
        [node("LayerNormalization", "x w", "y", "n")], {"x": F32}, {"y": F32}, {"w": F16}
    )
    (finding,) = check_types(bad, "g")
    assert finding.place == "g:n(LayerNormalization):Scale"


def test_a14_a_missing_kernel_depends_on_the_provider() -> None:
    bad = model([node("Reciprocal", "x", "y", "r")], {"x": BF16}, {"y": BF16})
    for provider in ("cpu", "cuda"):
        (finding,) = check_types(bad, "g", provider)
        assert (finding.code, finding.place) == ("types.kernel", "g:r(Reciprocal)")
        assert finding.severity is Severity.ERROR


def test_a15_nodes_without_a_kernel_are_gathered_by_op_and_type() -> None:
    nodes = [node("MatMul", "x x", f"y{i}", f"n{i}") for i in range(3)]
    bad = model(nodes, {"x": BF16}, {"y0": BF16})
    (finding,) = check_types(bad, "g")
    assert "no kernel for MatMul of bfloat16 (2 more such nodes)" in finding.message
    assert check_types(bad, "g", "cuda") == []


def test_what_cuda_leaves_to_the_cpu_is_a_warning() -> None:
    bad = model([node("Det", "x", "y", "d")], {"x": F32}, {"y": F32})
    (finding,) = check_types(bad, "g", "cuda")
    assert finding.severity is Severity.WARNING
    assert "runs on the CPU" in finding.message


def attention(kind, mask, causal=1, opset=24):
    inputs = {"q": kind, "k": kind, "v": kind, "m": mask}
    call = node("Attention", "q k v m", "y", "attn", is_causal=causal)
    return model([call], inputs, {"y": kind}, opset=opset)


@pytest.mark.parametrize("opset", [23, 24])
def test_the_clash_inside_an_inlined_attention_names_the_node_around_it(opset: int) -> None:
    found = check_types(attention(BF16, BF16, opset=opset), "g")
    (clash,) = [f for f in found if f.code == "types.clash"]
    assert re.fullmatch(r"g:attn\(Attention\)/'\w+'\(Add\):B", clash.place)
    assert "A is bfloat16" in clash.message and "B is float from" in clash.message
    assert "ONNX Runtime inlines g:attn(Attention)" in clash.message


def test_a_provider_with_the_kernel_never_looks_into_the_body() -> None:
    assert check_types(attention(BF16, BF16), "g", "cuda") == []
    assert check_types(attention(F16, F16), "g") == []
    without = [f.code for f in check_types(attention(BF16, BF16, causal=0), "g")]
    assert without == ["types.kernel"]


def branch(name, nodes, output, kind):
    return helper.make_graph(nodes, name, [], [value(output, kind, [None])])


def test_a_clash_in_a_branch_is_told_with_the_path_to_it() -> None:
    yes = branch("yes", [node("Add", "x w", "a", "inner")], "a", F16)
    no = branch("no", [node("Identity", "x", "b")], "b", F16)
    bad = model(
        [node("If", "c", "y", "choose", then_branch=yes, else_branch=no)],
        {"x": F16, "c": TensorProto.BOOL}, {"y": F16}, {"w": F32},
    )  # fmt: skip
    (finding,) = check_types(bad, "g")
    assert finding.place == "g:choose(If)/then_branch/inner(Add):B"


def test_branches_that_give_different_types_clash() -> None:
    yes = branch("yes", [node("Cast", "x", "a", to=F32)], "a", F32)
    no = branch("no", [node("Identity", "x", "b")], "b", F16)
    bad = model(
        [node("If", "c", "y", "choose", then_branch=yes, else_branch=no)],
        {"x": F16, "c": TensorProto.BOOL}, {"y": F16},
    )  # fmt: skip
    assert [f.code for f in check_types(bad, "g")] == ["types.clash"]


def loop(op, declared):
    body = helper.make_graph(
        [node("Cast", "s", "wide", "cast", to=F32), node("Identity", "c_in", "c_out")],
        "body",
        [value("i", I64, []), value("c_in", 9, []), value("s", declared, [None])],
        [value("c_out", 9, []), value("wide", F32, [None])],
    )
    return node(op, "n c x", "y", "l", body=body)


def test_a_state_that_leaves_a_loop_as_another_type_clashes() -> None:
    inputs = {"x": F16, "n": I64, "c": TensorProto.BOOL}
    found = check_types(model([loop("Loop", F16)], inputs, {"y": F16}), "g")
    assert "g:l(Loop)/wide" in [f.place for f in found if f.code == "types.clash"]


def test_a_loop_body_that_declares_another_type_than_it_is_fed_is_told() -> None:
    inputs = {"x": F16, "n": I64, "c": TensorProto.BOOL}
    found = check_types(model([loop("Loop", F32)], inputs, {"y": F32}), "g")
    assert "g:l(Loop)/s" in [f.place for f in found if f.code == "types.value_info"]


def test_a_scan_state_and_its_slices_keep_their_types() -> None:
    body = helper.make_graph(
        [node("Add", "s e", "s_out", "add")],
        "body",
        [value("s", F32, [None]), value("e", F16, [None])],
        [value("s_out", F32, [None])],
    )
    scan = node("Scan", "x seq", "y", "scan", body=body, num_scan_inputs=1)
    bad = model([scan], {"x": F32, "seq": F16}, {"y": F32})
    (finding,) = check_types(bad, "g")
    assert finding.place == "g:scan(Scan)/add(Add):B"


def half_plus(domain="own"):
    inner = [
        node("Constant", "", "one", value=helper.make_tensor("o", F32, [], [1.0])),
        node("Add", "a one", "b", "inner"),
    ]
    return helper.make_function(
        domain, "Plus", ["a"], ["b"], inner, [helper.make_opsetid("", 24)]
    )


def test_a_function_is_checked_with_the_types_of_each_call() -> None:
    nodes = [node("Plus", "x", "y", "wide", domain="own"),
             node("Plus", "h", "z", "half", domain="own")]  # fmt: skip
    bad = model(nodes, {"x": F32, "h": F16}, {"y": F32, "z": F16}, functions=[half_plus()])
    (finding,) = check_types(bad, "g")
    assert finding.place == "g:half(Plus)/inner(Add):B"
    assert verdict(bad)[0] == "types"


def test_a_cast_in_a_function_takes_its_type_from_the_call() -> None:
    cast = node("Cast", "a", "b")
    cast.attribute.append(onnx.AttributeProto(name="to", ref_attr_name="kind", type=2))
    body = helper.make_function(
        "own", "To", ["a"], ["b"], [cast], [helper.make_opsetid("", 24)], ["kind"]
    )
    call = node("To", "x", "h", domain="own", kind=F16)
    good = model([call, node("Add", "h w", "y")], {"x": F32}, {"y": F16}, {"w": F16},
                 functions=[body])  # fmt: skip
    assert check_types(good, "g") == []


def test_a_function_that_calls_itself_ends() -> None:
    body = helper.make_function(
        "own", "Self", ["a"], ["b"], [node("Self", "a", "b", domain="own")],
        [helper.make_opsetid("own", 1)],
    )  # fmt: skip
    bad = model([node("Self", "x", "y", domain="own")], {"x": F32}, {"y": F32},
                functions=[body])  # fmt: skip
    assert check_types(bad, "g") == []


def test_unknown_ops_and_missing_inputs_leave_types_open_and_raise_nothing() -> None:
    odd = model(
        [node("Mystery", "x", "h", domain="else"), node("Add", "h gone", "y"),
         node("Add", "y", "z"), node("Cast", "x", "k", to=999)],
        {"x": F32}, {"y": F16},
    )  # fmt: skip
    assert [f for f in check_types(odd, "g") if f.code == "types.clash"] == []
