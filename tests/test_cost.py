import itertools
import random

import pytest

from runtime.cost import FIRST_PAUSE, LONGEST_PAUSE, Costs, DraftPolicy

FAST = Costs(decode=1.0, verify=1.2, draft=0.2)


def steps(policy, count, accepts, offers=None):
    """Run the policy; `accepts(source, drafts)` says how many stand. Returns the sources."""
    chosen = []
    for _ in range(count):
        given = offers() if callable(offers) else (offers or {"head": policy.k})
        source = policy.choose(given)
        chosen.append(source)
        if source is not None:
            policy.observe(source, given[source], accepts(source, given[source]))
    return chosen


def test_a_head_that_is_right_always_drafts():
    policy = DraftPolicy(FAST, 3)
    assert set(steps(policy, 100, lambda _, n: n)) == {"head"}
    assert min(policy.to_json()["sources"]["head"]["acceptance"]) > 0.99


@pytest.mark.parametrize("costs", [FAST, Costs(1, 2, 0.5), Costs(1, 1.05, 0.05)])
def test_a_useless_head_is_dropped_soon_and_tried_ever_less(costs):
    policy = DraftPolicy(costs, 3)
    chosen = steps(policy, 4000, lambda *_: 0)
    wasted = sum((costs.of("head") - costs.decode) for s in chosen if s)
    assert wasted <= 0.01 * 4000 * costs.decode
    tries = [i for i, source in enumerate(chosen) if source]
    gaps = [b - a for a, b in itertools.pairwise(tries) if b - a > 1]
    assert gaps == [FIRST_PAUSE * 2**i for i in range(len(gaps))]
    assert policy.to_json()["sources"]["head"]["tries"] == len(gaps)


def test_the_pause_has_an_end():
    policy = DraftPolicy(FAST, 1)
    tries = [i for i, source in enumerate(steps(policy, 20000, lambda *_: 0)) if source]
    assert max(b - a for a, b in itertools.pairwise(tries)) == LONGEST_PAUSE


def test_a_head_that_gets_better_is_found_again():
    policy = DraftPolicy(FAST, 3)
    steps(policy, 200, lambda *_: 0)
    chosen = steps(policy, 400, lambda _, n: n)
    back = chosen.index("head")
    assert back <= 4 * FIRST_PAUSE
    assert set(chosen[back:]) == {"head"}


@pytest.mark.parametrize(
    ("share", "pays"), [(0.05, False), (0.3, False), (0.65, True), (0.9, True)]
)
def test_it_drafts_where_tokens_for_a_step_pay_for_its_time(share, pays):
    """Costs 2.0: worth it where 1 + p + p^2 + p^3 > 2, from p = 0.544 on."""
    policy, rng = DraftPolicy(Costs(1, 1.6, 0.4), 3), random.Random(1)

    def accepts(_, drafts):
        return next((i for i in range(drafts) if rng.random() >= share), drafts)

    chosen = steps(policy, 3000, accepts)
    drafted = sum(source is not None for source in chosen) / len(chosen)
    assert (drafted > 0.5) == pays
    assert pays or drafted < 0.2


def test_never_much_slower_than_decoding_whatever_the_acceptance():
    for share in range(0, 101, 10):
        for costs in (FAST, Costs(1, 2, 0.5), Costs(1, 3.5, 1)):
            policy, rng = DraftPolicy(costs, 3), random.Random(share)
            spent = tokens = 0.0
            for _ in range(4000):
                source = policy.choose({"head": 3})
                stood = 0
                if source:
                    stood = next((i for i in range(3) if rng.random() * 100 >= share), 3)
                    policy.observe(source, 3, stood)
                spent += costs.of("head") if source else costs.decode
                tokens += 1 + stood
            assert spent <= 1.03 * tokens, (share, costs)


def test_drafting_is_not_begun_where_even_a_good_head_would_not_pay():
    policy = DraftPolicy(Costs(1, 5, 1), 3)
    assert steps(policy, FIRST_PAUSE - 1, lambda _, n: n) == [None] * (FIRST_PAUSE - 1)


def test_the_source_that_promises_most_drafts_and_of_equals_the_first():
    policy = DraftPolicy(FAST, 3)
    assert policy.choose({"lookup": 3, "head": 3}) == "lookup"  # costs no head
    for _ in range(20):
        policy.observe("lookup", 3, 0)
    assert policy.choose({"lookup": 3, "head": 3}) == "head"
    free = DraftPolicy(Costs(float("inf"), 1, 0), 3)
    assert not free.measured
    assert free.choose({"lookup": 3, "head": 3}) == "lookup"
    assert free.choose({"lookup": 1, "head": 3}) == "head"


def test_a_bad_source_does_not_stop_a_good_one():
    policy = DraftPolicy(FAST, 3)
    chosen = steps(
        policy, 300, lambda source, n: n if source == "head" else 0, {"lookup": 3, "head": 3}
    )
    assert chosen[20:].count("head") >= 278


def test_without_offers_there_is_nothing_to_draft():
    policy = DraftPolicy(FAST, 3)
    assert policy.choose({}) is None
