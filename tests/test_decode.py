"""The loop against plain arithmetic: `Counting` says what must come."""

from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
from counting_artifact import Counting

from runtime.decode import Decoder
from runtime.errors import FiniteError, RequestError, SlotError
from runtime.load import load
from runtime.propose import Proposal, Proposer
from runtime.state import Finish

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8]
OTHER = [200, 7, 113]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Counting().write(tmp_path_factory.mktemp("counting"))


@pytest.fixture(scope="module")
def shared(folder) -> Iterator[Decoder]:
    with Decoder.open(folder) as decoder:
        yield decoder


def tokens_of(steps) -> list[int]:
    return [token for step in steps for token in step.tokens]


class Forced(Proposer):
    """Writes given drafts, whatever the head would say."""

    def __init__(self, decoder: Decoder, *rounds: list[int]) -> None:
        self.buffers, self.rounds = decoder.loaded.buffers, list(rounds)

    def propose(self, sequence, most):
        drafts = self.rounds.pop(0)[:most]
        self.buffers.write("ids", np.array([[sequence.emitted[-1], *drafts]]))
        return Proposal(len(drafts), "forced")


@pytest.mark.parametrize("k", [0, 1, 2, 3])
def test_the_tokens_are_the_greedy_ones_for_every_k(shared, k):
    got = tokens_of(shared.generate(PROMPT, 40, k=k))
    assert got == Counting().greedy(PROMPT, 40)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_acceptance_is_what_the_head_deserves(shared, k):
    """Also shows that the head's cache is kept: a hole in it makes every draft wrong."""
    c, tokens = Counting(), [*PROMPT]
    seen = set()
    for i, step in enumerate(shared.generate(PROMPT, 40, k=k)):
        if i and step.finish is None:
            assert step.drafted == min(k, len(PROMPT) + 40 - len(tokens) - 1)
            assert step.accepted == c.accepts(tokens, step.drafted)
            seen.add(step.accepted)
        tokens += step.tokens
    assert seen == set(range(k + 1))
    tried = [tried for tried, _ in shared.stats.positions]
    stood = [accepted for _, accepted in shared.stats.positions]
    assert sum(stood) == shared.stats.accepted
    assert all(b <= a for a, b in zip(stood, tried[1:], strict=False))


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_the_chunk_of_the_prefill_changes_nothing(folder, chunk):
    c = Counting()
    with Decoder(load(folder), chunk=chunk) as decoder:
        assert tokens_of(decoder.generate(PROMPT, 20)) == c.greedy(PROMPT, 20)
        assert decoder.stats.prefills == -(-len(PROMPT) // chunk)
        accepted = decoder.stats.accepted
        assert tokens_of(decoder.generate(PROMPT, 20)) == c.greedy(PROMPT, 20)
        assert decoder.stats.accepted == accepted > 0


@pytest.mark.parametrize("right", [0, 1, 2, 3])
@pytest.mark.parametrize("drafted", [1, 2, 3])
def test_forced_drafts_stand_up_to_the_first_wrong_one(shared, right, drafted):
    right = min(right, drafted)
    c = Counting()
    want = c.greedy(PROMPT, 9)
    drafts = [(t + (i >= right)) % c.vocab for i, t in enumerate(want[1 : 1 + drafted])]
    with_forced = Decoder(shared.loaded, proposer=Forced(shared, drafts))
    with_forced.prefill(PROMPT)
    step = with_forced.step()
    assert (step.drafted, step.accepted) == (drafted, right)
    assert list(step.tokens) == want[1 : right + 2]
    # the committed state is that of the tokens that stood, and of no other
    fed = [*PROMPT, *want[: right + 1]]
    buffers = shared.loaded.buffers
    assert buffers.read("length").tolist() == [len(fed)]
    for name, expected in c.states(fed).items():
        assert np.array_equal(buffers.read(name, expected.shape), expected), name
    # and the decode slot goes on from there
    assert list(with_forced.step(0).tokens) == want[right + 2 : right + 3]


def test_two_rejections_in_a_row_leave_the_right_state(shared):
    c = Counting()
    want = c.greedy(PROMPT, 7)
    wrong = [[(want[i] + 1) % c.vocab, 0, 0] for i in (1, 2)]
    decoder = Decoder(shared.loaded, proposer=Forced(shared, *wrong, want[3:6]))
    decoder.prefill(PROMPT)
    assert [decoder.step().accepted for _ in range(3)] == [0, 0, 3]
    assert decoder.sequence is not None
    assert decoder.sequence.emitted == want[:7]


def test_drafts_after_plain_steps_are_verified_as_ever(shared):
    c = Counting()
    shared.prefill(PROMPT)
    for k in (3, 0, 0, 2, 0, 3, 3, 1):
        shared.step(k)
    assert shared.sequence is not None
    emitted = shared.sequence.emitted
    assert emitted == c.greedy(PROMPT, len(emitted))


def test_a_stop_inside_an_accepted_block_ends_there(folder):
    c = Counting(miss=0)
    path = c.write(folder.parent / "perfect")
    want = c.greedy(PROMPT, 8)
    with Decoder.open(path) as decoder:
        steps = list(decoder.generate(PROMPT, 30, stop_ids=[want[2]]))
        assert tokens_of(steps) == want[:3]
        assert steps[-1].finish is Finish.STOP
        assert (steps[-1].drafted, steps[-1].accepted) == (3, 3)
        with pytest.raises(RequestError, match=r"has ended \(stop\)"):
            decoder.step()


def test_the_first_token_can_be_the_stop(shared):
    first = Counting().greedy(PROMPT, 1)
    steps = list(shared.generate(PROMPT, 30, stop_ids=first))
    assert [(list(s.tokens), s.finish) for s in steps] == [(first, Finish.STOP)]


def test_end_of_text_of_the_manifest_stops_unless_told_otherwise(tmp_path):
    want = Counting().greedy(PROMPT, 8)
    path = Counting(eos=(want[4],)).write(tmp_path)
    with Decoder.open(path) as decoder:
        assert tokens_of(decoder.generate(PROMPT, 8)) == want[:5]
        assert tokens_of(decoder.generate(PROMPT, 8, stop_ids=())) == want


@pytest.mark.parametrize("wanted", [1, 2, 3, 4, 5])
def test_exactly_the_wanted_number_is_emitted_and_nothing_is_verified_in_vain(shared, wanted):
    steps = list(shared.generate(PROMPT, wanted))
    assert tokens_of(steps) == Counting().greedy(PROMPT, wanted)
    assert steps[-1].finish is Finish.LENGTH
    left = wanted
    for step in steps:
        assert step.drafted < left
        left -= len(step.tokens)


@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("short", [1, 2, 3, 4, 5, 6])
def test_the_capacity_is_used_to_the_last_row_and_not_beyond(shared, k, short):
    """A prompt `short` of the capacity; the caches' padding rows may be written, no more."""
    c = Counting()
    prompt = [(7 * i) % 50 for i in range(c.capacity - short)]
    buffers = shared.loaded.buffers
    poison = np.full((1, 1, c.cache_rows, 1), np.nan, np.float32)
    for name in ("target.1.key", "head.0.key"):
        buffers.write(name, poison)
    steps = list(shared.generate(prompt, 100, k=k))
    assert tokens_of(steps) == c.greedy(prompt, short + 1)
    assert steps[-1].finish is Finish.CAPACITY
    assert buffers.read("length").tolist() == [c.capacity]
    rows = buffers.read("target.1.key")[0, 0, :, 0]
    assert not np.isnan(rows[: c.capacity]).any()
    assert np.isnan(rows[c.capacity + c.k :]).all()
    with pytest.raises(RequestError, match=r"has ended \(capacity\)"):
        shared.step()


def test_poison_in_rows_that_do_not_count_changes_nothing(shared):
    c = Counting()
    buffers = shared.loaded.buffers
    shared.prefill(PROMPT)
    for _ in range(6):
        assert shared.sequence is not None
        length = shared.sequence.length
        for name in ("target.1.key", "target.1.value", "head.0.key", "head.0.value"):
            rows = buffers.read(name)
            rows[0, 0, length:] = np.nan
            buffers.write(name, rows)
        accepted = int(buffers.read("accepted")[0])
        hidden = buffers.read("hidden")
        hidden[0, accepted + 1 :] = np.nan
        buffers.write("hidden", hidden)
        buffers.write("logits", np.full((1, c.rows, c.vocab), np.nan, np.float32))
        shared.step()
    assert shared.sequence.emitted == c.greedy(PROMPT, len(shared.sequence.emitted))
    assert shared.stats.accepted > 0


def test_a_second_prompt_gives_what_a_fresh_decoder_gives(folder, shared):
    with Decoder.open(folder) as fresh:
        want = list(fresh.generate(OTHER, 30))
    list(shared.generate(PROMPT, 30))
    assert list(shared.generate(OTHER, 30)) == want


def test_an_abandoned_generation_leaves_no_trace(shared):
    list(islice(shared.generate(PROMPT, 30), 3))
    assert tokens_of(shared.generate(OTHER, 30)) == Counting().greedy(OTHER, 30)


def test_an_interrupt_loses_the_sequence_and_the_next_prompt_is_as_fresh(shared, monkeypatch):
    verify = shared.loaded.slots["verify"]
    steps = shared.generate(PROMPT, 30)
    made = tokens_of(islice(steps, 2))

    def interrupted(rows=None):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(verify, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(steps)
    assert made == Counting().greedy(PROMPT, len(made))
    assert shared.stats.tokens == len(made)
    with pytest.raises(RequestError, match="no sequence is under way"):
        shared.step()
    assert tokens_of(shared.generate(OTHER, 30)) == Counting().greedy(OTHER, 30)


def test_a_state_that_went_bad_is_named_and_the_next_prompt_runs(shared):
    shared.prefill(PROMPT)
    bad = np.full((1, 1, 1, 1), np.nan, np.float32)
    shared.loaded.buffers.write("target.0.recurrent", bad)
    with pytest.raises(FiniteError, match=f"verify graph .* at position {len(PROMPT)} "):
        shared.step()
    with pytest.raises(RequestError, match="no sequence is under way"):
        shared.step()
    assert tokens_of(shared.generate(PROMPT, 10)) == Counting().greedy(PROMPT, 10)


def test_one_target_forward_a_step(folder):
    with Decoder.open(folder) as decoder:
        list(decoder.generate(PROMPT, 30))
        runs = {name: slot.counters.runs for name, slot in decoder.loaded.slots.items()}
        assert runs["verify"] + runs["decode"] == decoder.stats.steps
        assert runs["draft"] == runs["verify"]
        assert runs["prefill"] == decoder.stats.prefills


def test_an_artifact_without_a_head_decodes(tmp_path):
    path = Counting(k=0).write(tmp_path)
    with Decoder.open(path) as decoder:
        assert tokens_of(decoder.generate(PROMPT, 20)) == Counting().greedy(PROMPT, 20)
        with pytest.raises(RequestError, match="k is 1; this artifact is built for 0 to 0"):
            decoder.generate(PROMPT, 20, k=1)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "the prompt is empty"),
        ([1] * 64, "the prompt has 64 tokens; this artifact takes at most 63"),
        ([1, 320], "token 320 at place 1 of the prompt is outside the vocabulary of 320"),
        ([-1], "token -1 at place 0"),
    ],
)
def test_a_prompt_that_cannot_be_is_refused_at_once(shared, ids, message):
    with pytest.raises(RequestError, match=message):
        shared.generate(ids, 10)
    with pytest.raises(RequestError, match=message):
        shared.prefill(ids)


def test_arguments_that_cannot_be_are_refused_at_once(shared):
    for k in (-1, 4):
        with pytest.raises(RequestError, match=f"k is {k}; this artifact is built for 0 to 3"):
            shared.generate(PROMPT, 10, k=k)
    with pytest.raises(RequestError, match="max_new_tokens is 0"):
        shared.generate(PROMPT, 0)
    for chunk in (0, 17):
        with pytest.raises(RequestError, match=f"chunk of {chunk} rows .* takes 1 to 16"):
            Decoder(shared.loaded, chunk=chunk)


def test_a_closed_decoder_says_so(folder):
    decoder = Decoder.open(folder)
    decoder.close()
    with pytest.raises(SlotError, match="closed"):
        decoder.prefill(PROMPT)
