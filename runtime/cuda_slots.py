"""Slots that are captured once as a CUDA graph and replayed ever after.

    COLD ── capture() ──> CAPTURED ── close() ──> CLOSED
      └─ refused: stays COLD, each run is a fallback

ONNX Runtime checks nothing on a replay: whatever is bound, the captured addresses are used.
So the slot checks, and refuses what a capture cannot follow.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from artifacts import Graph
from runtime.buffers import CACHES
from runtime.cuda_buffers import CudaBuffers
from runtime.cuda_driver import CudaDriver
from runtime.errors import LoadError, SlotError
from runtime.session import Session, first_line
from runtime.slots import GraphSlot, SlotState

__all__ = ["CudaSlot", "written_in_place"]

logger = logging.getLogger(__name__)

OpenSession = Callable[[bool], Session]
"""A session of the slot's graph; the argument says whether to prepare it for a capture."""


def written_in_place(graph: Graph) -> list[str]:
    """Buffers whose values a run changes and a later one depends on.

    Two kinds of written buffers are none of these:

    - caches of a graph that commits rows itself: all rows it writes begin at the `length` it
      read, so with the old `length` they count for nothing. A graph that leaves `length`
      alone (draft) may write rows in front of it, and its caches are listed;
    - memory that is read as a view alone: each run writes it before it reads it.
    """
    read = {port.buffer for port in graph.inputs}
    written = {port.buffer for port in graph.outputs}
    views = {port.buffer for port in graph.inputs if port.view}
    views -= {port.buffer for port in graph.inputs if not port.view}
    commits = "length" in written & read
    return sorted(
        name
        for name in written - views
        if not (commits and name in read and name.endswith(CACHES))
    )


class CudaSlot(GraphSlot):
    """A slot that replays.

    Not for graphs whose rows are open (prefill): those take a plain `GraphSlot`.
    """

    captures = True

    def __init__(
        self,
        name: str,
        graph: Graph,
        open_session: OpenSession,
        buffers: CudaBuffers,
        driver: CudaDriver,
    ) -> None:
        """Load and bind.

        Where ONNX Runtime refuses to prepare the graph for a capture, the slot runs uncaptured
        and says so once, as a warning. Raises `LoadError` where it does not load at all.
        """
        self._open_session = open_session
        self._device_buffers = buffers
        self._driver = driver
        self._thread = 0
        self._refused = False
        try:
            session, refusal = open_session(True), ""
        except LoadError as e:
            session, refusal = open_session(False), first_line(e.__cause__ or e)
        if session.host_inputs:
            raise LoadError(
                f"ONNX Runtime reads {', '.join(sorted(session.host_inputs))} of the {name} "
                "graph in the host's memory; its value would be frozen. Build the artifact "
                "again, for this release of it"
            )
        super().__init__(name, graph, session, buffers)
        if refusal:
            self._refuse(refusal)

    def capture(self) -> None:
        """Capture the graph; all that later runs depend on is as before.

        ONNX Runtime's first run with a graph id is two plain runs, a capture and a replay, so
        the graph takes effect three times. What it writes in place is therefore saved and
        given back.

        The buffers must hold what the graph can run on three times in a row: at least one
        committed row, and room for three more.

        Raises:
            SlotError: The slot is captured or closed.
            DeviceError: The device has no room for the copies, or is lost.
        """
        if self.state is not SlotState.COLD or self._session is None:
            raise SlotError(f"the {self.name} slot is {self.state} and cannot be captured")
        if self._refused:
            return
        assert self._binding is not None
        refusal = ""
        with self._device_buffers.kept(written_in_place(self._graph)):
            try:
                self._session.run(self._binding)
            except SlotError as e:
                refusal = first_line(e.__cause__ or e)
                self._driver.abandon_capture()
        if not refusal:
            self.state, self._thread = SlotState.CAPTURED, threading.get_ident()
            self.counters.captures += 1
        else:
            self._session = self._binding = None
            self._attach(self._open_session(False))
            self._refuse(refusal)

    def run_eagerly(self) -> None:
        """Run node by node although there is a capture, to compare the two."""
        if self._session is None or self._binding is None:
            raise SlotError(f"the {self.name} slot is closed. Open the artifact again")
        self._session.run(self._binding, eager=True)
        self.counters.runs += 1

    def _refuse(self, reason: str) -> None:
        self._refused = True
        logger.warning(
            "the %s graph cannot be captured as a CUDA graph; it runs uncaptured, which is "
            "slower. ONNX Runtime says: %s",
            self.name,
            reason,
        )

    def _execute(self, session: Session) -> None:
        assert self._binding is not None
        if self.state is not SlotState.CAPTURED:
            session.run(self._binding, eager=True)
            self.counters.fallbacks += 1
            return
        if threading.get_ident() != self._thread:
            raise SlotError(
                f"the {self.name} slot was captured on another thread. A capture is its "
                "thread's own: run everything on the thread that opened the artifact, or open "
                "it on this one"
            )
        try:
            session.run(self._binding)
        except SlotError:
            self.state = SlotState.COLD
            self.counters.invalidations += 1
            raise
        self.counters.replays += 1
