import numpy as np
import pytest

from runtime.accept import Result, parse_result
from runtime.errors import FiniteError, SlotError


def parse(accepted, length, best, finite=None, *, drafted=3, start=10):
    finite = [1] * len(best) if finite is None else finite
    values = np.array([accepted, length, *best, *finite], np.int64)
    return parse_result(values, graph="verify", drafted=drafted, length=start, vocab_size=100)


@pytest.mark.parametrize("accepted", range(4))
def test_accepted_drafts_and_the_next_token_are_emitted(accepted):
    best = [11, 12, 13, 14]
    result = parse(accepted, 10 + accepted, best)
    assert result == Result(accepted, 10 + accepted, tuple(best[: accepted + 1]))


def test_a_forward_of_one_row_emits_one_token():
    assert parse(0, 10, [5], drafted=0) == Result(0, 10, (5,))


@pytest.mark.parametrize("accepted", [-1, 4, 2**40])
def test_a_count_that_cannot_be_is_refused(accepted):
    with pytest.raises(SlotError, match=f"verify graph accepted {accepted} of 3 drafts"):
        parse(accepted, 10 + accepted, [1, 1, 1, 1])


def test_more_accepted_than_drafted_is_refused_though_the_rows_are_there():
    with pytest.raises(SlotError, match="accepted 2 of 1 drafts"):
        parse(2, 12, [1, 1, 1, 1], drafted=1)


def test_a_length_that_does_not_follow_is_refused():
    with pytest.raises(SlotError, match="committed 11 rows where 12 stand"):
        parse(2, 11, [1, 1, 1, 1])


@pytest.mark.parametrize("token", [-1, 100])
def test_a_token_outside_the_vocabulary_is_refused(token):
    with pytest.raises(SlotError, match="outside the vocabulary of 100"):
        parse(1, 11, [5, token, 1, 1])


def test_padding_rows_may_hold_anything():
    assert parse(0, 10, [5, -7, 10**12, 0], [1, 0, 0, 0]).tokens == (5,)


def test_the_first_row_that_is_not_finite_is_named():
    with pytest.raises(FiniteError, match=r"verify graph .* at position 11 \(row 2 of"):
        parse(3, 13, [1, 1, 1, 1], [1, 1, 0, 0], start=10)
