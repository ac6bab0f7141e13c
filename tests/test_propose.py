"""Who drafts changes no token, and the head's cache misses no row, whoever drafted before."""

import random
from functools import cache

import numpy as np
import pytest
from canonical import demo
from counting_artifact import Counting
from small_artifacts import build_demo

import runtime.drafting
from runtime.clock import measure_costs
from runtime.cost import Costs, DraftPolicy
from runtime.decode import Decoder
from runtime.load import load
from runtime.ngram import NgramIndex
from runtime.propose import HeadProposer, JoinedProposer, NgramProposer
from runtime.tokenizer import Tokenizer

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8]
COSTS = Costs(decode=1.0, verify=1.3, draft=0.3)


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    path = Counting(catch_up=True, capacity=400).write(tmp_path_factory.mktemp("counting"))
    with Decoder.open(path) as decoder:
        yield decoder


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    with Decoder.open(build_demo(tmp_path_factory.mktemp("propose") / "demo")) as decoder:
        yield decoder


def tokens_of(steps):
    return [token for step in steps for token in step.tokens]


def check_head(decoder, pattern):
    """Each step of `pattern` accepts what a head that has seen every row deserves."""
    c, tokens = Counting(), [*PROMPT]
    tokens += decoder.prefill(PROMPT).tokens
    for k in pattern:
        step = decoder.step(k)
        assert step.accepted == c.accepts(tokens, k), (k, len(tokens))
        tokens += step.tokens
    assert tokens == [*PROMPT, *c.greedy(PROMPT, len(tokens) - len(PROMPT))]


@pytest.mark.parametrize(
    "pattern",
    [
        [0, 3, 3],
        [3, 0, 3],
        [3, 3, 0, 0, 0, 2, 0, 1, 0, 3],
        [0] * 40 + [3, 3],  # more rows than the graph takes at a time
        [3] + [0] * 16 + [3] + [0] * 17 + [3] + [0] * 15 + [3],
    ],
)
def test_the_head_drafts_after_plain_steps_as_if_it_had_drafted_all_along(counting, pattern):
    check_head(counting, pattern)


def test_any_mixture_of_steps_leaves_the_head_whole(counting):
    rng = random.Random(2)
    for _ in range(4):
        check_head(counting, [rng.choice((0, 0, 1, 2, 3)) for _ in range(50)])


def test_plain_generation_keeps_nothing(counting):
    runs = counting.loaded.slots["catch_up"].counters.runs
    list(counting.generate(PROMPT, 60, k=0))
    assert counting.loaded.slots["catch_up"].counters.runs == runs
    check_head(counting, [3, 3])


def test_an_artifact_without_the_graph_decodes_as_before(tmp_path):
    with Decoder.open(Counting().write(tmp_path)) as decoder:
        decoder.prefill(PROMPT)
        for k in (0, 0, 3, 0, 3):
            decoder.step(k)
        emitted = decoder.sequence.emitted
        assert emitted == Counting().greedy(PROMPT, len(emitted))


class Told(NgramProposer):
    """A lookup that finds what it is told, right or wrong."""

    def __init__(self, decoder, rounds):
        super().__init__(decoder.loaded.buffers)
        self.rounds = list(rounds)

    def find(self, sequence, most):
        return self.rounds.pop(0)(sequence)[:most]


class First(DraftPolicy):
    """Lookup where it finds anything, else the head."""

    def choose(self, offers):
        return next(iter(offers))


def nothing(_):
    return []


def right(sequence):
    return Counting().greedy([*sequence.prompt, *sequence.emitted], 3)


def half(sequence):
    return [right(sequence)[0], 0, 0]


def wrong(sequence):
    return [(right(sequence)[0] + 1) % 320] * 3


@pytest.mark.parametrize(
    "rounds",
    [
        [right, nothing, nothing],  # nothing found after an accepted run
        [right, right, right, nothing],
        [half, nothing, half, half, nothing],
        [wrong, nothing, wrong, right, nothing, nothing],
    ],
)
def test_lookup_and_head_in_turn_keep_states_and_cache_right(counting, rounds):
    joined = JoinedProposer(
        First(COSTS, 3), HeadProposer(counting.loaded), Told(counting, rounds)
    )
    decoder = Decoder(counting.loaded, proposer=joined)
    c = Counting()
    tokens = [*PROMPT, *decoder.prefill(PROMPT).tokens]
    for made in rounds:
        step = decoder.step()
        if made is nothing:
            assert step.accepted == c.accepts(tokens, 3)
        else:
            assert step.accepted == {right: 3, half: 1, wrong: 0}[made]
        tokens += step.tokens
        fed = tokens[:-1]
        for name, expected in c.states(fed).items():
            got = counting.loaded.buffers.read(name, expected.shape)
            assert np.array_equal(got, expected), name
    assert tokens == [*PROMPT, *c.greedy(PROMPT, len(tokens) - len(PROMPT))]
    sources = [name for name in decoder.stats.proposers if name]
    assert set(sources) <= {"head", "lookup"}
    assert decoder.stats.proposers["lookup"][0] == sum(made is not nothing for made in rounds)


@cache
def oracle_drafts():
    """Greedy tokens of the demo after a prompt and, by their number, the head's 3 drafts."""
    model, head = demo().model, demo().head
    prompt, count = list(range(40, 60)), 60
    tokens = list(prompt)
    state = model.new_cache()
    out = model.forward(tokens, state, 0)
    hidden = [out["hidden"]]
    for _ in range(count):
        tokens.append(int(out["logits"][-1].argmax()))
        out = model.forward(tokens[-1:], state, len(tokens) - 1)
        hidden.append(out["hidden"])
    rows = np.concatenate(hidden)
    whole = head.new_cache()
    m, logits = head.forward(tokens[1:], rows[:-1], whole, 0)
    drafts = {}
    for n in range(len(prompt) + 1, len(tokens)):  # n tokens are known
        kept = head.new_cache()
        kept[0].k, kept[0].v = whole[0].k[: n - 1], whole[0].v[: n - 1]
        guesses, state_row = [int(logits[n - 2].argmax())], m[n - 2 : n - 1]
        for j in range(1, 3):
            state_row, more = head.forward(guesses[-1:], state_row, kept, n - 2 + j)
            guesses.append(int(more[-1].argmax()))
        drafts[n] = guesses
    return prompt, tokens[len(prompt) :], drafts


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demos_head_drafts_what_the_oracles_head_does_after_any_steps(built, seed):
    prompt, tokens, drafts = oracle_drafts()
    rng = random.Random(seed)
    built.prefill(prompt)
    buffers = built.loaded.buffers
    for name in ("head.0.key", "head.0.value"):  # a row that is not taken in must show
        rows = buffers.read(name)
        rows[:, :, len(prompt) - 1 :] = np.nan
        buffers.write(name, rows)
    seen = 0
    while len(built.sequence.emitted) < 50:
        k = rng.choice((0, 0, 0, 3))
        known = len(prompt) + len(built.sequence.emitted)
        built.step(k)
        if k:
            assert buffers.read("ids")[0, 1:].tolist() == drafts[known], known
            seen += 1
    assert built.sequence.emitted == tokens[: len(built.sequence.emitted)]
    assert seen >= 5


def test_a_useless_head_costs_within_3_percent_of_plain_decoding(tmp_path, monkeypatch):
    monkeypatch.setattr(runtime.drafting, "measure_costs", lambda _: COSTS)
    c = Counting(miss=1, catch_up=True, capacity=1200, prefill_rows=256)  # every guess misses
    with Decoder.open(c.write(tmp_path)) as decoder:
        tokens = tokens_of(decoder.generate(PROMPT, 600, k="auto"))
        runs = {name: slot.counters.runs for name, slot in decoder.loaded.slots.items()}
        assert tokens == c.greedy(PROMPT, 600)
        assert runs["decode"] + runs["verify"] == 599  # as many forwards as without
        assert runs["verify"] == runs["draft"] > 3
        assert runs["draft"] + runs["catch_up"] <= 0.03 * 599
        # and what was learnt holds for the next prompt
        tokens_of(decoder.generate(PROMPT, 200, k="auto"))
        assert decoder.loaded.slots["draft"].counters.runs - runs["draft"] <= 1


def test_a_head_of_zeros_costs_the_demo_within_3_percent(tmp_path, monkeypatch):
    monkeypatch.setattr(runtime.drafting, "measure_costs", lambda _: COSTS)
    zeros = np.zeros(demo().canonical_weights["head.fc"].shape.numpy(), np.float32)
    sizes = {"sampling": False, "capacity": 1024, "prefill_rows": 256}
    path = build_demo(tmp_path / "zeros", {"head.fc": zeros}, **sizes)
    with Decoder.open(path) as decoder:
        plain = tokens_of(decoder.generate(PROMPT, 600, k=0, stop_ids=()))
        assert tokens_of(decoder.generate(PROMPT, 600, k="auto", stop_ids=())) == plain
        slots = decoder.loaded.slots
        head_runs = slots["draft"].counters.runs + slots["catch_up"].counters.runs
        assert decoder.stats.steps <= 599
        assert 0 < head_runs <= 0.03 * 599


def test_a_good_head_drafts_nearly_always(built, monkeypatch):
    monkeypatch.setattr(runtime.drafting, "measure_costs", lambda _: COSTS)
    ids = Tokenizer.of(built.loaded.folder, built.manifest).encode("import os\nimport sys\n")
    plain = tokens_of(built.generate(ids, 150, k=0, stop_ids=()))
    fixed = tokens_of(built.generate(ids, 150, k=3, stop_ids=()))
    steps = built.stats.steps
    assert tokens_of(built.generate(ids, 150, k="auto", stop_ids=())) == plain == fixed
    assert built.stats.steps <= 1.1 * steps
    assert built.policy.to_json()["seconds"] == COSTS.to_json()


COPY = '''def first_value(table, key, missing=None):
    """Return the first value of a key in a table of rows."""
    for row in table:
        if row.key == key:
            return row.value
    return missing


'''


def test_a_text_that_copies_takes_fewer_steps_with_lookup(built):
    ids = Tokenizer.of(built.loaded.folder, built.manifest).encode(COPY * 3)
    plain = tokens_of(built.generate(ids, 150, k=0, stop_ids=()))
    assert tokens_of(built.generate(ids, 150, k=3, stop_ids=())) == plain
    head = built.stats.tokens_per_step
    assert tokens_of(built.generate(ids, 150, k=3, lookup=True, stop_ids=())) == plain
    assert built.stats.tokens_per_step >= head
    _, drafted, accepted = built.stats.proposers["lookup"]
    assert accepted > 0.8 * drafted > 0
    made = built.stats.to_json()["proposers"]
    assert sum(source["accepted"] for source in made.values()) == built.stats.accepted


def test_lookup_alone_needs_no_head(built):
    ids = Tokenizer.of(built.loaded.folder, built.manifest).encode(COPY * 2)
    want = tokens_of(built.generate(ids, 60, k=0, stop_ids=()))
    alone = Decoder(built.loaded, proposer=NgramProposer(built.loaded.buffers))
    assert tokens_of(alone.generate(ids, 60, stop_ids=())) == want
    assert alone.stats.proposers.keys() == {"lookup"}
    assert alone.stats.accepted > 0


def test_the_index_follows_prompt_and_output(counting):
    lookup = NgramProposer(counting.loaded.buffers)
    lookup.begin()
    counting.prefill([1, 2, 3, 4, 1, 2, 3])
    sequence = counting.sequence
    sequence.emitted[:] = [4]
    want = NgramIndex()
    want.extend([1, 2, 3, 4, 1, 2, 3, 4])
    assert lookup.find(sequence, 3) == want.find(3) == [1, 2, 3]
    sequence.emitted += [1, 9]
    assert lookup.find(sequence, 3) == []


def test_costs_are_positive_times_and_leave_clean_buffers(counting):
    costs = measure_costs(counting.loaded)
    assert 0 < costs.draft < 1
    assert 0 < costs.decode < 1
    assert 0 < costs.verify < 1
    assert costs.of("head") == costs.verify + costs.draft
    assert costs.of("lookup") == costs.verify
    assert not counting.loaded.buffers.read("length").any()
    check_head(counting, [3, 0, 3])


def test_drafting_as_it_pays_measures_once_and_gives_the_greedy_text(counting, monkeypatch):
    measured = []
    monkeypatch.setattr(
        runtime.drafting, "measure_costs", lambda loaded: measured.append(loaded) or COSTS
    )
    decoder = Decoder(counting.loaded)
    for lookup in (False, True):
        got = tokens_of(decoder.generate(PROMPT, 60, k="auto", lookup=lookup))
        assert got == Counting().greedy(PROMPT, 60)
    assert len(measured) == 1


def test_without_a_head_auto_is_plain_decoding(tmp_path):
    decoder = Decoder(load(Counting(k=0).write(tmp_path)))
    got = tokens_of(decoder.generate(PROMPT, 20, k="auto", lookup=True))
    assert got == Counting().greedy(PROMPT, 20)
    assert decoder.policy is None
