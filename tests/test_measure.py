import ml_dtypes
import numpy as np
import pytest

from runtime.measure import gap, spread


def test_a_difference_is_a_share_of_the_largest_value():
    assert spread(np.array([1.0, -40.5]), np.array([1.0, -40.0])) == pytest.approx(0.5 / 40)


def test_small_values_are_compared_as_they_are():
    assert spread(np.array([0.25]), np.array([0.125])) == 0.125


def test_half_precision_is_compared_in_full():
    one = np.array([300.0], ml_dtypes.bfloat16)
    assert spread(one, np.array([302.0], ml_dtypes.bfloat16)) == pytest.approx(2 / 302)


@pytest.mark.parametrize("bad", [[np.nan, 1], [np.inf, 1], [1.0]])
def test_what_cannot_be_compared_is_infinitely_far(bad):
    assert spread(np.array(bad), np.array([1.0, 1.0])) == np.inf
    assert spread(np.array([1.0, 1.0]), np.array(bad)) == np.inf


def test_nothing_differs_from_nothing():
    assert spread(np.zeros((1, 0)), np.zeros((1, 0))) == 0


def test_the_gap_is_that_of_the_lower_token():
    logits = np.array([1.0, 9.0, 10.0], np.float32)
    assert gap(logits, 2) == 0
    assert gap(logits, 2, 1) == pytest.approx(0.1)
    assert gap(logits, 0, 1) == pytest.approx(0.9)
