"""Four-bit matrices: the rewrite, the rounding, and what ONNX Runtime computes with them."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from golden import assert_graph, check, parse, plain, run, unchanged, with_weights
from safetensors.numpy import load_file
from tiny_builds import HYBRID, build_tiny, options, write_hybrid

from artifacts import Target
from artifacts.rules import check_artifact
from export.build import build
from export.quantisers import MIN_ROWS, pack_rtn
from export.sources import read_source
from passes.quantise import BLOCK, QuantisePass
from passes.streamed import StreamedTensor, from_array

N, K = 160, 64
RNG = np.random.default_rng(5)
W = RNG.standard_normal((N, K)).astype(np.float32)

BEFORE = """
dense (float[1,S,64] x, float[160,64] w) => (float[1,S,160] y) {
    y = com.microsoft.FusedMatMul<transB: int = 1>(x, w)
}
"""
AFTER = """
dense (float[1,S,64] x, uint8[160,2,16] w_q4, float[160,2] w_q4_scales)
    => (float[1,S,160] y) {
    y = com.microsoft.MatMulNBits<K: int = 64, N: int = 160, bits: int = 4,
        block_size: int = 32>(x, w_q4, w_q4_scales)
}
"""


def with_weight(text, **weights):
    return with_weights(parse(text), **weights)


def dequantised(data, scales):
    """``[N, K / 32, 16]`` bytes, the earlier weight low, 8 standing for zero; by NumPy."""
    nibbles = np.stack([data & 15, data >> 4], axis=-1).astype(np.float32) - 8
    blocks = nibbles.reshape(*data.shape[:2], 32)
    return (blocks * scales.astype(np.float32)[..., None]).reshape(data.shape[0], -1)


def operators(model):
    return [node.op_type for node in model.graph]


def test_a_matrix_becomes_its_four_bit_form():
    model = with_weight(BEFORE, w=W)
    pass_ = QuantisePass(pack_rtn)
    assert pass_(model).modified
    assert pass_.changes == 1
    y = model.graph.outputs[0]
    assert (y.name, y.dtype, str(y.shape)) == ("y", ir.DataType.FLOAT, "[1,S,160]")
    assert list(model.graph.initializers) == ["w.q4", "w.q4.scales"]
    check(model)
    assert_graph(plain(model), AFTER)


def test_a_second_run_changes_nothing():
    model = with_weight(BEFORE, w=W)
    pass_ = QuantisePass(pack_rtn)
    pass_(model)
    assert unchanged(pass_, model)
    assert unchanged(QuantisePass(pack_rtn), model)


@pytest.mark.parametrize(
    ("text", "weight"),
    [
        (BEFORE.replace("transB: int = 1", "transB: int = 0").replace("160", "64"), W[:64]),
        (BEFORE.replace("com.microsoft.FusedMatMul<transB: int = 1>", "MatMul"), W),
        (BEFORE.replace("160", "127"), W[:127]),
        (BEFORE.replace("64", "48"), W[:, :48]),
        (BEFORE.replace("transB: int = 1", "transB: int = 1, alpha: float = 0.5"), W),
    ],
    ids=["not transposed", "not this operator", "few rows", "no whole blocks", "scaled"],
)
def test_near_misses_stay(text, weight):
    if "160" in text and "= MatMul" in text:
        text = text.replace("float[160,64] w", "float[64,160] w")
        weight = weight.T.copy()
    assert unchanged(QuantisePass(pack_rtn), with_weight(text, w=weight))


def test_a_matrix_that_is_no_initializer_stays():
    assert unchanged(QuantisePass(pack_rtn), parse(BEFORE))


def test_a_quantiser_that_declines_leaves_the_graph():
    assert unchanged(QuantisePass(lambda weight: None), with_weight(BEFORE, w=W))


def test_a_tied_embedding_stays_for_its_dense_reader():
    text = """
    tied (int64[1,S] ids, float[1,S,64] x, float[160,64] w)
        => (float[1,S,64] e, float[1,S,160] y) {
        e = Gather<axis: int = 0>(w, ids)
        y = com.microsoft.FusedMatMul<transB: int = 1>(x, w)
    }
    """
    model = with_weight(text, w=W)
    assert QuantisePass(pack_rtn)(model).modified
    assert operators(model) == ["Gather", "MatMulNBits"]
    assert list(model.graph.initializers) == ["w", "w.q4", "w.q4.scales"]
    np.testing.assert_array_equal(model.graph.initializers["w"].const_value.numpy(), W)
    check(model)


def test_graphs_share_what_was_packed_once():
    packed = []

    def pack(weight):
        packed.append(weight.name)
        return pack_rtn(weight)

    pass_, models = QuantisePass(pack), [with_weight(BEFORE, w=W) for _ in range(2)]
    for model in models:
        pass_(model)
    assert packed == ["w"]
    first, second = (model.graph.initializers["w.q4"].const_value for model in models)
    assert first is second


def test_two_readers_of_a_matrix_share_its_four_bits():
    text = """
    twice (float[1,S,64] x, float[1,S,64] n, float[160,64] w)
        => (float[1,S,160] y, float[1,S,160] z) {
        y = com.microsoft.FusedMatMul<transB: int = 1>(x, w)
        z = com.microsoft.FusedMatMul<transB: int = 1>(n, w)
    }
    """
    model = with_weight(text, w=W)
    pass_ = QuantisePass(pack_rtn)
    pass_(model)
    assert pass_.changes == 2
    assert list(model.graph.initializers) == ["w.q4", "w.q4.scales"]
    x = RNG.standard_normal((1, 3, K)).astype(np.float32)
    found = run(model, x=x, n=-x)
    np.testing.assert_array_equal(found["y"], -found["z"])


def test_onnx_runtime_computes_what_the_four_bits_say():
    model = with_weight(BEFORE, w=W)
    QuantisePass(pack_rtn)(model)
    packed = pack_rtn(from_array(W, "w"))
    wide = dequantised(packed.data.numpy(), packed.scales.numpy())
    for rows in (1, 5):
        x = RNG.standard_normal((1, rows, K)).astype(np.float32)
        want = x.astype(np.float64) @ wide.astype(np.float64).T
        # the same numbers in another order of sums: float32 rounding of 64 terms
        np.testing.assert_allclose(run(model, x=x)["y"], want, atol=2e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_weight_is_off_by_no_more_than_half_a_step(dtype):
    w = W.astype(dtype)
    packed = pack_rtn(from_array(w, "w"))
    data, scales = packed.data.numpy(), packed.scales.numpy()
    assert (data.dtype, data.shape) == (np.uint8, (N, K // BLOCK, 16))
    assert (scales.dtype, scales.shape) == (np.dtype(dtype), (N, K // BLOCK))
    apart = np.abs(dequantised(data, scales) - w.astype(np.float32)).reshape(N, -1, BLOCK)
    steps = np.abs(scales.astype(np.float32))[..., None]
    # sixteen levels round zero, 8 below and 7 above: the far end may be a whole step off;
    # the scale is rounded to the matrix's type as well
    slack = 1 + 16 * np.finfo(np.float32).eps if dtype is np.float32 else 1.05
    largest = np.abs(w.astype(np.float32)).reshape(N, -1, BLOCK).max(axis=-1)
    assert (apart <= steps * slack).all()
    assert np.mean(apart <= 0.5 * steps * slack) > 0.97
    np.testing.assert_allclose(8 * np.abs(scales.astype(np.float32)), largest, rtol=0.01)


def test_zeros_stay_zeros():
    packed = pack_rtn(from_array(np.zeros((MIN_ROWS, BLOCK), np.float32), "w"))
    assert not dequantised(packed.data.numpy(), packed.scales.numpy()).any()


def test_blocks_of_rows_give_what_the_whole_gives():
    pieces = StreamedTensor(
        lambda: iter((W[:7], W[7:130], W[130:])),
        dtype=ir.DataType.FLOAT,
        shape=(N, K),
        name="w",
    )
    whole, parts = pack_rtn(from_array(W, "w")), pack_rtn(pieces)
    assert [len(block) for block in parts.data.blocks()] == [7, 123, 30]
    np.testing.assert_array_equal(parts.data.numpy(), whole.data.numpy())
    np.testing.assert_array_equal(parts.scales.numpy(), whole.scales.numpy())


@pytest.fixture(scope="module", params=["untied", "tied"])
def four_bits(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("int4")
    config = replace(HYBRID, tie_word_embeddings=request.param == "tied")
    model = read_source(write_hybrid(folder / "c", config))
    asked = options(2, target=Target("cpu", "float32", "int4"))
    build(model, folder / "a", asked)  # its run check: lossless against its own greedy
    build_tiny(folder / "c", folder / "dense", k=2)
    return folder, config.tie_word_embeddings


def test_an_artifact_in_four_bits_holds_no_matrix_twice(four_bits):
    folder, tied = four_bits
    stored, dense = (load_file(folder / f / "weights.safetensors") for f in ("a", "dense"))
    assert check_artifact(folder / "a") == []
    packed = {name.removesuffix(".q4") for name in stored if name.endswith(".q4")}
    wide = {n for n, w in dense.items() if w.ndim == 2 and w.shape[0] >= MIN_ROWS}
    wide -= {"rotary.cos", "rotary.sin"} | ({"embed"} if not tied else set())
    assert packed == wide
    assert {name for name in packed if name in stored} == ({"embed"} if tied else set())
    for name in packed:
        got = dequantised(stored[f"{name}.q4"], stored[f"{name}.q4.scales"])
        step = np.abs(stored[f"{name}.q4.scales"]).max()
        assert np.abs(got - dense[name]).max() <= 1.001 * step


def test_all_graphs_of_an_artifact_in_four_bits_load(four_bits):
    folder, _ = four_bits
    for name in ("prefill", "decode", "verify", "draft"):
        path = folder / "a" / f"{name}.onnx"
        nodes = onnx.load(path, load_external_data=False).graph.node
        assert any(node.op_type == "MatMulNBits" for node in nodes)
        ort.InferenceSession(path, providers=["CPUExecutionProvider"])
