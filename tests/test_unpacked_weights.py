"""Four-bit weights unpacked out of a file: every byte as it was packed, once."""

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from artifacts import DerivedTensor, Weights, WeightTensor
from passes.quantise import PackedMatrix
from passes.repack_w4 import interleave, repack
from passes.streamed import from_array
from runtime.cuda_weights import check_tensors
from runtime.errors import LoadError
from runtime.unpacked_weights import unpacked_pieces

RNG = np.random.default_rng(7)


def matrix(rows, dtype):
    data = RNG.integers(0, 256, (rows, 5, 16), np.uint8)
    scales = RNG.standard_normal((rows, 5)).astype(dtype)
    return PackedMatrix(from_array(data, "w.q4"), from_array(scales, "w.q4.scales"))


def described(packed, offset):
    shape = tuple(packed.shape)
    return WeightTensor("uint8", shape, offset, packed.nbytes)


def stored(rows, dtype):
    """A file with one packed matrix and one pair, and what is to be found in it."""
    single, gate, up = (matrix(rows, dtype) for _ in range(3))
    packed = repack(single, "down.w4").numpy(), repack(interleave(gate, up), "pair.w4").numpy()
    file = np.concatenate([np.zeros(100, np.uint8), *(array.reshape(-1) for array in packed)])
    tensors = {
        "down.w4": described(packed[0], 100),
        "pair.w4": described(packed[1], 100 + packed[0].nbytes),
    }
    derived, expected = {}, {}
    for name, source, part, values in (
        ("down", "down.w4", "all", single),
        ("gate", "pair.w4", "gates", gate),
        ("up", "pair.w4", "values", up),
    ):
        for suffix, tensor in ((".q4", values.data), (".q4.scales", values.scales)):
            kind = tensor.dtype.numpy().name
            shape = tuple(tensor.shape.numpy())
            derived[name + suffix] = DerivedTensor(kind, shape, source, part)
            expected[name + suffix] = tensor.numpy().tobytes()
    weights = Weights(file="w", size=len(file), sha256="", tensors=tensors, derived=derived)
    return file, weights, expected


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("rows", [1, 8, 128, 130, 256, 700])
def test_every_byte_is_what_was_packed(rows, dtype):
    file, weights, expected = stored(rows, dtype)
    check_tensors(weights)
    found = {name: bytearray(weights.length(name)) for name in expected}
    written = dict.fromkeys(expected, 0)
    for name, start, values in unpacked_pieces(file, weights, weights.derived):
        assert values.flags.c_contiguous
        found[name][start : start + values.nbytes] = values.tobytes()
        written[name] += values.nbytes
    assert {name: bytes(data) for name, data in found.items()} == expected
    assert written == {name: len(data) for name, data in expected.items()}


def test_what_is_not_asked_for_is_not_unpacked():
    file, weights, _ = stored(40, np.float16)
    wanted = {"up.q4": weights.derived["up.q4"]}
    assert {name for name, _, _ in unpacked_pieces(file, weights, wanted)} == {"up.q4"}


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (DerivedTensor("uint8", (40, 5, 16), "nothing", "all"), "there is no such weight"),
        (DerivedTensor("uint8", (300, 5, 16), "down.w4", "all"), r"all of uint8\[2, 36864\]"),
        (DerivedTensor("uint8", (40, 4, 16), "down.w4", "all"), r"uint8\[1, 18432\]"),
        (DerivedTensor("uint8", (40,), "down.w4", "all"), r"it must be \[N, K / 32, 16\]"),
        (DerivedTensor("float16", (40, 5, 16), "down.w4", "all"), r"must be \[N, K / 32\]"),
    ],
)
def test_what_cannot_be_unpacked_is_refused(tensor, message):
    _, weights, _ = stored(40, np.float16)
    weights.derived["bad"] = tensor
    with pytest.raises(LoadError, match=f"the weight 'bad' is .*{message}"):
        check_tensors(weights)


def test_an_order_of_bits_is_not_a_type():
    """Scales are moved as they are: a NaN of bfloat16 stays that NaN."""
    single = matrix(3, ml_dtypes.bfloat16)
    bits = np.array([[0x7FC1, 0x8000, 1, 2, 3]] * 3, np.uint16)
    scales = from_array(bits.view(ml_dtypes.bfloat16), "w.q4.scales")
    assert scales.dtype == ir.DataType.BFLOAT16
    packed = repack(PackedMatrix(single.data, scales), "w.w4").numpy()
    derived = {"s": DerivedTensor("bfloat16", (3, 5), "w.w4", "all")}
    tensors = {"w.w4": described(packed, 0)}
    weights = Weights(
        file="w", size=packed.nbytes, sha256="", tensors=tensors, derived=derived
    )
    ((_, _, values),) = unpacked_pieces(packed.reshape(-1), weights, derived)
    assert values.tobytes() == bits.tobytes()
