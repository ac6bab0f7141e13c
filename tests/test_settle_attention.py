from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from third_party import Target, fill_weights, lay_out

from artifacts.types.check import check_types
from passes.settle_attention import SettleAttentionPass

PLAIN = """<ir_version: 11, opset_import: ["" : 24]>
g (MASK[2,2] m, KIND[1,1,2,8] q, KIND[1,1,2,8] k, KIND[1,1,2,8] v) => (KIND[1,1,2,8] y) {
    y = Attention <is_causal = 1> (q, k, v, m)
}"""


def parsed(kind: str, mask: str) -> ir.Model:
    return ir.from_proto(
        onnx.parser.parse_model(PLAIN.replace("MASK", mask).replace("KIND", kind))
    )


def attention(model: ir.Model) -> ir.Node:
    return next(node for node in model.graph if node.op_type == "Attention")


def test_a_mask_that_is_causal_already_makes_is_causal_go(tmp_path: Path) -> None:
    bundle = lay_out("artifact-bf16-default", tmp_path)
    model = ir.from_proto(onnx.load(bundle / "model.onnx", load_external_data=False))
    nodes = len(model.graph)
    assert SettleAttentionPass()(model).modified
    assert "is_causal" not in attention(model).attributes
    assert len(model.graph) == nodes
    assert not SettleAttentionPass()(model).modified


def test_without_is_causal_every_value_stays_bit_for_bit(tmp_path: Path) -> None:
    bundle = lay_out("artifact-f16-default-noisy", tmp_path)
    fill_weights(bundle)
    model = ir.from_proto(onnx.load(bundle / "model.onnx", load_external_data=False))
    assert SettleAttentionPass()(model).modified
    onnx.save(ir.to_proto(model), bundle / "settled.onnx")
    before, after = Target(bundle / "model.onnx"), Target(bundle / "settled.onnx")
    for tokens in ([1, 5, 9, 2], [7], [3, 4]):
        expected, got = before.step(tokens), after.step(tokens)
        for name, values in expected.items():
            np.testing.assert_array_equal(got[name], values, err_msg=name)


def test_any_other_mask_in_half_precision_is_widened_by_one_cast() -> None:
    model = parsed("bfloat16", "bfloat16")
    assert SettleAttentionPass()(model).modified
    assert [node.op_type for node in model.graph] == ["Cast", "Attention"]
    assert attention(model).attributes.get_int("is_causal") == 1
    found = check_types(ir.to_proto(model), "g")
    assert "types.clash" not in {finding.code for finding in found}
    assert not SettleAttentionPass()(model).modified


def test_float_and_boolean_masks_are_left() -> None:
    for kind, mask in (("float", "float"), ("bfloat16", "bool"), ("bfloat16", "float")):
        assert not SettleAttentionPass()(parsed(kind, mask)).modified


def test_a_mask_that_lets_a_row_see_ahead_is_not_taken_for_causal(tmp_path: Path) -> None:
    bundle = lay_out("artifact-bf16-default", tmp_path)
    proto = onnx.load(bundle / "model.onnx", load_external_data=False)
    compare = next(node for node in proto.graph.node if node.op_type == "GreaterOrEqual")
    compare.input[:] = [compare.input[1], compare.input[0]]
    model = ir.from_proto(proto)
    assert SettleAttentionPass()(model).modified
    assert attention(model).attributes.get_int("is_causal") == 1
