"""Types and shapes of ONNX Runtime's own operators."""

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from golden import parse

from passes.contrib import DOMAIN, infer_outputs, is_contrib

OPERATORS = {
    "FusedMatMul": (
        "float[1,3,4] a, float[5,4] b",
        "float[1,3,5] y",
        "y = com.microsoft.FusedMatMul<transB=1>(a, b)",
    ),
    "FusedMatMul untransposed": (
        "float[2,1,3,4] a, float[4,5] b",
        "float[2,1,3,5] y",
        "y = com.microsoft.FusedMatMul(a, b)",
    ),
    "QuickGelu": ("float[1,3,4] a", "float[1,3,4] y", "y = com.microsoft.QuickGelu(a)"),
    "SkipSimplifiedLayerNormalization": (
        "float[1,3,4] a, float[1,3,4] b, float[4] w",
        "float[1,3,4] y, float[1,3,4] s",
        "y, , , s = com.microsoft.SkipSimplifiedLayerNormalization(a, b, w)",
    ),
    "GatedRMSNorm": (
        "float[1,3,8] a, float[4] w, float[1,3,8] z",
        "float[1,3,8] y",
        'y = com.microsoft.GatedRMSNorm<activation="silu">(a, w, z)',
    ),
    "LinearAttentionGate": (
        "float[1,3,4] a, float[4] w, float[4] d, float[1,3,4] b",
        "float[1,3,4] g, float[1,3,4] e",
        "g, e = com.microsoft.LinearAttentionGate(a, w, d, b)",
    ),
    "CausalConvWithState": (
        "float[1,5,6] x, float[6,1,4] w, float[1,3,6] p",
        "float[1,5,6] y, float[1,3,6] n",
        "y, n = com.microsoft.CausalConvWithState<ndim=1, channels_last=1>(x, w, , p)",
    ),
    "LinearAttention": (
        "float[1,5,8] q, float[1,5,8] k, float[1,5,12] v, float[1,4,4,3] p, float[1,5,4] d",
        "float[1,5,12] y, float[1,4,4,3] n",
        "y, n = com.microsoft.LinearAttention<q_num_heads=2, kv_num_heads=4, "
        'update_rule="gated_delta">(q, k, v, p, d, d)',
    ),
    "GroupQueryAttention": (
        "float[1,2,16] q, float[1,2,8] k, float[1,2,8] v, float[1,1,9,8] pk, "
        "float[1,1,9,8] pv, int32[1] last, int32 total",
        "float[1,2,16] y, float[1,1,9,8] nk, float[1,1,9,8] nv",
        "y, nk, nv = com.microsoft.GroupQueryAttention<num_heads=2, kv_num_heads=1>"
        "(q, k, v, pk, pv, last, total)",
    ),
}


def untyped(inputs, outputs, line):
    """The one node of a graph, its outputs stripped of type and shape; and what they had."""
    model = parse(f"g ({inputs}) => ({outputs}) {{ {line} }}")
    node = model.graph.node(0)
    known = {v.name: (v.dtype, v.shape) for v in node.outputs if v.name}
    for value in node.outputs:
        value.type = value.shape = None
    return model, node, known


@pytest.mark.parametrize("case", OPERATORS.values(), ids=OPERATORS)
def test_outputs_get_the_types_and_shapes_that_the_kernel_gives(case):
    model, node, known = untyped(*case)
    infer_outputs(node)
    assert {v.name: (v.dtype, v.shape) for v in node.outputs if v.name} == known
    session = ort.InferenceSession(
        ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    feeds = {v.name: np.ones(v.shape.numpy(), v.dtype.numpy()) for v in model.graph.inputs}
    if "total" in feeds:
        feeds["total"] = np.array(9, np.int32)
    names = [v.name for v in session.get_outputs()]
    for name, array in zip(names, session.run(names, feeds), strict=True):
        assert array.shape == known[name][1]


@pytest.mark.parametrize("case", OPERATORS.values(), ids=OPERATORS)
def test_inferring_again_changes_nothing(case):
    _, node, known = untyped(*case)
    infer_outputs(node)
    infer_outputs(node)
    assert {v.name: (v.dtype, v.shape) for v in node.outputs if v.name} == known


def test_named_sizes_stay_named():
    _, node, _ = untyped(
        "float[1,S,4] a, float[5,4] b",
        "float[1,S,5] y",
        "y = com.microsoft.FusedMatMul<transB=1>(a, b)",
    )
    infer_outputs(node)
    assert str(node.outputs[0].shape) == "[1,S,5]"


def test_packed_weights_say_their_width():
    _, node, _ = untyped(
        "float16[1,S,32] a, uint8[5,1,16] b, float16[5] s",
        "float16[1,S,5] y",
        "y = com.microsoft.MatMulNBits<K=32, N=5, bits=4, block_size=32>(a, b, s)",
    )
    infer_outputs(node)
    assert str(node.outputs[0].shape) == "[1,S,5]"
    assert node.outputs[0].dtype == ir.DataType.FLOAT16


def test_a_window_of_states_has_an_axis_more():
    inputs, outputs, line = OPERATORS["LinearAttention"]
    _, node, _ = untyped(inputs, outputs, line.replace("<q_num", "<state_window=5, q_num"))
    infer_outputs(node)
    assert node.outputs[1].shape == [5, 1, 4, 4, 3]


def test_the_state_keeps_its_own_type():
    inputs, outputs, line = OPERATORS["LinearAttention"]
    _, node, _ = untyped(inputs.replace("float[1,5,12]", "float16[1,5,12]"), outputs, line)
    infer_outputs(node)
    assert node.outputs[0].dtype == ir.DataType.FLOAT16
    assert node.outputs[1].dtype == ir.DataType.FLOAT


REFUSED = {
    "no shape": (
        "float a, float[5,4] b",
        "y = com.microsoft.FusedMatMul(z, b)",
        "input 0 has no",
    ),
    "batch on the right": (
        "float[1,3,4] a, float[2,4,5] b",
        "y = com.microsoft.FusedMatMul(a, b)",
        "only a plain matrix on the right",
    ),
    "rows moved": (
        "float[1,4,3] a, float[4,5] b",
        "y = com.microsoft.FusedMatMul<transA=1>(a, b)",
        "only a plain matrix on the right",
    ),
}


@pytest.mark.parametrize(("inputs", "line", "said"), REFUSED.values(), ids=REFUSED)
def test_what_decides_no_shape_is_refused(inputs, line, said):
    model = parse(f"g ({inputs}) => (float[1,3,5] y) {{ z = elsewhere.Z(a) {line} }}")
    with pytest.raises(ValueError, match=said):
        infer_outputs(model.graph.node(1))


def test_an_operator_that_is_not_written_here_is_refused_by_name():
    node = ir.node("FusedConv", [], domain=DOMAIN)
    with pytest.raises(KeyError, match="FusedConv"):
        infer_outputs(node)


def test_an_operator_is_told_by_domain_and_name():
    theirs, onnx = (
        ir.node("LinearAttention", [], domain=DOMAIN),
        ir.node("LinearAttention", []),
    )
    assert is_contrib(theirs, "QuickGelu", "LinearAttention")
    assert not is_contrib(theirs, "QuickGelu")
    assert not is_contrib(onnx, "LinearAttention")
