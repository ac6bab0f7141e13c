"""Four-bit matrices: unpacked by hand here, and packed again by a build for four bits."""

import numpy as np
import onnx
import pytest
from onnx import helper

from export.bundles.graph_index import GraphIndex
from export.errors import BundleError
from export.importing.columns import columns
from export.importing.dequantise import dequantised
from export.importing.reader import Reader
from export.quantisers import pack_rtn
from passes.streamed import from_array

N, K = 130, 96


def read(arrays: dict[str, np.ndarray], *inputs: str, index=None, **attributes):
    """The rows that a MatMulNBits over `arrays` is unpacked to."""
    said = {"N": N, "K": K, "bits": 4, "block_size": 32} | attributes
    node = helper.make_node(
        "MatMulNBits", ["x", *inputs], ["y"], domain="com.microsoft", **said
    )
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node], "g", [value("x", 1, [1, K])], [value("y", 1, [1, N])],
        [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )  # fmt: skip
    reader = Reader("target", GraphIndex(helper.make_model(graph)))
    picked = columns(reader, "y", "y")
    rows = picked.index if index is None else np.array(index)
    return dequantised(reader, picked.node, rows, lambda name: lambda: arrays[name])


def packed(blocks: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    return {
        "w": rng.integers(0, 256, (N, blocks, 16), np.uint8),
        "s": rng.standard_normal((N, blocks)).astype(np.float16),
    }


def by_hand(arrays: dict[str, np.ndarray], zeros: np.ndarray) -> np.ndarray:
    w, s = arrays["w"], arrays["s"].astype(np.float32)
    out = np.zeros((N, w.shape[1] * 32), np.float32)
    for block in range(w.shape[1]):
        for pair in range(16):
            byte = w[:, block, pair].astype(np.int32)
            for half, number in enumerate((byte & 15, byte >> 4)):
                column = 32 * block + 2 * pair + half
                out[:, column] = (number - zeros[:, block]) * s[:, block]
    return out[:, :K]


def test_without_zero_points_8_stands_for_zero() -> None:
    arrays = packed(3)
    got = read(arrays, "w", "s").numpy()
    np.testing.assert_array_equal(got, by_hand(arrays, np.full((N, 3), 8)))


def test_zero_points_two_a_byte_each_row_padded() -> None:
    arrays = packed(3)
    zeros = np.random.default_rng(6).integers(0, 16, (N, 4))
    arrays["z"] = (zeros[:, ::2] | zeros[:, 1::2] << 4).astype(np.uint8).reshape(-1)
    np.testing.assert_array_equal(read(arrays, "w", "s", "z").numpy(), by_hand(arrays, zeros))


def test_zero_points_of_the_scales_type() -> None:
    arrays = packed(3)
    arrays["z"] = np.random.default_rng(7).integers(0, 16, (N, 3)).astype(np.float16)
    got = read(arrays, "w", "s", "z").numpy()
    np.testing.assert_array_equal(got, by_hand(arrays, arrays["z"].astype(np.float32)))


def test_picked_rows_come_in_their_order() -> None:
    arrays = packed(3)
    whole = read(arrays, "w", "s").numpy()
    got = read(arrays, "w", "s", index=[7, 3, 129]).numpy()
    np.testing.assert_array_equal(got, whole[[7, 3, 129]])


def test_symmetric_matrices_come_back_bit_for_bit_when_packed_again() -> None:
    weight = np.random.default_rng(8).standard_normal((N, K)).astype(np.float32)
    first = pack_rtn(from_array(weight, "w"))
    arrays = {"w": first.data.numpy(), "s": first.scales.numpy()}
    again = pack_rtn(read(arrays, "w", "s").renamed("w"))
    np.testing.assert_array_equal(again.data.numpy(), arrays["w"])
    np.testing.assert_allclose(again.scales.numpy(), arrays["s"], rtol=1e-6)


@pytest.mark.parametrize(
    ("attributes", "told"),
    [({"bits": 8}, "only four bits"), ({"block_size": 24}, "only four bits"),
     ({"K": 960}, "has not the")],
)  # fmt: skip
def test_other_formats_are_refused(attributes: dict[str, int], told: str) -> None:
    with pytest.raises(BundleError, match=told):
        read(packed(3), "w", "s", **attributes)


def test_a_group_index_is_refused() -> None:
    arrays = packed(3) | {"g": np.zeros(K, np.int32)}
    with pytest.raises(BundleError, match="a group index or a bias"):
        read(arrays, "w", "s", "", "g")
