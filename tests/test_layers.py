"""The layers' equations against NumPy, where a kernel stands for more than its name says."""

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from canonical import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from onnxscript import GraphBuilder

from artifacts import GdnSpec
from export.layers import L2_EPSILON, AddNorm, FeedForward, GatedDeltaNet, Linear, Norm

FLOAT = ir.DataType.FLOAT
HEADS, WIDTH = 2, 16


def session(write, *inputs):
    """Run what `write(op, *values)` gives for inputs [name, shape]."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 24, "com.microsoft": 1}, name="g")
    builder = GraphBuilder(graph)
    values = [builder.input(name, FLOAT, shape) for name, shape in inputs]
    outs = write(builder.op, *values)
    for i, out in enumerate(outs if isinstance(outs, tuple) else (outs,)):
        builder.add_output(out, f"out{i}")
    rng = np.random.default_rng(0)
    for name, value in graph.initializers.items():
        if value.const_value is None:
            array = rng.standard_normal(value.shape.numpy()).astype(np.float32)
            value.const_value = ir.tensor(array, name=name)
    weights = {name: v.const_value.numpy() for name, v in graph.initializers.items()}
    proto = ir.to_proto(ir.Model(graph, ir_version=11)).SerializeToString()
    return ort.InferenceSession(proto, providers=["CPUExecutionProvider"]), weights


def run(made, **feeds):
    return made.run(None, {name: value.astype(np.float32) for name, value in feeds.items()})


SPEC = GdnSpec(
    key_heads=HEADS,
    value_heads=HEADS,
    key_dim=WIDTH,
    value_dim=WIDTH,
    conv_kernel=4,
    output_gate="silu",
)
L2, _ = session(
    lambda op, x: GatedDeltaNet(8, SPEC, 1e-6, FLOAT)._l2(op, x), ("x", [1, 3, HEADS * WIDTH])
)


def l2(x):
    heads = x.astype(np.float64).reshape(1, 3, HEADS, WIDTH)
    normed = heads / np.sqrt((heads**2).sum(-1, keepdims=True) + L2_EPSILON)
    return normed.reshape(x.shape)


@settings(max_examples=50, deadline=None)
@given(
    arrays(
        np.float32,
        (1, 3, HEADS * WIDTH),
        elements=st.floats(-1e4, 1e4, width=32, allow_subnormal=False),
    )
)
def test_the_l2_norm_is_x_over_the_root_of_the_sum_plus_epsilon(x):
    np.testing.assert_allclose(run(L2, x=x)[0], l2(x), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("size", [1e-5, 1e-3, 1.0])
def test_the_l2_epsilon_stands_on_the_sum(size):
    """Near zero an epsilon on the mean would differ by the root of the width."""
    x = np.random.default_rng(1).standard_normal((1, 3, HEADS * WIDTH)) * size
    np.testing.assert_allclose(run(L2, x=x)[0], l2(x), rtol=1e-5, atol=1e-7)


def test_a_zero_row_stays_zero_and_finite():
    x = np.zeros((1, 3, HEADS * WIDTH))
    np.testing.assert_array_equal(run(L2, x=x)[0], x)


def test_a_linear_layer_multiplies_by_the_transposed_weight():
    made, w = session(lambda op, x: Linear(5, 7, FLOAT, "w")(op, x), ("x", [1, 3, 5]))
    x = np.random.default_rng(2).standard_normal((1, 3, 5))
    assert w["w"].shape == (7, 5)
    np.testing.assert_allclose(run(made, x=x)[0], x @ w["w"].T, rtol=1e-5, atol=1e-6)


def rms(x, w, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * w


def test_a_norm_multiplies_by_the_weight_itself():
    made, w = session(lambda op, x: Norm(5, 0.1, FLOAT, "w")(op, x), ("x", [1, 3, 5]))
    x = np.random.default_rng(3).standard_normal((1, 3, 5))
    np.testing.assert_allclose(run(made, x=x)[0], rms(x, w["w"], 0.1), rtol=1e-5, atol=1e-6)


def test_a_residual_norm_gives_the_norm_and_the_sum():
    made, w = session(
        lambda op, d, x: AddNorm(5, 0.1, FLOAT, "w")(op, d, x),
        ("d", [1, 3, 5]),
        ("x", [1, 3, 5]),
    )
    d, x = np.random.default_rng(4).standard_normal((2, 1, 3, 5))
    normed, total = run(made, d=d, x=x)
    np.testing.assert_allclose(total, d + x, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(normed, rms(d + x, w["w"], 0.1), rtol=1e-5, atol=1e-6)


def test_the_feed_forward_is_swiglu():
    made, w = session(lambda op, x: FeedForward(5, 6, FLOAT)(op, x), ("x", [1, 3, 5]))
    x = np.random.default_rng(5).standard_normal((1, 3, 5))
    gate, up, down = (w[f"mlp.{name}"] for name in ("gate", "up", "down"))
    silu = x @ gate.T / (1 + np.exp(-(x @ gate.T)))
    want = (silu * (x @ up.T)) @ down.T
    np.testing.assert_allclose(run(made, x=x)[0], want, rtol=1e-4, atol=1e-5)


def test_weights_carry_the_names_a_checkpoint_gives_them():
    """The canonical names are a contract with the reader of checkpoints."""
    names = set(tiny().target_graph(8).graph.initializers)
    assert names == {*tiny().canonical_weights, "rotary.cos", "rotary.sin"} - {
        n for n in tiny().canonical_weights if n.startswith("head.")
    }
