"""A slot whose graph is loaded when it first runs: graphs that many runs never need."""

from __future__ import annotations

from collections.abc import Callable

from runtime.errors import SlotError
from runtime.slots import Counters, Slot, SlotState

__all__ = ["LateSlot"]


class LateSlot:
    """Stands in for a slot until its first run, then hands everything on to it."""

    def __init__(self, name: str, make: Callable[[], Slot]) -> None:
        """Remember how to `make` the slot; it may raise `LoadError` then."""
        self.name = name
        self._make = make
        self._slot: Slot | None = None
        self._closed = False
        self._none = Counters()

    @property
    def state(self) -> SlotState:
        """Where in its life the slot is; cold before it is made."""
        if self._closed:
            return SlotState.CLOSED
        return SlotState.COLD if self._slot is None else self._slot.state

    @property
    def is_loaded(self) -> bool:
        """Whether the graph is there."""
        return self._slot is not None

    @property
    def captures(self) -> bool:
        """Whether it is there to be captured; not known before it is made."""
        return self._slot is not None and self._slot.captures

    @property
    def counters(self) -> Counters:
        """What it did so far."""
        return self._none if self._slot is None else self._slot.counters

    def load(self) -> Slot:
        """Load the graph now, if it is not there yet."""
        if self._closed:
            raise SlotError(f"the {self.name} slot is closed. Open the artifact again")
        if self._slot is None:
            self._slot = self._make()
        return self._slot

    def run(self, rows: int | None = None) -> None:
        """Run the graph once over its buffers; load it first where this is the first run."""
        self.load().run(rows)

    def close(self) -> None:
        """Let go of the graph; a later `run` raises `SlotError`."""
        self._closed = True
        if self._slot is not None:
            self._slot.close()
