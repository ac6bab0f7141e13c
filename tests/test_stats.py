import time

import pytest

from runtime.stats import PHASES, Stats


def test_a_position_is_tried_only_where_the_earlier_ones_stood():
    stats = Stats()
    for accepted in (0, 2, 3, 1):
        stats.count(tokens=accepted + 1, drafted=3, accepted=accepted)
    stats.count(tokens=2, drafted=1, accepted=1)
    stats.count(tokens=1, drafted=0, accepted=0)
    assert stats.positions == [[5, 4], [3, 2], [2, 1]]
    assert (stats.steps, stats.drafted, stats.accepted) == (6, 13, 7)


def test_rates_leave_out_the_token_that_the_prefill_made():
    stats = Stats(tokens=1)
    assert stats.tokens_per_second is None
    assert stats.tokens_per_step is None
    stats.count(tokens=4, drafted=3, accepted=3)
    stats.count(tokens=2, drafted=3, accepted=1)
    stats.seconds |= {"prefill": 50.0, "verify": 1.5, "host": 0.5}
    assert stats.tokens_per_step == 3.0
    assert stats.tokens_per_second == pytest.approx(3.0)


def test_each_moment_belongs_to_the_innermost_phase():
    stats = Stats()
    started = time.perf_counter()
    with stats.phase("host"):
        time.sleep(0.01)
        with stats.phase("verify"):
            time.sleep(0.02)
        time.sleep(0.01)
    whole = time.perf_counter() - started
    assert stats.seconds["host"] >= 0.02
    assert stats.seconds["verify"] >= 0.02
    assert sum(stats.seconds.values()) <= whole


def test_a_phase_ends_with_an_error_too():
    stats = Stats()
    with pytest.raises(KeyError), stats.phase("host"), stats.phase("draft"):
        raise KeyError
    with stats.phase("decode"):
        pass
    assert set(stats.to_json()["seconds"]) == set(PHASES)
