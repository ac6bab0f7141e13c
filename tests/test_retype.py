import onnx
import onnx_ir as ir
from one_node import verdict

from artifacts.types.check import check_types
from passes.retype import RetypePass

HEAD = '<ir_version: 11, opset_import: ["" : 24]>\n'


def retyped(text: str) -> onnx.ModelProto:
    model = ir.from_proto(onnx.parser.parse_model(HEAD + text))
    to_float = RetypePass(ir.DataType.BFLOAT16, ir.DataType.FLOAT)
    assert to_float(model).modified
    proto = ir.to_proto(model)
    assert check_types(proto, "g") == []
    assert verdict(proto)[0] == "loads", verdict(proto)[1]
    return proto


def ops(graph: onnx.GraphProto) -> list[str]:
    return [node.op_type for node in graph.node]


def test_a_graph_computes_in_the_other_type_behind_its_own_ports() -> None:
    proto = retyped("g (bfloat16[2] x) => (bfloat16[2] y) { h = Exp(x) y = Sqrt(h) }")
    assert ops(proto.graph) == ["Cast", "Exp", "Sqrt", "Cast"]
    assert proto.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.BFLOAT16
    assert proto.graph.output[0].type.tensor_type.elem_type == onnx.TensorProto.BFLOAT16
    assert proto.graph.output[0].name == "y"


def test_casts_between_the_two_types_go() -> None:
    proto = retyped("""g (bfloat16[2] x) => (bfloat16[2] y) <float[2] w, bfloat16[2] n> {
        w = Cast<to = 1>(x)
        e = Exp(w)
        n = Cast<to = 16>(e)
        y = Neg(n)
    }""")
    assert ops(proto.graph) == ["Cast", "Exp", "Neg", "Cast"]


def test_bodies_of_branches_follow() -> None:
    proto = retyped("""g (bfloat16[2] x, bool c) => (bfloat16[2] y) {
        y = If (c) <
            then_branch = t () => (bfloat16[2] a) { a = Exp(x) },
            else_branch = e () => (bfloat16[2] b) { b = Neg(x) }
        >
    }""")
    assert ops(proto.graph) == ["Cast", "If", "Cast"]


def test_a_model_without_the_type_is_left() -> None:
    text = HEAD + "g (float[2] x) => (float[2] y) { y = Exp(x) }"
    model = ir.from_proto(onnx.parser.parse_model(text))
    assert not RetypePass(ir.DataType.BFLOAT16, ir.DataType.FLOAT)(model).modified
