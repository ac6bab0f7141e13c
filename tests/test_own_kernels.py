"""OwnMatricesPass: four-bit matrices for MatMulW4, and what it must compute with them."""

import numpy as np
import onnx_ir as ir
import pytest
from golden import assert_graph, check, plain, typed, unchanged, with_weights
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnx_ir.passes import PreconditionError

from artifacts.packed_w4 import BLOCK_ROWS, unpack_rows
from passes.own_kernels import OwnMatricesPass

N, K = 40, 96
RNG = np.random.default_rng(2)


def four_bits(rows, columns=K, dtype=np.float16):
    data = RNG.integers(0, 256, (rows, columns // 32, 16), np.uint8)
    return data, RNG.uniform(0.01, 0.1, (rows, columns // 32)).astype(dtype)


PARTS = {name: four_bits(N) for name in ("up", "gate", "down")}
PACKED = {name: data for name, (data, _) in PARTS.items()}
PACKED |= {f"{name}.scales": scales for name, (_, scales) in PARTS.items()}
ATTRIBUTES = f"K: int = {K}, N: int = {N}, bits: int = 4, block_size: int = 32"
PRODUCT = f"com.microsoft.MatMulNBits<{ATTRIBUTES}>"
PAIR = f"uint8[{N},3,16] W, float16[{N},3] W_scales"


def text_of(body, outputs, *names):
    weights = ", ".join(PAIR.replace("W", name) for name in names)
    return f"g (float16[1,S,{K}] x, {weights}) => ({outputs}) {{\n{body}\n}}"


SINGLE = text_of(
    f"y0 = {PRODUCT}(x, down, down_scales)\n y = Neg(y0)", f"float16[1,S,{N}] y", "down"
)
GATED = text_of(
    f"""a = {PRODUCT}(x, gate, gate_scales)
    s = com.microsoft.QuickGelu<alpha: float = 1.0>(a)
    b = {PRODUCT}(x, up, up_scales)
    y0 = Mul(s, b)
    y = Neg(y0)""",
    f"float16[1,S,{N}] y",
    "gate",
    "up",
)
SINGLE_AFTER = f"""
g (float16[1,S,{K}] x, uint8[1,18432] down_w4) => (float16[1,S,{N}] y) {{
    y0 = onnx_mtp.MatMulW4<N: int = {N}>(x, down_w4)
    y = Neg(y0)
}}
"""
GATED_AFTER = f"""
g (float16[1,S,{K}] x, uint8[1,18432] gate_up_w4) => (float16[1,S,{N}] y) {{
    y0 = onnx_mtp.MatMulW4<N: int = {N}, silu: int = 1>(x, gate_up_w4)
    y = Neg(y0)
}}
"""


def made(text, **parts):
    """The graph with its four-bit weights as initializers, called as QuantisePass does."""
    names = [name for name in PARTS if f" {name}," in text]
    arrays = {}
    for name in names:
        arrays[name], arrays[f"{name}_scales"] = parts.get(name, PARTS[name])
    model = with_weights(typed(text), **arrays)
    for name in names:
        _rename(model, name, f"{name}.q4")
        _rename(model, f"{name}_scales", f"{name}.q4.scales")
    return model


def _rename(model, old, new):
    value = model.graph.initializers.pop(old)
    value.name = new
    value.const_value = value.const_value.renamed(new)
    model.graph.initializers[new] = value


@pytest.mark.parametrize(("before", "after"), [(SINGLE, SINGLE_AFTER), (GATED, GATED_AFTER)])
def test_a_matrix_or_a_pair_becomes_one_node(before, after):
    model, pass_ = made(before), OwnMatricesPass()
    assert pass_(model).modified
    assert pass_.changes == 1
    check(model)
    assert_graph(plain(model), after)


@pytest.mark.parametrize("text", [SINGLE, GATED])
def test_a_second_run_changes_nothing(text):
    model, pass_ = made(text), OwnMatricesPass()
    pass_(model)
    assert unchanged(pass_, model)
    assert unchanged(OwnMatricesPass(), model)


def test_an_output_of_the_graph_keeps_its_name():
    text = SINGLE.replace("y0 = com", "y = com").replace("\n y = Neg(y0)", "")
    model = made(text)
    OwnMatricesPass()(model)
    check(model)
    assert [value.name for value in model.graph.outputs] == ["y"]


NEAR = {
    "another gelu": GATED.replace("alpha: float = 1.0", "alpha: float = 1.702"),
    "an activation that is read twice": GATED.replace(
        "y = Neg(y0)", "t = Neg(s)\n    y = Add(y0, t)"
    ),
    "a gate that is read twice": GATED.replace(
        "y = Neg(y0)", "t = Neg(a)\n    y = Add(y0, t)"
    ),
    "values of other rows": GATED.replace("(x, up,", "(z, up,").replace(
        f"float16[1,S,{K}] x", f"float16[1,S,{K}] x, float16[1,S,{K}] z"
    ),
    "values that are an output": GATED.replace(
        f"float16[1,S,{N}] y", f"float16[1,S,{N}] y, float16[1,S,{N}] b"
    ),
}


@pytest.mark.parametrize("name", NEAR)
def test_what_is_no_gated_pair_becomes_two_nodes(name):
    model, pass_ = made(NEAR[name]), OwnMatricesPass()
    pass_(model)
    assert pass_.changes == 2
    check(model)
    assert sorted(model.graph.initializers) == ["gate.w4", "up.w4"]
    assert not any("silu" in node.attributes for node in model.graph)


def test_graphs_share_what_was_repacked_once():
    pass_, models = OwnMatricesPass(), [made(SINGLE) for _ in range(2)]
    for model in models:
        pass_(model)
    first, second = (model.graph.initializers["down.w4"].const_value for model in models)
    assert first is second


REFUSED = {
    "zero points": SINGLE.replace("scales)\n", "scales, zeros)\n").replace(
        "down_scales)", f"down_scales, uint8[{N},2] zeros)", 1
    ),
    "eight bits": SINGLE.replace("bits: int = 4", "bits: int = 8"),
    "other blocks": SINGLE.replace("block_size: int = 32", "block_size: int = 16"),
    "columns that fill no block": SINGLE.replace(f"K: int = {K}", f"K: int = {K - 8}"),
}
FORM = "four bits in blocks of 32 without zero points or bias, streamed"


@pytest.mark.parametrize("name", REFUSED)
def test_another_form_is_refused(name):
    with pytest.raises(PreconditionError, match=FORM):
        OwnMatricesPass()(made(REFUSED[name]))


def test_weights_that_are_not_there_are_refused():
    with pytest.raises(PreconditionError, match=FORM):
        OwnMatricesPass()(typed(SINGLE))


def test_scales_of_a_type_that_the_kernel_does_not_read_are_refused():
    text = SINGLE.replace("float16", "float")
    with pytest.raises(PreconditionError, match=r"FLOAT; MatMulW4 takes FLOAT16 or BFLOAT16"):
        OwnMatricesPass()(made(text, down=four_bits(N, dtype=np.float32)))


def test_a_refusal_comes_before_anything_has_changed():
    last = f"\n    z = {PRODUCT}(x, down, down_scales)".replace(
        "bits: int = 4", "bits: int = 8"
    )
    text = GATED.replace("y = Neg(y0)", "y = Neg(y0)" + last)
    text = text.replace(") =>", f", {PAIR.replace('W', 'down')}) =>")
    model = made(text.replace(f"[1,S,{N}] y", f"[1,S,{N}] y, float16[1,S,{N}] z"))
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    with pytest.raises(PreconditionError):
        OwnMatricesPass()(model)
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


# values: the pass against the matrices themselves, through the operator's own words


def dequantised(data, scales):
    nibbles = np.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:2], 32)
    wide = (nibbles.astype(np.float64) - 8) * scales.astype(np.float64)[..., None]
    return wide.reshape(len(data), -1)


class MatMulW4(OpRun):
    """``y = x @ W.T``; with silu the rows of W are eight gates, eight values, and so on."""

    op_domain = "onnx_mtp"

    def _run(self, x, packed, N=None, silu=None):
        blocks = x.shape[-1] // 32
        pieces = [unpack_rows(block, BLOCK_ROWS, blocks, x.dtype) for block in packed]
        w = np.concatenate([dequantised(*piece) for piece in pieces])
        y = x.astype(np.float64) @ w.T
        if silu:
            turns = y.reshape(*y.shape[:-1], -1, 2, 8)
            gate, value = (turns[..., i, :].reshape(*y.shape[:-1], -1) for i in (0, 1))
            y = gate / (1 + np.exp(-gate)) * value
        return (y[..., :N].astype(x.dtype),)


@pytest.mark.parametrize("rows", [N, 8, 300])
def test_what_the_operator_says_is_what_the_matrices_say(rows):
    parts = {name: four_bits(rows) for name in PARTS}
    text = GATED.replace(f"{N},3", f"{rows},3").replace(f"S,{N}]", f"S,{rows}]")
    model = made(text.replace(f"N: int = {N}", f"N: int = {rows}"), **parts)
    OwnMatricesPass()(model)
    x = RNG.standard_normal((1, 3, K)).astype(np.float16)
    proto = ir.to_proto(model)
    (got,) = ReferenceEvaluator(proto, new_ops=[MatMulW4]).run(None, {"x": x})
    gate, up = (x.astype(np.float64) @ dequantised(*parts[n]).T for n in ("gate", "up"))
    want = -(gate / (1 + np.exp(-gate)) * up)
    np.testing.assert_allclose(got, want, rtol=2**-10, atol=1e-6)
