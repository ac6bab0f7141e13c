"""The sequence that makes one row straight-line, on hand-written and on foreign graphs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from gdn_scan import checked, gdn_inputs, gdn_model, run, text

from passes.decode_inline import (
    CallKernelsPass,
    SeparateFunctionOutputsPass,
    decode_inline_passes,
)
from passes.inline_single_trip import InlineSingleTripPass

BUNDLE = Path(__file__).parent / "data" / "mobius_target.onnx"
"""The target of a mobius bundle, 3 GDN layers and 1 attention layer, without its weights."""


def bundle(rows: int) -> ir.Model:
    """The bundle's graph pinned to `rows` rows, with small random weights."""
    model = ir.load(BUNDLE)
    sizes = {"batch": 1, "sequence_len": rows, "past_sequence_len": 2}
    sizes |= {"past_seq_len + seq_len": 2 + rows, "past_sequence_len + sequence_len": 2 + rows}
    for value in (*model.graph.inputs, *model.graph.outputs):
        assert value.shape is not None
        value.shape = ir.Shape([sizes.get(str(dim), dim) for dim in value.shape])
    rng = np.random.default_rng(4)
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor):
            weights = 0.2 * rng.standard_normal(tensor.shape.numpy())
            value.const_value = ir.Tensor(
                weights.astype(tensor.dtype.numpy()), name=value.name
            )
    return model


def bundle_feeds(model: ir.Model) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    feeds = {}
    for value in model.graph.inputs:
        assert value.shape is not None and value.dtype is not None
        shape = value.shape.numpy()
        feeds[str(value.name)] = rng.standard_normal(shape).astype(value.dtype.numpy())
    feeds["input_ids"][:] = 7
    feeds["attention_mask"][:] = 1
    feeds["position_ids"][:] = 2
    return feeds


def apply(model: ir.Model, passes: tuple[ir.passes.PassBase, ...]) -> dict[str, int | None]:
    """Run one by one; pass name -> its changes."""
    done: dict[str, int | None] = {}
    for step in passes:
        step(model)
        done[type(step).__name__] = getattr(step, "changes", None)
    return done


def ops(model: ir.Model) -> set[tuple[str, str]]:
    return {(node.domain, node.op_type) for node in model.graph.all_nodes()}


def test_a_mobius_bundle_becomes_straight_line_at_one_row_and_keeps_its_values() -> None:
    before, after = bundle(rows=1), bundle(rows=1)
    done = apply(after, decode_inline_passes())
    assert done["InlineSingleTripPass"] == 3
    assert not after.functions
    assert ("", "Scan") not in ops(after)
    assert {domain for domain, _ in ops(after)} == {""}
    assert [v.name for v in after.graph.inputs] == [v.name for v in before.graph.inputs]
    feeds = bundle_feeds(before)
    expected, got = run(before, feeds), run(checked(after), feeds)
    assert list(got) == list(expected)
    for name, value in expected.items():
        # ONNX Runtime computes the former calls with its own kernels, in another order of sums
        np.testing.assert_allclose(got[name], value, rtol=0, atol=2e-5, err_msg=name)


def test_a_mobius_bundle_of_two_rows_is_refused_with_each_scan_named() -> None:
    model = bundle(rows=2)
    with pytest.raises(ir.passes.PreconditionError, match="3 nodes remain") as refusal:
        apply(model, decode_inline_passes())
    assert str(refusal.value).count("has extent 2 on axis 0, it must be 1") == 3


def test_second_run_changes_nothing() -> None:
    model = bundle(rows=1)
    apply(model, decode_inline_passes())
    once = text(model)
    for step in decode_inline_passes():
        if type(step).__name__ != "ShapeInferencePass":  # it may learn more from itself
            assert not step(model).modified, type(step).__name__
    apply(model, decode_inline_passes())
    assert text(model) == once


KERNELS = frozenset(
    ("com.microsoft", name)
    for name in (
        "LinearAttention",
        "CausalConvWithState",
        "SkipSimplifiedLayerNormalization",
    )
)


def test_functions_kept_by_name_become_calls_of_the_runtimes_own_op() -> None:
    before, after = bundle(rows=1), bundle(rows=1)
    done = apply(after, decode_inline_passes(keep=KERNELS))
    assert done["CallKernelsPass"] == 14
    assert done["InlineSingleTripPass"] == 0
    assert not after.functions
    assert ops(after) >= KERNELS
    feeds = bundle_feeds(before)
    expected, got = run(before, feeds), run(after, feeds)
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=0, atol=2e-5, err_msg=name)


def test_the_recurrence_alone_keeps_its_bits() -> None:
    model = gdn_model(rows=1)
    apply(model, decode_inline_passes())
    assert not {("", "Scan"), ("", "Identity"), ("local", "GatedDelta")} & ops(model)
    rng = np.random.default_rng(6)
    feeds = gdn_inputs(rng, 1) | {"past": rng.standard_normal((3, 4, 5)).astype(np.float32)}
    expected, got = run(gdn_model(rows=1), feeds), run(checked(model), feeds)
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


DEFAULTS = """<ir_version: 10, opset_import: ["": 21, "l": 1]>
g (float[2] x) => (float[2] y, float[2] z) {
  y = l.F <alpha = 0.5> (x)
  z = l.F (x)
}
<domain: "l", opset_import: ["": 21]>
F <alpha: float = 0.25> (a) => (b) { b = LeakyRelu <alpha: float = @alpha> (a) }"""


def test_a_functions_defaults_are_written_onto_the_kept_calls() -> None:
    model = ir.from_onnx_text(DEFAULTS)
    keep = CallKernelsPass(frozenset({("l", "F")}))
    assert keep(model).modified and keep.changes == 2
    assert not model.functions
    assert [n.attributes["alpha"].as_float() for n in model.graph] == [0.5, 0.25]
    assert not keep(model).modified and keep.changes == 0


def test_functions_not_named_are_left() -> None:
    model = gdn_model(rows=1)
    assert not CallKernelsPass(frozenset({("l", "F")}))(model).modified
    assert len(model.functions) == 1


HANDED_THROUGH = """<ir_version: 10, opset_import: ["": 21, "l": 1]>
g (float[2] x) => (float[2] y, float[2] z, float[2] w) { y, z, w = l.F (x) }
<domain: "l", opset_import: ["": 21]>
F (a) => (a, b, b) { b = Exp (a) }"""


def test_an_input_that_a_function_hands_through_keeps_its_name() -> None:
    model = ir.from_onnx_text(HANDED_THROUGH)
    apply(model, decode_inline_passes())
    assert [value.name for value in model.graph.inputs] == ["x"]
    x = np.float32([1, 2])
    got = run(checked(model), {"x": x})
    assert list(got) == ["y", "z", "w"]
    np.testing.assert_array_equal(got["y"], x)
    np.testing.assert_array_equal(got["z"], got["w"])
    np.testing.assert_allclose(got["z"], np.exp(x), rtol=1e-6)  # another library's exp


def test_function_outputs_are_separated_once() -> None:
    model = ir.from_onnx_text(HANDED_THROUGH)
    separate = SeparateFunctionOutputsPass()
    assert separate(model).modified and separate.changes == 2
    assert not separate(model).modified and separate.changes == 0
    assert not separate(gdn_model(rows=1)).modified


def test_a_call_that_leaves_out_trailing_outputs_can_be_inlined() -> None:
    model = ir.from_onnx_text(
        HANDED_THROUGH.replace("float[2] y, float[2] z, float[2] w", "float[2] y").replace(
            "y, z, w =", "y ="
        )
    )
    apply(model, decode_inline_passes())
    got = run(checked(model), {"x": np.float32([1, 2])})
    np.testing.assert_array_equal(got["y"], np.float32([1, 2]))


def test_the_inliner_alone_does_not_look_into_calls() -> None:
    model = gdn_model(rows=1)
    with pytest.raises(ir.passes.PreconditionError, match="infer shapes first"):
        InlineSingleTripPass(strict=True)(model)
