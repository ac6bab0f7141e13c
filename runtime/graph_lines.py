"""How often each slot replayed its capture, in words and as JSON."""

from __future__ import annotations

from collections.abc import Mapping

from runtime.slots import Counters, Slot

__all__ = ["captured_counters", "graph_lines"]

LABELS = {
    "decode": "cuda_graph",
    "verify": "cuda_graph_verify",
    "draft": "cuda_graph_draft",
    "decode_sampled": "cuda_graph_sampled",
    "verify_sampled": "cuda_graph_verify_sampled",
}
"""Graph -> what its line is called."""


def captured_counters(slots: Mapping[str, Slot]) -> dict[str, Counters]:
    """Label -> live counters of each slot that is there to be captured."""
    return {
        label: slots[name].counters
        for name, label in LABELS.items()
        if name in slots and slots[name].captures
    }


def graph_lines(slots: Mapping[str, Slot]) -> list[str]:
    """``cuda_graph: captures=1 replays=20 fallbacks=0 invalidations=0`` and its like.

    Empty on a provider that captures nothing.
    """
    return [
        f"{label}: captures={counters.captures} replays={counters.replays} "
        f"fallbacks={counters.fallbacks} invalidations={counters.invalidations}"
        for label, counters in captured_counters(slots).items()
    ]
