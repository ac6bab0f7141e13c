"""The kernel's weight layout: read back as the kernel reads it, lane by lane."""

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from artifacts.packed_w4 import (
    BLOCK_ROWS,
    HALF_BYTES,
    repack_rows,
    unpack_part,
    unpack_rows,
)
from passes.quantise import PackedMatrix
from passes.repack_w4 import interleave, repack
from passes.streamed import StreamedTensor


def random_matrix(n, k, dtype=np.float16, seed=0):
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (n, k // 32, 16), np.uint8)
    return data, rng.uniform(-1, 1, (n, k // 32)).astype(dtype)


def weights(data, scales):
    q = np.stack([data & 15, data >> 4], axis=-1).reshape(len(data), -1).astype(np.float64)
    return (q - 8) * np.repeat(scales.astype(np.float64), 32, axis=1)


def streamed(array, name, rows=100):
    return StreamedTensor(
        lambda: (array[at : at + rows] for at in range(0, len(array), rows)),
        dtype=ir.DataType.from_numpy(array.dtype),
        shape=array.shape,
        name=name,
    )


def matrix(data, scales, rows=100):
    return PackedMatrix(streamed(data, "w.q4", rows), streamed(scales, "w.q4.scales", 64))


def lane_products(packed, x, dtype):
    """y of one row block as the kernel's lanes make it: m16n8k16 fragments, scale by block."""
    halves, y = packed.reshape(-1, HALF_BYTES), np.zeros(BLOCK_ROWS)
    for i, half in enumerate(halves):
        for tile in range(16):
            scale_at = 16 * 512 + tile // 2 * 128 + tile % 2 * 8
            for lane in range(32):
                g, t = lane // 4, lane % 4
                at = tile * 512 + lane * 16
                words = half[at : at + 16].view("<u4")
                four = half[scale_at + g * 16 : scale_at + g * 16 + 8].view(dtype)
                for w, word in enumerate(words):
                    block, k = w // 2, i * 64 + w // 2 * 32 + 8 * t + 4 * (w % 2)
                    # a0: row g, columns k, k + 1; a1: row g + 8; a2, a3: columns k + 2, k + 3
                    for a in range(4):
                        row, column = g + 8 * (a % 2), k + 2 * (a // 2)
                        for odd in range(2):
                            q = int(word) >> (4 * a + 16 * odd) & 15
                            if column + odd < len(x):
                                scale = float(four[block * 2 + a % 2])
                                y[tile * 16 + row] += (q - 8) * scale * x[column + odd]
    return y


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_lanes_that_read_the_packed_form_make_the_product(dtype):
    data, scales = random_matrix(200, 160, dtype)
    x = np.random.default_rng(1).normal(size=160)
    y = lane_products(repack_rows(data, scales), x, np.dtype(dtype))
    np.testing.assert_allclose(y[:200], weights(data, scales) @ x, rtol=1e-10, atol=1e-10)
    assert not y[200:].any()


@pytest.mark.parametrize(("n", "k"), [(256, 128), (1, 32), (17, 96), (255, 1120)])
def test_unpacking_gives_back_every_bit(n, k):
    data, scales = random_matrix(n, k)
    again = unpack_rows(repack_rows(data, scales), n, k // 32, scales.dtype)
    assert again[0].tobytes() == data.tobytes()
    assert again[1].tobytes() == scales.tobytes()


def test_a_streamed_matrix_is_its_row_blocks_whatever_blocks_it_came_in():
    data, scales = random_matrix(700, 96)
    whole = np.stack(
        [repack_rows(data[at : at + 256], scales[at : at + 256]) for at in (0, 256, 512)]
    )
    for rows in (1, 100, 256, 700):
        packed = repack(matrix(data, scales, rows), "w.w4")
        assert tuple(packed.shape.numpy()) == whole.shape == (3, 2 * HALF_BYTES)
        assert [len(block) for block in packed.blocks()] == [1, 1, 1]
        np.testing.assert_array_equal(packed.numpy(), whole)


def test_gates_and_values_lie_eight_rows_apart():
    gate, value = random_matrix(20, 64, seed=1), random_matrix(20, 64, seed=2)
    both = interleave(matrix(*gate, rows=7), matrix(*value, rows=20))
    data, scales = both.data.numpy(), both.scales.numpy()
    assert data.shape == (48, 2, 16)
    for row in range(20):
        at = row // 8 * 16 + row % 8
        np.testing.assert_array_equal(data[at], gate[0][row])
        np.testing.assert_array_equal(data[at + 8], value[0][row])
        np.testing.assert_array_equal(scales[at + 8], value[1][row])
    assert not weights(data, scales)[36:40].any()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("rows", [20, 128, 300])
def test_gates_and_values_are_unpacked_as_they_were_packed(rows, dtype):
    pair = [random_matrix(rows, 96, dtype, seed) for seed in (1, 2)]
    packed = repack(interleave(*(matrix(*one) for one in pair)), "w.w4").numpy()
    for part, (data, scales) in zip(("gates", "values"), pair, strict=True):
        pieces = [unpack_part(block, part, 3, scales.dtype) for block in packed]
        again = [np.concatenate(arrays)[:rows] for arrays in zip(*pieces, strict=True)]
        assert again[0].tobytes() == data.tobytes()
        assert again[1].tobytes() == scales.tobytes()


def test_scales_of_another_type_are_refused():
    data, scales = random_matrix(8, 32, np.float32)
    with pytest.raises(ValueError, match="cast the weights before"):
        repack(matrix(data, scales), "w.w4")


def test_a_gate_and_values_of_different_shapes_are_refused():
    with pytest.raises(ValueError, match="must agree"):
        interleave(matrix(*random_matrix(8, 32)), matrix(*random_matrix(9, 32)))
