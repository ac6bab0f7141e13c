import numpy as np
import pytest

from runtime.accept import Result, check_finite, parse_result
from runtime.errors import FiniteError, SlotError


def parse(values, *, drafted=3, length=10):
    array = np.array(values, np.int64)
    return parse_result(array, graph="verify", drafted=drafted, length=length, vocab_size=100)


@pytest.mark.parametrize("accepted", range(4))
def test_accepted_drafts_and_the_next_token_are_emitted(accepted):
    best = [11, 12, 13, 14]
    result = parse([accepted, 10 + accepted, *best])
    assert result == Result(accepted, 10 + accepted, tuple(best[: accepted + 1]))


def test_a_forward_without_drafts_emits_one_token():
    assert parse([0, 10, 5], drafted=0) == Result(0, 10, (5,))


@pytest.mark.parametrize("accepted", [-1, 4, 2**40])
def test_a_count_that_cannot_be_is_refused(accepted):
    with pytest.raises(SlotError, match=f"verify graph accepted {accepted} of 3 drafts"):
        parse([accepted, 10 + accepted, 1, 1, 1, 1])


def test_a_length_that_does_not_follow_is_refused():
    with pytest.raises(SlotError, match="committed 11 rows where 12 stand"):
        parse([2, 11, 1, 1, 1, 1])


@pytest.mark.parametrize("token", [-1, 100])
def test_a_token_outside_the_vocabulary_is_refused(token):
    with pytest.raises(SlotError, match="outside the vocabulary of 100"):
        parse([1, 11, 5, token, 1, 1])


def test_padding_rows_may_hold_anything():
    assert parse([0, 10, 5, -7, 10**12, 0]).tokens == (5,)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_the_first_row_that_is_not_finite_is_named(value):
    logits = np.zeros((1, 3, 8), np.float32)
    check_finite(logits, graph="verify", length=21)
    logits[0, 1, 5] = logits[0, 2, 0] = value
    with pytest.raises(FiniteError, match=r"verify graph .* at position 21 \(row 1"):
        check_finite(logits, graph="verify", length=21)
