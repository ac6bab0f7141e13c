from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import RequestError
from runtime.stop import MAX_STOPS, StopStrings


def first_end(text: str, stops: list[str]) -> tuple[str, str | None]:
    """By hand: read on character by character until the text ends with a stop."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            stop = max(ended, key=len)
            return text[: end - len(stop)], stop
    return text, None


SHORT = st.text(alphabet="ab", min_size=1, max_size=4)


@given(st.text(alphabet="abc", max_size=20), st.lists(SHORT, max_size=3), st.data())
@settings(max_examples=150, deadline=None)
def test_the_pieces_do_not_matter_and_nothing_of_a_stop_comes_out(text, stops, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    bounds = [0, *cuts, len(text)]
    reader = StopStrings(stops)
    shown = ""
    want, found = first_end(text, stops)
    for start, end in pairwise(bounds):
        shown += reader.add(text[start:end])
        assert want.startswith(shown)
    shown += reader.finish()
    assert (shown, reader.found) == (want, found)
    if found is not None:
        assert (reader.add("more"), reader.finish()) == ("", "")


def test_only_what_may_begin_a_stop_is_held_back():
    reader = StopStrings(["END", "<|x|>"])
    assert reader.add("the E") == "the "
    assert reader.add("N") == ""
    assert reader.add("!") == "EN!"
    assert reader.add("<|") == ""
    assert reader.finish() == "<|"


@pytest.mark.parametrize(
    ("stops", "message"),
    [
        ([""], "a stop string is empty"),
        (["x"] * (MAX_STOPS + 1), "17 stop strings; give at most 16"),
        (["x" * 1025], "a stop string has 1025 characters; give at most 1024"),
    ],
)
def test_stop_strings_that_cannot_be_are_refused(stops, message):
    with pytest.raises(RequestError, match=message):
        StopStrings(stops)
