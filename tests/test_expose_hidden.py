import onnx
import onnx_ir as ir

from passes.expose_hidden import ExposeHiddenPass

TEXT = """<ir_version: 11, opset_import: ["" : 24]>
g (float[1,2,8] x, float[8] w, float[8,16] head) => (float[1,2,16] logits) {
    hidden_states = Exp(x)
    n = RMSNormalization(hidden_states, w)
    scores = MatMul(n, head)
    logits = Identity(scores)
}"""


def model() -> ir.Model:
    return ir.from_proto(onnx.parser.parse_model(TEXT))


def test_what_the_lm_head_reads_becomes_an_output_under_a_free_name() -> None:
    parsed = model()
    assert ExposeHiddenPass()(parsed).modified
    output = parsed.graph.outputs[-1]
    assert output.name == "hidden_states_post_norm"
    assert output.dtype == ir.DataType.FLOAT
    maker = output.producer()
    assert maker is not None and maker.inputs[0] is not None
    assert maker.inputs[0].name == "n"
    onnx.checker.check_model(ir.to_proto(parsed))


def test_an_output_that_is_that_state_already_is_enough() -> None:
    parsed = model()
    ExposeHiddenPass()(parsed)
    assert not ExposeHiddenPass()(parsed).modified


def test_a_graph_without_an_lm_head_is_left() -> None:
    text = TEXT.replace("logits = Identity(scores)", "logits = Exp(scores)")
    assert not ExposeHiddenPass()(ir.from_proto(onnx.parser.parse_model(text))).modified
