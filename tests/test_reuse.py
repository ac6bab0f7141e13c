"""Prompts that go on from a state at hand, against plain arithmetic on the whole prompt."""

from collections.abc import Iterator

import numpy as np
import pytest
from counting_artifact import Counting
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.decode import Decoder
from runtime.errors import DeviceError, FiniteError, RequestError, SlotError
from runtime.reuse import pieces
from runtime.state import Finish

C = Counting()
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory) -> Iterator[Decoder]:
    with Decoder.open(C.write(tmp_path_factory.mktemp("counting"))) as opened:
        yield opened


class Rows:
    """Counts the rows that a decoder prefills, at the slot."""

    def __init__(self, decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fed = 0
        slot = decoder.loaded.slots["prefill"]
        run = slot.run

        def counted(rows=None):
            self.fed += rows
            run(rows)

        monkeypatch.setattr(slot, "run", counted)

    def take(self) -> int:
        fed, self.fed = self.fed, 0
        return fed


@pytest.fixture
def rows(decoder, monkeypatch) -> Rows:
    return Rows(decoder, monkeypatch)


def tokens_of(steps) -> list[int]:
    return [token for step in steps for token in step.tokens]


def ask(decoder, ids, count=8, **options) -> list[int]:
    """Generate with reuse; every draft must be what a head with a whole cache makes."""
    tokens, got = list(ids), []
    for i, step in enumerate(decoder.generate(ids, count, reuse=True, **options)):
        if i and step.drafted:
            assert step.accepted == C.accepts(tokens, step.drafted)
        tokens += step.tokens
        got += step.tokens
    assert got == C.greedy(list(ids), len(got))
    return got


@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize("same", [True, False])
def test_a_prompt_that_extends_what_was_fed_feeds_the_rest_alone(decoder, rows, count, same):
    """After any number of emitted tokens; `same`: the newest one, not yet fed, goes on too."""
    decoder.sequence = None
    made = tokens_of(decoder.generate(PROMPT, count, reuse=True))
    rows.take()
    fed = len(PROMPT) + count - 1
    newest = made[-1] if same else (made[-1] + 1) % C.vocab
    ids = [*PROMPT, *made[:-1], newest, 7, 8]
    ask(decoder, ids)
    assert rows.take() == len(ids) - fed
    assert (decoder.stats.reused, decoder.stats.prompt_tokens) == (fed, len(ids))


def test_without_reuse_all_is_fed(decoder, rows):
    made = tokens_of(decoder.generate(PROMPT, 4))
    rows.take()
    list(decoder.generate([*PROMPT, *made, 1], 4))
    assert rows.take() == len(PROMPT) + 5
    assert decoder.stats.reused == 0


def test_another_prompt_starts_from_the_start(decoder, rows):
    list(decoder.generate(PROMPT, 4))
    rows.take()
    ask(decoder, [9, *PROMPT])
    assert (rows.take(), decoder.stats.reused) == (len(PROMPT) + 1, 0)


def test_the_same_prompt_needs_a_forward_all_the_same(decoder, rows):
    list(decoder.generate(PROMPT, 4, keep_at=len(PROMPT) - 2))
    rows.take()
    ask(decoder, PROMPT)
    assert (rows.take(), decoder.stats.reused) == (2, len(PROMPT) - 2)


def test_a_stop_inside_an_accepted_block_leaves_a_state_that_is_not_used(tmp_path, rows):
    """The caches are past the stop: going on from them would be wrong, silently."""
    c = Counting(miss=0)
    want = c.greedy(PROMPT, 8)
    with Decoder.open(c.write(tmp_path)) as decoder:
        steps = list(decoder.generate(PROMPT, 30, stop_ids=[want[2]], keep_at=len(PROMPT)))
        assert tokens_of(steps) == want[:3]
        assert decoder.sequence is not None
        assert decoder.sequence.cut == tuple(want[3:5])
        assert decoder.sequence.fed == (*PROMPT, *want[:4])
        ids = [*PROMPT, *want[:3], 50, 60]
        got = tokens_of(decoder.generate(ids, 9, reuse=True))
        assert got == c.greedy(ids, 9)
        assert decoder.stats.reused == len(PROMPT)
        # but where the prompt goes on as the caches do, they are used
        list(decoder.generate(PROMPT, 30, stop_ids=[want[2]], reuse=True))
        ids = [*PROMPT, *want[:5], 60]
        assert tokens_of(decoder.generate(ids, 9, reuse=True)) == c.greedy(ids, 9)
        assert decoder.stats.reused == len(PROMPT) + 4


def test_extending_feeds_the_newest_token_and_what_is_given(decoder, rows):
    made = list(decoder.prefill(PROMPT, 3).tokens)
    while decoder.sequence is not None and decoder.sequence.finish is None:
        made += decoder.step().tokens
    rows.take()
    step = decoder.extend([5, 6], 20)
    tokens = [*PROMPT, *made, 5, 6]
    assert list(step.tokens) == C.greedy(tokens, 1)
    assert rows.take() == 3
    again = list(decoder.extend([]).tokens)
    assert again == C.greedy([*tokens, *step.tokens], 1)
    assert rows.take() == 1
    assert decoder.sequence is not None
    assert decoder.sequence.prompt == (*tokens, *step.tokens)


def test_extending_after_a_stop_inside_a_block_is_right_too(tmp_path):
    c = Counting(miss=0)
    want = c.greedy(PROMPT, 8)
    with Decoder.open(c.write(tmp_path)) as decoder:
        list(decoder.generate(PROMPT, 30, stop_ids=[want[1]]))
        assert list(decoder.extend([9]).tokens) == c.greedy([*PROMPT, *want[:2], 9], 1)


def test_extending_nothing_is_refused(tmp_path):
    decoder = Decoder.open(C.write(tmp_path))
    with decoder, pytest.raises(RequestError, match="no sequence to extend"):
        decoder.extend([1])


def test_an_interrupt_is_gone_on_from_the_kept_state(decoder, rows, monkeypatch):
    ids = [*PROMPT, 77]
    steps = decoder.generate(ids, 30, reuse=True, keep_at=6)
    next(steps)

    def interrupted(rows=None):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(decoder.loaded.slots["verify"], "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(steps)
    rows.take()
    ask(decoder, [*ids, 1])
    assert (rows.take(), decoder.stats.reused) == (len(ids) + 1 - 6, 6)


def test_a_prefill_can_be_given_up_between_chunks(decoder):
    class GivenUpError(Exception):
        pass

    calls = []

    def before():
        calls.append(0)
        if len(calls) == 3:
            raise GivenUpError

    long = [(7 * i) % 50 for i in range(60)]
    with pytest.raises(GivenUpError):
        decoder.prefill(long, before_chunk=before, keep_at=20)
    assert decoder.sequence is None
    ask(decoder, [*long[:30], 9], count=4)
    assert decoder.stats.reused == 20


def test_a_state_that_went_bad_is_not_gone_on_from(decoder):
    decoder.prefill(PROMPT, keep_at=5)
    decoder.loaded.buffers.write(
        "target.0.recurrent", np.full((1, 1, 1, 1), np.nan, np.float32)
    )
    with pytest.raises(FiniteError):
        decoder.step()
    ask(decoder, [*PROMPT, 1])
    assert decoder.stats.reused == 5


def test_the_capacity_holds_for_an_extended_sequence_too(decoder):
    list(decoder.generate([1] * 40, 5))
    with pytest.raises(RequestError, match=r"the prompt has 65 tokens; .* at most 63"):
        decoder.extend([2] * 20)
    long = [1] * 63
    steps = list(decoder.generate(long, 5, reuse=True))
    assert (tokens_of(steps), steps[-1].finish) == (C.greedy(long, 2), Finish.CAPACITY)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_any_walk_through_a_tree_of_prompts_gives_what_fresh_starts_give(decoder, data):
    ids = list(PROMPT)
    for _ in range(6):
        cut = data.draw(st.integers(1, len(ids)), label="kept of the last tokens")
        ids = ids[:cut] + data.draw(st.lists(st.integers(0, 9), max_size=6), label="new ones")
        ids = ids[:40]
        keep_at = data.draw(st.none() | st.integers(1, len(ids)), label="keep_at")
        count = data.draw(st.integers(1, 9), label="count")
        k = data.draw(st.sampled_from([None, 3, 3, 1]), label="k")
        stop = data.draw(st.sampled_from([(), C.greedy(ids, 4)[2:3]]), label="stop")
        ids += ask(decoder, ids, count, keep_at=keep_at, k=k, stop_ids=stop)


@pytest.mark.parametrize("k", [0, 3])
def test_turns_without_drafts_are_extended_as_well(tmp_path, k):
    c = Counting(k=k)
    with Decoder.open(c.write(tmp_path)) as decoder:
        ids = list(PROMPT)
        for more in ([5], [6, 7], [8]):
            ids += more
            got = tokens_of(decoder.generate(ids, 5, reuse=True, k=0))
            assert got == c.greedy(ids, 5)
            ids += got
        assert decoder.stats.reused == len(ids) - 5 - len([8]) - 1


def test_chunks_end_at_the_cut_and_nowhere_else_in_vain():
    assert list(pieces(0, 10, 4, None)) == [(0, 4), (4, 8), (8, 10)]
    assert list(pieces(0, 10, 4, 6)) == [(0, 4), (4, 6), (6, 10)]
    assert list(pieces(6, 10, 4, 6)) == [(6, 10)]
    assert list(pieces(7, 10, 4, 6)) == [(7, 10)]
    assert list(pieces(0, 10, 4, 10)) == [(0, 4), (4, 8), (8, 10)]
    assert list(pieces(10, 10, 4, 3)) == []


def test_where_there_is_no_room_for_a_copy_nothing_is_kept_and_all_is_right(
    decoder, rows, monkeypatch
):
    def full(names):
        raise DeviceError("a copy of the buffer takes 9 bytes")

    monkeypatch.setattr(decoder.loaded.buffers, "checkpoint", full)
    list(decoder.generate(PROMPT, 4, keep_at=5))
    rows.take()
    ask(decoder, [*PROMPT[:6], 9])
    assert (rows.take(), decoder.stats.reused) == (7, 0)


def test_two_states_are_kept_the_latest_ones(decoder):
    decoder.prefill(PROMPT, keep_at=2)
    for length in (4, 6):
        decoder.prefill([*PROMPT, length], reuse=True)
        decoder.sequence = None
        decoder.prefill(PROMPT, reuse=True, keep_at=length)
        decoder.sequence = None
    ask(decoder, [*PROMPT[:5], 9])
    assert decoder.stats.reused == 4
    ask(decoder, [*PROMPT[:3], 9])
    assert decoder.stats.reused == 0


def test_closing_gives_the_copies_back(tmp_path):
    decoder = Decoder.open(C.write(tmp_path))
    decoder.prefill(PROMPT, keep_at=5)
    (kept,) = decoder._feeder.kept._kept
    decoder.close()
    with pytest.raises(SlotError, match="checkpoint is closed"):
        kept.states.restore()


def test_a_state_that_somebody_else_used_up_is_not_gone_on_from(tmp_path):
    with Decoder.open(C.write(tmp_path)) as decoder:
        other = Decoder(decoder.loaded)
        for use in (decoder.loaded.buffers.reset, lambda: other.prefill([9] * 30, reuse=True)):
            made = tokens_of(decoder.generate(PROMPT, 4, reuse=True, keep_at=5))
            use()
            ask(decoder, [*PROMPT, *made, 1])
            assert decoder.stats.reused == 0
            use()
            ask(decoder, [*PROMPT[:7], 1])
            assert decoder.stats.reused == 0
