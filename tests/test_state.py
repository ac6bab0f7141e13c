import pytest

from runtime.state import Finish, Sequence


def sequence(**over) -> Sequence:
    values = {"prompt": (1, 2), "capacity": 20, "length": 2, "stop_ids": frozenset({9})}
    return Sequence(**{**values, "most": None, **over})


def test_a_stop_token_is_kept_and_what_follows_is_dropped():
    s = sequence()
    assert s.advance((5, 9, 6, 9), 6) == (5, 9)
    assert (s.emitted, s.finish, s.length) == ([5, 9], Finish.STOP, 6)


def test_the_wanted_number_ends_it():
    s = sequence(most=3)
    assert s.advance((5, 6), 4) == (5, 6)
    assert s.finish is None
    assert s.advance((7, 8), 6) == (7,)
    assert s.finish is Finish.LENGTH


def test_a_stop_beyond_the_wanted_number_is_not_seen():
    s = sequence(most=1)
    assert s.advance((5, 9), 4) == (5,)
    assert s.finish is Finish.LENGTH


def test_a_stop_weighs_more_than_length_and_capacity():
    s = sequence(most=2, capacity=4)
    s.advance((5, 9), 4)
    assert s.finish is Finish.STOP


def test_full_caches_end_it_only_when_full():
    s = sequence(capacity=5)
    s.advance((5,), 4)
    assert s.finish is None
    s.advance((6,), 5)
    assert s.finish is Finish.CAPACITY


@pytest.mark.parametrize(
    ("length", "most", "emitted", "useful"),
    [
        (2, None, 0, 17),
        (18, None, 0, 1),  # rows 18 and 19 are left: the newest token and one draft
        (19, None, 0, 0),
        (2, 10, 4, 5),  # six tokens wanted: five drafts and the token that follows them
        (2, 5, 4, 0),
        (17, 10, 4, 2),
    ],
)
def test_drafts_are_useful_while_they_fit_and_are_wanted(length, most, emitted, useful):
    s = sequence(length=length, most=most, emitted=[0] * emitted)
    assert s.useful_drafts == useful
