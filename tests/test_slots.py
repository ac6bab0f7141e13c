"""The slot against a session that only records; real graphs run in test_decode.py."""

from dataclasses import replace

import numpy as np
import pytest

from artifacts import Buffer, Graph, Port
from runtime.buffers import CpuBuffers
from runtime.errors import LoadError, SlotError
from runtime.session import Tensor
from runtime.slots import GraphSlot, SlotState

BUFFERS = {
    "ids": Buffer("int64", (1, 4)),
    "prompt_ids": Buffer("int64", (1, 16)),
    "cache": Buffer("float32", (1, 1, 8, 2)),
    "result": Buffer("int64", (6,)),
}
DECODE = Graph(
    file="decode.onnx",
    sha256="",
    rows=1,
    inputs=(
        Port("input_ids", "ids", "int64", (1, 1)),
        Port("past", "cache", "float32", (1, 1, 8, 2)),
    ),
    outputs=(
        Port("next", "ids", "int64", (1, 1)),
        Port("present", "cache", "float32", (1, 1, 8, 2)),
        Port("result", "result", "int64", (3,)),
    ),
    passes=(),
)
PREFILL = replace(
    DECODE,
    file="prefill.onnx",
    rows=None,
    inputs=(Port("input_ids", "prompt_ids", "int64", (1, "S")), DECODE.inputs[1]),
)


class FakeSession:
    """Declares what it is told to, and records."""

    def __init__(self, graph: Graph) -> None:
        self.name = graph.file
        self.inputs = tuple(Tensor(p.name, p.dtype, p.shape) for p in graph.inputs)
        self.outputs = tuple(Tensor(p.name, p.dtype, p.shape) for p in graph.outputs)
        self.bound: list[tuple[str, tuple[int, ...], int]] = []
        self.runs = 0

    def binding(self):
        return self

    def bind_input(self, name, dtype, shape, address):
        self.bound.append((name, tuple(shape), address))

    bind_output = bind_input

    def run(self, binding):
        assert binding is self
        self.runs += 1


@pytest.fixture
def buffers() -> CpuBuffers:
    return CpuBuffers(BUFFERS)


def slot_of(graph: Graph, buffers) -> tuple[GraphSlot, FakeSession]:
    session = FakeSession(graph)
    return GraphSlot("some", graph, session, buffers), session


def test_every_port_is_bound_once_to_the_start_of_its_buffer(buffers):
    slot, session = slot_of(DECODE, buffers)
    for _ in range(3):
        slot.run()
    at = {name: buffers.address(name) for name in BUFFERS}
    assert session.bound == [
        ("input_ids", (1, 1), at["ids"]),
        ("past", (1, 1, 8, 2), at["cache"]),
        ("next", (1, 1), at["ids"]),
        ("present", (1, 1, 8, 2), at["cache"]),
        ("result", (3,), at["result"]),
    ]
    assert session.runs == 3


def test_a_port_may_begin_inside_its_buffer(buffers):
    half = Port("past", "cache", "float32", (1, 1, 4, 2), offset=8)
    _, session = slot_of(with_port(DECODE, half), buffers)
    assert session.bound[1] == ("past", (1, 1, 4, 2), buffers.address("cache") + 8 * 4)


def test_on_the_cpu_runs_are_counted_and_nothing_is_captured(buffers):
    slot, _ = slot_of(DECODE, buffers)
    slot.run()
    slot.run(1)
    assert slot.state is SlotState.COLD
    assert slot.counters.to_json() == {
        "runs": 2,
        "captures": 0,
        "replays": 0,
        "fallbacks": 0,
        "invalidations": 0,
    }


def test_another_number_of_rows_binds_only_the_ports_that_it_touches(buffers):
    slot, session = slot_of(PREFILL, buffers)
    assert "input_ids" not in [name for name, _, _ in session.bound]
    session.bound.clear()
    for rows in (5, 5, 16, 1):
        slot.run(rows)
    assert [(name, shape) for name, shape, _ in session.bound] == [
        ("input_ids", (1, 5)),
        ("input_ids", (1, 16)),
        ("input_ids", (1, 1)),
    ]


@pytest.mark.parametrize("rows", [None, 0, -1, 17])
def test_rows_that_do_not_fit_the_buffer_are_refused(buffers, rows):
    slot, session = slot_of(PREFILL, buffers)
    with pytest.raises(SlotError, match=f"takes 1 to 16 rows a run, not {rows}"):
        slot.run(rows)
    assert session.runs == 0


def test_a_fixed_graph_refuses_other_rows(buffers):
    slot, _ = slot_of(DECODE, buffers)
    with pytest.raises(SlotError, match="has 1 rows every run, not 2"):
        slot.run(2)


def test_a_buffer_that_moved_stops_the_run(buffers, monkeypatch):
    slot, session = slot_of(DECODE, buffers)
    moved = np.zeros(100, np.float32).ctypes.data
    address = buffers.address
    monkeypatch.setattr(buffers, "address", lambda n: moved if n == "cache" else address(n))
    with pytest.raises(SlotError, match="bound to 'cache' at 0x"):
        slot.run()
    assert (session.runs, slot.counters.runs) == (0, 0)


def test_a_closed_slot_never_runs_again(buffers):
    slot, session = slot_of(DECODE, buffers)
    slot.close()
    slot.close()
    assert slot.state is SlotState.CLOSED
    with pytest.raises(SlotError, match="closed"):
        slot.run()
    assert session.runs == 0


def with_port(graph: Graph, port: Port) -> Graph:
    return replace(graph, inputs=(graph.inputs[0], port))


@pytest.mark.parametrize(
    ("port", "message"),
    [
        (Port("past", "cache", "float16", (1, 1, 8, 2)), "does not go on the buffer 'cache'"),
        (Port("past", "cache", "float32", (1, 1, 9, 2)), "does not go on the buffer 'cache'"),
        (Port("past", "cache", "float32", (1, 1, 8, 2), offset=1), "from element 1 on"),
        (Port("past", "cache", "float32", (1, 1, 4, 2), offset=9), "from element 9 on"),
        (Port("past", "cache", "float32", (1, 1, "S", "S")), "does not go on the buffer"),
        (Port("past", "cache", "float32", (1, 1, "S", 2)), "1 rows, and past .* size open"),
        (Port("past", "other", "float32", (1, 1, 8, 2)), "no buffer 'other'"),
    ],
)
def test_a_port_that_would_leave_its_buffer_is_refused(buffers, port, message):
    graph = with_port(DECODE, port)
    with pytest.raises((LoadError, SlotError), match=message):
        GraphSlot("some", graph, FakeSession(graph), buffers)


def test_a_manifest_that_differs_from_the_file_is_refused(buffers):
    session = FakeSession(DECODE)
    smaller = with_port(DECODE, replace(DECODE.inputs[1], shape=(1, 1, 4, 2)))
    with pytest.raises(LoadError, match=r"'past' .*\[1, 1, 4, 2\] in the manifest"):
        GraphSlot("some", smaller, session, buffers)
    renamed = with_port(DECODE, replace(DECODE.inputs[1], name="cash"))
    with pytest.raises(LoadError, match="differ in the inputs of the some graph: cash, past"):
        GraphSlot("some", renamed, session, buffers)
    fewer = replace(DECODE, outputs=DECODE.outputs[:2])
    with pytest.raises(LoadError, match="differ in the outputs of the some graph: result"):
        GraphSlot("some", fewer, session, buffers)
    twice = replace(DECODE, inputs=(*DECODE.inputs, DECODE.inputs[0]))
    with pytest.raises(LoadError, match="listed twice"):
        GraphSlot("some", twice, session, buffers)


def test_open_rows_need_an_open_port(buffers):
    graph = replace(DECODE, rows=None)
    with pytest.raises(LoadError, match="no fixed number of rows, and none of its ports"):
        GraphSlot("some", graph, FakeSession(graph), buffers)
