import ml_dtypes
import numpy as np
import pytest

from export.errors import BundleError
from export.importing.rope import theta_of


def table(theta: float, rows: int, half: int, dtype, stretch: float = 1.0):
    angle = np.arange(rows)[:, None] * theta ** -(np.arange(half) / half) / stretch
    return np.cos(angle).astype(dtype), np.sin(angle).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6, 1e7])
@pytest.mark.parametrize(("rows", "half"), [(512, 8), (4096, 32)])
def test_the_base_is_read_off_a_table(theta: float, rows: int, half: int, dtype) -> None:
    assert theta_of(*table(theta, rows, half, dtype)) == theta


def test_a_base_that_is_not_round_is_kept() -> None:
    assert theta_of(*table(123_456.0, 4096, 32, np.float32)) == pytest.approx(
        123_456, rel=1e-4
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_stretched_positions_have_no_base(dtype) -> None:
    with pytest.raises(BundleError, match="not that of one base"):
        theta_of(*table(1e4, 512, 8, dtype, stretch=1.5))


def test_a_table_that_does_not_turn_has_no_base() -> None:
    with pytest.raises(BundleError, match="does not turn"):
        theta_of(np.ones((16, 4), np.float32), np.zeros((16, 4), np.float32))
    with pytest.raises(BundleError, match="does not tell its base"):
        theta_of(np.ones((1, 4), np.float32), np.zeros((1, 4), np.float32))
