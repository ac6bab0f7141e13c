import random

import pytest

from runtime.ngram import LENGTHS, NgramIndex


def index_of(tokens):
    made = NgramIndex()
    made.extend(tokens)
    return made


def slow(tokens, most):
    """By looking everywhere, newest place first."""
    for length in LENGTHS:
        tail = tokens[-length:]
        for end in range(len(tokens) - 1, length - 1, -1):
            if len(tail) == length and tokens[end - length : end] == tail:
                whole = list(tokens)
                for i in range(most):
                    whole.append(whole[end + i])
                return whole[len(tokens) :]
    return []


def test_what_followed_the_same_tokens_is_found():
    assert index_of([1, 2, 3, 4, 5, 1, 2, 3]).find(2) == [4, 5]


def test_a_longer_match_comes_before_a_newer_one():
    text = [1, 2, 3, 4, 50, 9, 2, 3, 4, 60, 1, 2, 3, 4]
    assert index_of(text).find(1) == [50]


def test_of_equal_matches_the_newest_counts():
    assert index_of([1, 2, 3, 50, 1, 2, 3, 60, 1, 2, 3]).find(1) == [60]


def test_a_repetition_goes_on_in_its_own_words():
    assert index_of([7, 1, 2, 1, 2, 1, 2]).find(5) == [1, 2, 1, 2, 1]
    assert index_of([4, 4, 4, 4]).find(3) == [4, 4, 4]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3], [1, 2, 9, 9, 1, 2]])
def test_short_or_new_text_gives_nothing(tokens):
    assert index_of(tokens).find(3) == []


def test_random_texts_give_what_a_search_gives_token_by_token():
    rng = random.Random(5)
    for _ in range(60):
        made, tokens = NgramIndex(), []
        for _ in range(60):
            more = [rng.randrange(3) for _ in range(rng.randrange(1, 4))]
            made.extend(more)
            tokens += more
            assert made.find(4) == slow(tokens, 4)
        assert len(made) == len(tokens)
