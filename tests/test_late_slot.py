import pytest

from runtime.errors import LoadError, SlotError
from runtime.late_slot import LateSlot
from runtime.slots import Counters, SlotState


class Recorded:
    def __init__(self):
        self.name, self.state, self.counters = "x", SlotState.COLD, Counters()
        self.rows = []

    def run(self, rows=None):
        self.rows.append(rows)
        self.counters.runs += 1

    def close(self):
        self.state = SlotState.CLOSED


def test_the_graph_is_loaded_once_and_only_when_it_runs():
    made = []

    def make():
        made.append(Recorded())
        return made[-1]

    slot = LateSlot("x", make)
    assert (slot.state, slot.counters.runs, made) == (SlotState.COLD, 0, [])
    slot.run(3)
    slot.run()
    assert slot.load() is made[0]
    assert (len(made), made[0].rows, slot.counters.runs) == (1, [3, None], 2)
    slot.close()
    assert made[0].state is slot.state is SlotState.CLOSED
    with pytest.raises(SlotError, match="the x slot is closed"):
        slot.run()


def test_closing_before_the_first_run_loads_nothing():
    slot = LateSlot("x", lambda: pytest.fail("loaded"))
    slot.close()
    with pytest.raises(SlotError, match="closed"):
        slot.load()


def test_a_graph_that_does_not_load_says_so_when_it_is_wanted():
    def make():
        raise LoadError("broken")

    slot = LateSlot("x", make)
    for _ in range(2):
        with pytest.raises(LoadError, match="broken"):
            slot.run()
    slot.close()
