from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from third_party import Target, fill_weights, lay_out

from passes.guard_norms import GuardNormsPass

NORM = """<ir_version: 11, opset_import: ["" : 24]>
g (KIND[2,3] x) => (KIND[2,3] y) <int64[1] axes = {-1}> {
    s = ReduceSumSquare(x, axes)
    r = Sqrt(s)
    y = Div(x, r)
}"""


def run(proto: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(proto.SerializeToString(), None, ["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": x})
    return y


@pytest.mark.parametrize(("kind", "dtype"), [("float", np.float32), ("float16", np.float16)])
def test_zeros_give_zeros_and_all_else_stays_bit_for_bit(kind: str, dtype: type) -> None:
    proto = onnx.parser.parse_model(NORM.replace("KIND", kind))
    model = ir.from_proto(proto)
    assert GuardNormsPass()(model).modified
    guarded = ir.to_proto(model)
    x = np.array([[0, 0, 0], [3, 0.25, -4]], dtype)
    before, after = run(proto, x), run(guarded, x)
    assert np.isnan(before[0]).all()
    np.testing.assert_array_equal(after[0], np.zeros(3, dtype))
    np.testing.assert_array_equal(after[1], before[1])
    assert not GuardNormsPass()(model).modified


def test_the_fixture_keeps_every_value_over_several_steps(tmp_path: Path) -> None:
    bundle = lay_out("artifact-f32-default", tmp_path)
    fill_weights(bundle)
    model = ir.from_proto(onnx.load(bundle / "model.onnx", load_external_data=False))
    assert GuardNormsPass()(model).modified
    onnx.save(ir.to_proto(model), bundle / "guarded.onnx")
    before, after = Target(bundle / "model.onnx"), Target(bundle / "guarded.onnx")
    for tokens in ([1, 5, 9, 2], [7], [3, 4]):
        expected, got = before.step(tokens), after.step(tokens)
        for name, values in expected.items():
            np.testing.assert_array_equal(got[name], values, err_msg=name)
