"""Public reports of types that do not agree, each in its smallest form."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as state
from third_party import Target, lay_out, lay_out_whole
from tiny_bundle import findings, load, mended, operators, ran, write

from export.bundles.check import check_bundle
from export.errors import BundleError
from export.importing import import_bundle
from passes.fold_offsets import FoldOffsetsPass


def half(*numbers: float) -> np.ndarray:
    return np.array([numbers], np.float16)


def test_a01_two_types_of_one_addition(tmp_path: Path) -> None:
    bundle = write(
        tmp_path / "b",
        """g (bfloat16[1,4] hidden, float[1,4] residual) => (bfloat16[1,4] y) {
            h = Identity(hidden)  r = Identity(residual)  s = Add(h, r)  y = Identity(s)
        }""",
    )
    (clash,) = [f for f in findings(bundle) if f.code == "types.clash"]
    assert "bfloat16" in clash.message and "float" in clash.message
    assert clash.place.startswith("target:") and "(Add)" in clash.place
    with pytest.raises(state.Fail, match="bound to different types"):
        load(bundle)
    load(mended(bundle, "fp32"))


def test_a02_one_branch_left_wide(tmp_path: Path) -> None:
    bundle = write(
        tmp_path / "b",
        """g (float16[1,4] x) => (float16[1,4] y) {
            wide = Cast<to = 1>(x)  gate = Sigmoid(wide)  core = Relu(x)  y = Add(gate, core)
        }""",
    )
    (clash,) = [f for f in findings(bundle) if f.code == "types.clash"]
    assert "Sigmoid" in clash.message and "Relu" in clash.message
    got = ran(mended(bundle), x=half(0, 1, -1, 2))
    np.testing.assert_allclose(got, half(0.5, 1.731, 0.269, 2.881), atol=2e-3)


def test_a03_an_epsilon_that_stayed_wide(tmp_path: Path) -> None:
    bundle = write(
        tmp_path / "b",
        "g (float16[1,4] x) => (float16[1,4] y) <float e = {0.001}> { y = Add(x, e) }",
    )
    assert len(findings(bundle)) >= 1
    output = mended(bundle)
    assert operators(output) == ["Add"]  # the constant is converted, nothing is cast
    np.testing.assert_allclose(
        ran(output, x=half(1, 2, 3, 4)), half(1.001, 2, 3, 4), atol=2e-3
    )


def test_a04_an_island_of_another_type_up_to_the_graphs_edge(tmp_path: Path) -> None:
    bundle = write(
        tmp_path / "b",
        """g (float16[1,4] x, float[1,4] w) => (float16[1,4] y, float16[1,4] z) {
            a = Relu(x)  b = Mul(a, w)  y = Add(b, x)  z = Identity(b)
        }""",
    )
    output = mended(bundle)
    model = onnx.load(output / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert [o.type.tensor_type.elem_type for o in model.graph.output] == [10, 10]
    got = ran(output, x=half(1, -2, 3, 4), w=np.full((1, 4), 0.5, np.float32))
    np.testing.assert_array_equal(got, half(1.5, -2, 4.5, 6))


def test_a05_float_beside_int64(tmp_path: Path) -> None:
    bundle = write(
        tmp_path / "b",
        """g (float[1,4] x) => (float[1,4] y) {
            n = Size(x)  y = Mul(x, n)
        }""",
    )
    assert [f.code for f in findings(bundle)] == ["types.clash"]
    output = mended(bundle)
    x = np.array([[1, 2, 3, 4]], np.float32)
    np.testing.assert_array_equal(ran(output, x=x), 4 * x)
    assert operators(output) == ["Size", "Cast", "Mul"]


def test_a07_a_pad_value_of_another_type(tmp_path: Path) -> None:
    bundle = write(
        tmp_path / "b",
        """g (float16[1,2] x) => (float16[1,4] y)
        <int64[4] pads = {0, 1, 0, 1}, float v = {3}> {
            y = Pad(x, pads, v)
        }""",
    )
    assert any(f.code == "types.clash" for f in findings(bundle))
    output = mended(bundle)
    assert operators(output) == ["Pad"]
    np.testing.assert_array_equal(ran(output, x=half(1, 2)), half(3, 1, 2, 3))


def test_a08_a_declaration_that_a_cast_contradicts(tmp_path: Path) -> None:
    bundle = write(
        tmp_path / "b",
        """g (float[1,4] x) => (float16[1,4] y) <float[1,4] c> {
            c = Cast<to = 10>(x)  y = Relu(c)
        }""",
    )
    onnx.checker.check_model(onnx.load(bundle / "model.onnx"))  # it does not see it
    assert [f.code for f in findings(bundle)] == ["types.value_info"]
    with pytest.raises(state.Fail):
        load(bundle)
    output = mended(bundle)
    assert operators(output) == ["Cast", "Relu"]
    load(output)


def test_a09_casts_stand_before_what_reads_them(tmp_path: Path) -> None:
    bundle = write(
        tmp_path / "b",
        """g (float[1,4] a, float16[1,4] b) => (float16[1,4] y, float[1,4] z) {
            s = Relu(a)  y = Mul(b, s)  z = Mul(s, b)
        }""",
    )
    model = onnx.load(mended(bundle) / "model.onnx")
    made = {value.name for value in model.graph.input}
    for node in model.graph.node:
        assert set(node.input) <= made
        made.update(node.output)
    onnx.checker.check_model(model, full_check=True)


def test_a10_a_narrowing_pair_stays(tmp_path: Path) -> None:
    bundle = write(
        tmp_path / "b",
        """g (float[1,2] x, float16[1,2] e) => (float16[1,2] y) {
            a = Cast<to = 16>(x)  b = Cast<to = 1>(a)  y = Add(b, e)
        }""",
    )
    output = mended(bundle)
    x = np.array([[1.00390625, 3.0]], np.float32)  # bfloat16 drops the last bit of it
    got = ran(output, x=x, e=half(0, 0))
    narrowed = x.astype(ml_dtypes.bfloat16).astype(np.float16)
    np.testing.assert_array_equal(got, narrowed)
    assert narrowed[0, 0] != x[0, 0]


def test_a12_a_norms_scale_of_another_type(tmp_path: Path) -> None:
    bundle = write(
        tmp_path / "b",
        """g (float[1,2] x) => (float[1,2] y) <float16[2] s = {0, 0}> {
            y = LayerNormalization(x, s)
        }""",
    )
    onnx.checker.check_model(onnx.load(bundle / "model.onnx"))
    assert any(f.code == "types.clash" for f in findings(bundle))
    output = mended(bundle)
    assert operators(output) == ["LayerNormalization"]
    assert ran(output, x=np.array([[1, 2]], np.float32)).dtype == np.float32


def test_a14_operators_without_a_bfloat16_kernel(tmp_path: Path) -> None:
    bundle = write(
        tmp_path / "b",
        """g (bfloat16[1,4] x) => (bfloat16[1,4] y) {
            a = Exp(x)  b = Sqrt(a)  c = Reciprocal(b)  y = Sigmoid(c)
        }""",
    )
    told = findings(bundle)
    assert {f.code for f in told} == {"types.kernel"}
    assert {f.message.split("kernel for ")[1].split(" ")[0] for f in told} == {
        "Exp", "Sqrt", "Reciprocal", "Sigmoid"
    }  # fmt: skip
    with pytest.raises(state.NotImplemented):
        load(bundle)
    output = mended(bundle, "fp32")
    assert findings(output) == []
    load(output)


def test_a15_a_missing_kernel_is_told_before_types_agree(tmp_path: Path) -> None:
    bundle = write(
        tmp_path / "b",
        """g (bfloat16[2,2] x, bfloat16[2,2] w, float[2,2] r) => (float[2,2] y) {
            p = MatMul(x, w)  y = Add(p, r)
        }""",
    )
    codes = [f.code for f in findings(bundle)]
    assert "types.clash" in codes and "types.kernel" in codes
    load(mended(bundle, "fp32"))


def test_a16_folding_keeps_bfloat16() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 23]>
        g (bfloat16[1,2] x) => (bfloat16[1,2] y)
        <bfloat16[2] w = {0, 0}, bfloat16 one = {16256}> {
            s = Add(w, one)  y = RMSNormalization(x, s)
        }"""
    )
    folded = ir.from_proto(onnx.shape_inference.infer_shapes(model))
    assert FoldOffsetsPass(lambda value: value.const_value.numpy())(folded).modified
    (weight,) = ir.to_proto(folded).graph.initializer
    assert weight.data_type == onnx.TensorProto.BFLOAT16
    np.testing.assert_array_equal(
        onnx.numpy_helper.to_array(weight).astype(np.float32), [1, 1]
    )


@pytest.mark.parametrize("name", ["artifact-f32-default", "oga-fp32-cpu-w0"])
def test_a18_a_mended_graph_gives_the_same_with_and_without_optimiser(
    tmp_path: Path, name: str
) -> None:
    bundle = lay_out_whole(name, tmp_path)
    output = mended(bundle)
    plain, optimised = (Target(output / "model.onnx", optimise=o) for o in (False, True))
    for tokens in ([1, 5, 9, 2], [7], [3, 4]):
        expected, got = plain.step(tokens), optimised.step(tokens)
        for key, values in expected.items():
            np.testing.assert_allclose(got[key], values, atol=2e-5, rtol=1e-5, err_msg=key)


def test_a20_the_heads_block_is_no_layer_and_rotary_sizes_are_kept(tmp_path: Path) -> None:
    bundle = lay_out_whole("oga-fp32-cpu-w0", tmp_path)
    spec = import_bundle(bundle).spec
    assert len(spec.layers) == 4 and spec.head is not None
    assert (spec.attention.rotary_dim, spec.attention.head_dim) == (16, 64)
    config = json.loads((bundle / "genai_config.json").read_text())
    config["model"]["decoder"]["num_hidden_layers"] = 5
    (bundle / "genai_config.json").write_text(json.dumps(config))
    assert "metadata.layers" in {f.code for f in check_bundle(bundle)}
    model = onnx.load(bundle / "model.onnx", load_external_data=False)
    turn = next(n for n in model.graph.node if n.op_type == "MRotaryEmbedding")
    next(a for a in turn.attribute if a.name == "interleaved").i = 1
    onnx.save(model, bundle / "model.onnx")
    with pytest.raises(BundleError, match="its interleaved is 1, not 0"):
        import_bundle(bundle)


def test_a21_matrices_that_quantisation_did_not_reach(tmp_path: Path) -> None:
    bundle = lay_out("artifact-int4-f32-cpu", tmp_path)
    told = [f for f in check_bundle(bundle) if f.code == "weights.unquantised"]
    assert ["linear_attention" in f.message for f in told] == [True, False]
    assert told[0].message.startswith("864768 bytes of ")
