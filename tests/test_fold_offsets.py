import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from golden import check, parse

from passes.fold_offsets import FoldOffsetsPass

GRAPH = """g (KIND[2,3] x) => (KIND[2,3] y)
<KIND[3] w = {0, 0, 0}, KIND one = {1}> {
    s = Add(w, one)
    y = RMSNormalization(x, s)
}"""
CAST = """g (float[2,3] x) => (float[2,3] y)
<bfloat16[3] w = {0, 0, 0}, float one = {1}> {
    f = Cast<to = 1>(w)
    s = Add(one, f)
    y = RMSNormalization(x, s)
}"""


def made(text: str) -> ir.Model:
    """The text takes bits for numbers in half precision, so they are put in here."""
    model = parse(text)
    for name, numbers in (("w", [0.5, -1, 0.25]), ("one", 2 if "{2}" in text else 1)):
        value = model.graph.initializers[name]
        array = np.array(numbers, value.dtype.numpy())
        value.const_value = ir.Tensor(array, dtype=value.dtype, name=name)
    return model


def read(value: ir.Value):
    return value.const_value.numpy()


@pytest.mark.parametrize(("text", "kind"), [(GRAPH, "float16"), (CAST, "float")])
def test_the_sum_is_stored_in_the_type_that_the_addition_gave(text: str, kind: str) -> None:
    model = made(text.replace("KIND", kind))
    assert FoldOffsetsPass(read)(model).modified
    check(model)
    (node,) = model.graph
    assert node.op_type == "RMSNormalization"
    stored = node.inputs[1].const_value.numpy()
    assert str(stored.dtype) == {"float": "float32"}.get(kind, kind)
    np.testing.assert_array_equal(stored.astype(np.float32), [1.5, 0, 1.25])
    assert list(model.graph.initializers) == ["w_plus_one"]
    assert not FoldOffsetsPass(read)(model).modified


def test_the_sum_is_taken_in_float32() -> None:
    model = made(CAST)
    small = np.array([2**-9, -(2**-9), 3e-3], ml_dtypes.bfloat16)
    model.graph.initializers["w"].const_value = ir.Tensor(small, name="w")
    FoldOffsetsPass(read)(model)
    stored = model.graph.initializers["w_plus_one"].const_value.numpy()
    np.testing.assert_array_equal(stored, np.float32(1) + small.astype(np.float32))
    assert (stored.astype(ml_dtypes.bfloat16) != stored).all()  # eight bits would lose it


@pytest.mark.parametrize(
    "text",
    [
        GRAPH.replace("KIND", "float"),  # nothing is lost there
        GRAPH.replace("KIND", "float16").replace("{1}", "{2}"),
        GRAPH.replace("KIND", "float16").replace("RMSNormalization(x, s)", "Mul(x, s)"),
    ],
)
def test_other_additions_are_left(text: str) -> None:
    model = made(text)
    assert not FoldOffsetsPass(read)(model).modified


def test_a_weight_that_cannot_be_read_is_left() -> None:
    model = made(GRAPH.replace("KIND", "float16"))
    assert not FoldOffsetsPass(lambda value: None)(model).modified
