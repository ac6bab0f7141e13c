"""How long the graphs of an artifact take, on the machine and slots that will run them."""

from __future__ import annotations

import statistics
import time

import numpy as np

from runtime.cost import Costs
from runtime.load import Loaded

__all__ = ["measure_costs"]

WARM_UPS = 2
"""Runs before the clock: the first ones load, allocate and, on a device, capture."""
RUNS = 5
"""Runs of which the median counts."""
ENOUGH = 0.5
"""Seconds after which a graph is not run again: of a slow one fewer runs tell as much."""
CONTEXT = 512
"""Rows that the caches seem to hold, or half of the capacity where that is less."""


def measure_costs(loaded: Loaded) -> Costs:
    """Time decode, verify and draft; whatever sequence is under way is lost.

    What the caches hold is of no matter. Times grow with the context, but together: what they
    are to each other changes little.
    """
    context = np.array([max(1, min(CONTEXT, loaded.manifest.capacity // 2))], np.int32)
    loaded.buffers.reset()

    def seconds(name: str) -> float:
        slot = loaded.slots[name]
        times: list[float] = []
        begun = time.perf_counter()
        for run in range(WARM_UPS + RUNS):
            if times and time.perf_counter() - begun > ENOUGH:
                break
            loaded.buffers.write("length", context)
            started = time.perf_counter()
            slot.run()
            loaded.buffers.read("accepted")  # on a device, the run has ended when this is here
            if run >= WARM_UPS:
                times.append(time.perf_counter() - started)
        return statistics.median(times)

    costs = Costs(seconds("decode"), seconds("verify"), seconds("draft"))
    loaded.buffers.reset()
    return costs
