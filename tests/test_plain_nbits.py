import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from passes.plain_nbits import PlainNBitsPass

N, K, BLOCK = 6, 96, 32


def product(zeros: np.ndarray | None, *, bias: bool) -> onnx.ModelProto:
    """Three blocks a row: an odd number, so a row of zero points ends in half a byte."""
    rng = np.random.default_rng(1)
    stored = {
        "w": rng.integers(0, 256, (N, K // BLOCK, BLOCK // 2), np.uint8),
        "s": rng.standard_normal(N * K // BLOCK).astype(np.float32),
    }
    inputs = ["x", "w", "s", "", "", ""]
    if zeros is not None:
        stored["z"], inputs[3] = zeros, "z"
    if bias:
        stored["b"], inputs[5] = rng.standard_normal(N).astype(np.float32), "b"
    node = onnx.helper.make_node(
        "MatMulNBits", inputs, ["y"], name="mm", domain="com.microsoft",
        K=K, N=N, bits=4, block_size=BLOCK,
    )  # fmt: skip
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [node], "g", [value("x", 1, ["m", K])], [value("y", 1, ["m", N])],
        [onnx.numpy_helper.from_array(array, name) for name, array in stored.items()],
    )  # fmt: skip
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)


def run(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(model.SerializeToString(), None, ["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": x})
    return y


def read(value: ir.Value):
    return value.const_value.numpy()


def zero_points(low: int, high: int, pad: int) -> np.ndarray:
    rows = np.array([low | high << 4, low | pad << 4], np.uint8)
    return np.tile(rows, N)


@pytest.mark.parametrize("pad", [0, 8])
@pytest.mark.parametrize("bias", [False, True])
def test_c12_the_plain_form_gives_the_same_bits(pad: int, bias: bool) -> None:
    before = product(zero_points(8, 8, pad), bias=bias)
    model = ir.from_proto(before)
    assert PlainNBitsPass(read)(model).modified
    after = ir.to_proto(model)
    (node, *added) = after.graph.node
    assert len(node.input) == 3 and [n.op_type for n in added] == ["Add"] * bias
    x = np.random.default_rng(2).standard_normal((3, K)).astype(np.float32)
    np.testing.assert_array_equal(run(after, x), run(before, x))
    assert [o.name for o in after.graph.output] == ["y"]
    assert not PlainNBitsPass(read)(model).modified


@pytest.mark.parametrize("zeros", [zero_points(8, 7, 8), zero_points(0, 8, 0)])
def test_zero_points_that_say_something_stay(zeros: np.ndarray) -> None:
    model = ir.from_proto(product(zeros, bias=False))
    assert not PlainNBitsPass(read)(model).modified
    assert len(ir.to_proto(model).graph.node[0].input) >= 4


def test_a_product_that_is_plain_is_left() -> None:
    model = ir.from_proto(product(None, bias=False))
    assert not PlainNBitsPass(read)(model).modified
