"""A graph slot: one graph, its session and its buffers, bound to each other once.

Every run reads and writes the same addresses, so a graph can be captured and replayed, and
graphs hand values on through the buffers they share without a copy.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Protocol

from artifacts import Graph, Port
from runtime.buffers import Buffers, numpy_dtype
from runtime.errors import LoadError, SlotError
from runtime.session import Binding, Session, Tensor

__all__ = ["Counters", "GraphSlot", "Slot", "SlotState", "check_ports"]


class SlotState(StrEnum):
    """The life of a slot."""

    COLD = "cold"
    """Bound; each run executes the graph node by node. A CPU slot stays here."""
    CAPTURED = "captured"
    """Each run replays a capture."""
    CLOSED = "closed"
    """Never runs again."""


@dataclass(slots=True)
class Counters:
    """What a slot did since it was made."""

    runs: int = 0
    captures: int = 0
    replays: int = 0
    fallbacks: int = 0
    """Runs that should have been replays and were not."""
    invalidations: int = 0
    """Captures that were thrown away."""

    def to_json(self) -> dict[str, int]:
        """As plain JSON values."""
        return asdict(self)


class Slot(Protocol):
    """What the decoding loop needs of a slot, whatever the device."""

    @property
    def name(self) -> str:
        """Of the graph."""

    @property
    def state(self) -> SlotState:
        """Where in its life the slot is."""

    @property
    def counters(self) -> Counters:
        """What it did so far."""

    @property
    def captures(self) -> bool:
        """Whether it is meant to be captured; then `counters` tell if it was."""

    def run(self, rows: int | None = None) -> None:
        """Run the graph once over its buffers; `rows` where the graph leaves them open."""

    def close(self) -> None:
        """Let go of the graph; a later `run` raises `SlotError`."""


class GraphSlot:
    """A slot that has nothing to capture: captures and replays stay 0."""

    captures = False

    def __init__(self, name: str, graph: Graph, session: Session, buffers: Buffers) -> None:
        """Bind every port for life; raises `LoadError` where a port and its buffer differ."""
        check_ports(name, graph, session, buffers)
        self.name = name
        self.state = SlotState.COLD
        self.counters = Counters()
        self._graph = graph
        self._buffers = buffers
        self._session: Session | None = session
        self._binding: Binding | None = None
        self._ports = (*graph.inputs, *graph.outputs)
        self._open = tuple(port for port in self._ports if _is_open(port))
        self._limit = min((_rows_limit(p, buffers) for p in self._open), default=0)
        self._addresses = {p.buffer: buffers.address(p.buffer) for p in self._ports}
        self._attach(session)

    def run(self, rows: int | None = None) -> None:
        """Run the graph once over its buffers; `rows` where the graph leaves them open.

        Raises:
            SlotError: The slot is closed, `rows` does not go with the graph, a buffer is no
                longer where it was bound, or the graph failed.
        """
        if self._session is None:
            raise SlotError(f"the {self.name} slot is closed. Open the artifact again")
        self._choose(rows)
        for buffer, address in self._addresses.items():
            if self._buffers.address(buffer) != address:
                raise SlotError(
                    f"the {self.name} slot is bound to {buffer!r} at {address:#x}, which is "
                    f"now at {self._buffers.address(buffer):#x}; a run would use stale "
                    "memory. Open the artifact again"
                )
        self._execute(self._session)
        self.counters.runs += 1

    def close(self) -> None:
        """Let go of the graph; a later `run` raises `SlotError`."""
        self._session = self._binding = None
        self.state = SlotState.CLOSED

    def _attach(self, session: Session) -> None:
        """Let `session` be what runs, over the same memory."""
        self._session, self._binding = session, session.binding()
        self._rows = self._graph.rows or 0
        self._bind(tuple(port for port in self._ports if not _is_open(port)))

    def _execute(self, session: Session) -> None:
        assert self._binding is not None
        session.run(self._binding)

    def _choose(self, rows: int | None) -> None:
        if not self._open:
            if rows not in (None, self._graph.rows):
                raise SlotError(
                    f"the {self.name} graph has {self._graph.rows} rows every run, not {rows}"
                )
        elif rows is None or not 1 <= rows <= self._limit:
            raise SlotError(
                f"the {self.name} graph takes 1 to {self._limit} rows a run, not {rows}"
            )
        elif rows != self._rows:
            self._rows = rows
            self._bind(self._open)

    def _bind(self, ports: tuple[Port, ...]) -> None:
        assert self._binding is not None
        for port in ports:
            shape = tuple(n if isinstance(n, int) else self._rows for n in port.shape)
            is_input = port in self._graph.inputs
            bind = self._binding.bind_input if is_input else self._binding.bind_output
            start = (
                self._addresses[port.buffer] + port.offset * numpy_dtype(port.dtype).itemsize
            )
            bind(port.name, port.dtype, shape, start)


def check_ports(name: str, graph: Graph, session: Session, buffers: Buffers) -> None:
    """Compare a graph's ports with its ONNX file and with the buffers.

    Binding is by address, so a port that is larger than its buffer would write elsewhere.

    Raises:
        LoadError: Manifest and ONNX file declare different inputs or outputs, a port does not
            fit its buffer, or the graph's rows are open in one place and fixed in another.
    """
    for kind, ports, tensors in (
        ("input", graph.inputs, session.inputs),
        ("output", graph.outputs, session.outputs),
    ):
        listed = {p.name: Tensor(p.name, p.dtype, p.shape) for p in ports}
        found = {tensor.name: tensor for tensor in tensors}
        if len(listed) != len(ports) or listed.keys() != found.keys():
            differing = sorted(listed.keys() ^ found.keys()) or ["one of them listed twice"]
            raise LoadError(
                f"manifest and {graph.file} differ in the {kind}s of the {name} graph: "
                f"{', '.join(differing[:8])}. Build the artifact again"
            )
        for key, tensor in listed.items():
            if tensor.dtype != found[key].dtype or _fixed(tensor) != _fixed(found[key]):
                raise LoadError(
                    f"the {kind} {key!r} of the {name} graph is {tensor} in the manifest and "
                    f"{found[key]} in {graph.file}. Build the artifact again"
                )
        for port in ports:
            _check_fit(name, port, buffers)
    opened = [port.name for port in (*graph.inputs, *graph.outputs) if _is_open(port)]
    if (graph.rows is None) != bool(opened):
        raise LoadError(
            f"the {name} graph has {graph.rows or 'no fixed number of'} rows, and "
            f"{', '.join(opened) or 'none'} of its ports leave a size open. Build it again"
        )


def _check_fit(name: str, port: Port, buffers: Buffers) -> None:
    buffer = buffers.declared(port.buffer)
    opened = sum(isinstance(size, str) for size in port.shape)
    if port.dtype != buffer.dtype or _rows_limit(port, buffers) < 1 or opened > 1:
        raise LoadError(
            f"the port {port.name!r} of the {name} graph, {port.dtype}{list(port.shape)}, "
            f"does not go on the buffer {port.buffer!r}, {buffer.dtype}{list(buffer.shape)}, "
            f"from element {port.offset} on. Build the artifact again"
        )


def _rows_limit(port: Port, buffers: Buffers) -> int:
    """How often the fixed part of a port fits its buffer: once at least, or it does not."""
    one = math.prod(n for n in port.shape if isinstance(n, int))
    return (math.prod(buffers.declared(port.buffer).shape) - port.offset) // max(one, 1)


def _is_open(port: Port) -> bool:
    return any(isinstance(size, str) for size in port.shape)


def _fixed(tensor: Tensor) -> tuple[int | None, ...]:
    """Sizes, None where a run chooses; the name of such a size is the file's own affair."""
    return tuple(size if isinstance(size, int) else None for size in tensor.shape)
