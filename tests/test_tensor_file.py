from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest

from export.errors import BundleError
from export.importing.tensor_file import StoredTensor, transposed


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (33, 300), (64, 7), (5, 513)])
def test_a_transposed_copy_is_the_transpose(shape: tuple[int, int], dtype) -> None:
    values = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    got = transposed(values)
    assert got.flags.c_contiguous and got.dtype == values.dtype
    np.testing.assert_array_equal(
        got.view(np.uint8), np.array(values.T, order="C").view(np.uint8)
    )


@pytest.mark.parametrize("inside", [False, True])
def test_columns_and_the_whole_are_those_of_the_file(tmp_path: Path, inside: bool) -> None:
    values = np.arange(6 * 10, dtype=np.float16).reshape(6, 10)
    tensor = onnx.numpy_helper.from_array(values, "w")
    path = None if inside else tmp_path / "data"
    if path is not None:
        path.write_bytes(b"12345678" + values.tobytes())
    stored = StoredTensor(tensor, path, 0 if inside else 8, values.dtype)
    np.testing.assert_array_equal(stored(), values)
    np.testing.assert_array_equal(stored.columns(3, 7), values[:, 3:7])


def test_a_file_that_shrank_or_is_a_link_is_refused(tmp_path: Path) -> None:
    values = np.zeros((6, 10), np.float32)
    tensor = onnx.numpy_helper.from_array(values, "w")
    path = tmp_path / "data"
    path.write_bytes(bytes(100))
    stored = StoredTensor(tensor, path, 0, values.dtype)
    with pytest.raises(BundleError, match="ends within 'w'"):
        stored.columns(0, 4)
    with pytest.raises(BundleError, match="cannot be read"):
        stored()
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BundleError, match="cannot be read"):
        stored.columns(0, 4)
