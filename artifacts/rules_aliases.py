"""Rules about ports that share a buffer: nobody reads a value after it was overwritten.

ONNX Runtime does not know that an output is bound onto an input's memory, and may run the
writer of the one before a reader of the other. So the graph itself must order them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

import onnx

from artifacts.findings import Severity
from artifacts.manifest import Graph, Manifest, Port, overlaps
from artifacts.rule import Case, Fault, Rule

__all__ = ["ALIAS_RULES", "Flow"]

SAME_MEMORY = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"})
"""Operators whose output ONNX Runtime leaves in the memory of their first input."""
SHAPE_READERS = frozenset({"Shape", "Size"})
"""Operators that read no element."""
APPENDS = frozenset({"CachedAttention", "GroupQueryAttention"})
"""They add rows to a cache and leave those that lie there: in a chain of them each finds in
the first one's input what the ones before it wrote."""


class Flow:
    """Which node makes, reads and must come before which."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.nodes = list(graph.node)
        self._reads = [_reads(node) for node in self.nodes]
        self._made_by = {
            name: i for i, n in enumerate(self.nodes) for name in n.output if name
        }
        self._readers: dict[str, list[int]] = defaultdict(list)
        for i, names in enumerate(self._reads):
            for name in names:
                self._readers[name].append(i)

    def writer(self, value: str) -> int | None:
        """Node that makes a value; None for inputs and initializers."""
        return self._made_by.get(value)

    def readers(self, value: str, until: set[str]) -> set[int]:
        """Nodes that read the memory of a value, also through views of it up to `until`."""
        found: set[int] = set()
        values, seen = [value], {value}
        while values:
            for i in self._readers.get(values.pop(), ()):
                node = self.nodes[i]
                if node.op_type in SHAPE_READERS:
                    continue
                found.add(i)
                if node.op_type in SAME_MEMORY and (seen | until).isdisjoint(node.output):
                    values += node.output
                    seen.update(node.output)
        return found

    def before(self, node: int) -> set[int]:
        """Nodes that must have run when `node` runs."""
        found: set[int] = set()
        waiting = [node]
        while waiting:
            for name in self._reads[waiting.pop()]:
                i = self._made_by.get(name)
                if i is not None and i not in found:
                    found.add(i)
                    waiting.append(i)
        return found

    def shown(self, node: int) -> str:
        """Name and operator of a node."""
        return f"{self.nodes[node].name or f'node {node}'}({self.nodes[node].op_type})"


def _reads(node: onnx.NodeProto) -> set[str]:
    """Values that a node needs, those that its subgraphs take from outside included."""
    names = set(node.input)
    for attribute in node.attribute:
        inner_graphs = [attribute.g] if attribute.HasField("g") else []
        for graph in (*inner_graphs, *attribute.graphs):
            names.update(output.name for output in graph.output)
            for inner in graph.node:
                names |= _reads(inner)
    return names - {""}


def _aliases(case: Case) -> Iterator[Fault]:
    manifest = case.manifest
    models = {name: model for name, _, model in case.graphs()}
    for name, graph in manifest.graphs.items():
        for port in (*graph.inputs, *graph.outputs):
            yield from _fit(name, port, manifest)
        for output, given in graph.aliases():
            yield from _same_rows(name, output, given)
    for name, model in models.items():
        graph, flow = case.described[name], Flow(model.graph)
        for buffer in {port.buffer: None for port in graph.outputs}:
            yield from _Shared(name, graph, buffer, flow).faults()


def _fit(graph: str, port: Port, manifest: Manifest) -> Iterator[Fault]:
    buffer = manifest.buffers.get(port.buffer)
    if buffer is None:
        return
    place = f"{graph}:{port.name}"
    if port.dtype != buffer.dtype:
        yield Fault(
            place, f"{port.name} is {port.dtype}, its buffer {port.buffer} is {buffer.dtype}"
        )
    largest = [manifest.prefill_rows if isinstance(n, str) else n for n in port.shape]
    if port.offset + math.prod(largest) > math.prod(buffer.shape):
        yield Fault(
            place,
            f"{port.name} is up to {largest} from element {port.offset} on, more than its "
            f"buffer {port.buffer} of {list(buffer.shape)}",
        )


def _same_rows(graph: str, output: Port, given: Port) -> Iterator[Fault]:
    """Ports of one rank, one over the other, are runs of the same rows (axes from 2 on)."""
    if len(output.shape) == len(given.shape) and output.shape[2:] != given.shape[2:]:
        yield Fault(
            f"{graph}:{output.name}",
            f"{output.name} is {list(output.shape)} and lies over {given.name}, "
            f"{list(given.shape)}; rows of both must be alike",
        )


class _Shared:
    """The ports of one graph on one buffer: what it holds, and in which order."""

    def __init__(self, name: str, graph: Graph, buffer: str, flow: Flow) -> None:
        self._name, self._buffer, self._flow = name, buffer, flow
        self._inputs = [port for port in graph.inputs if port.buffer == buffer]
        outputs = [port for port in graph.outputs if port.buffer == buffer]
        self._until = {port.name for port in outputs}
        writers = ((flow.writer(port.name), port) for port in outputs)
        written = [(flow.before(i), i, port) for i, port in writers if i is not None]
        self._written = sorted(written, key=lambda entry: len(entry[0]))  # by what waits
        self._appending = {i for _, i, _ in written if flow.nodes[i].op_type in APPENDS}

    def faults(self) -> Iterator[Fault]:
        for index, (before, writer, output) in enumerate(self._written):
            held = [port for port in self._inputs if not port.view]
            earlier = {port.name: i for _, i, port in self._written[:index]}
            held += [port for _, _, port in self._written[:index]]
            for _, port in overlaps(tuple(held), (output,)):
                maker = earlier.get(port.name)
                if maker is not None and maker not in before:
                    yield self._unordered(maker, port, writer, output)
                late = self._flow.readers(port.name, self._until) - before - {writer}
                for reader in sorted(late - self._appending):
                    yield self._late(reader, port, writer, output)
            views = tuple(port for port in self._inputs if port.view)
            for _, view in overlaps(views, (output,)):
                for reader in sorted(self._flow.readers(view.name, self._until)):
                    if writer not in self._flow.before(reader):
                        yield self._early(reader, view, writer, output)

    def _unordered(self, maker: int, port: Port, writer: int, output: Port) -> Fault:
        first, second = self._flow.shown(maker), self._flow.shown(writer)
        return Fault(
            f"{self._name}:{second}:{output.name}",
            f"{port.name} and {output.name} are both written to {self._buffer}, and nothing "
            f"makes {first} run before {second}",
        )

    def _late(self, reader: int, port: Port, writer: int, output: Port) -> Fault:
        first, second = self._flow.shown(reader), self._flow.shown(writer)
        return Fault(
            f"{self._name}:{first}:{port.name}",
            f"{first} reads {port.name}, and nothing makes it run before {second} writes "
            f"{output.name} over it in {self._buffer}",
        )

    def _early(self, reader: int, view: Port, writer: int, output: Port) -> Fault:
        second, first = self._flow.shown(reader), self._flow.shown(writer)
        return Fault(
            f"{self._name}:{second}:{view.name}",
            f"{second} reads {view.name}, a view of {self._buffer}, and nothing makes it run "
            f"after {first} writes {output.name} there",
        )


ALIAS_RULES = (
    Rule(
        code="graphs.aliases",
        severity=Severity.ERROR,
        title="ports that share a buffer fit in it, and no value is read once overwritten",
        explanation=(
            "An output bound onto an input's buffer overwrites it. ONNX Runtime does not see "
            "that, so every node that reads the old value must be the writer itself or one "
            "that the writer waits for. Of several outputs on one buffer (the caches of a "
            "draft's guesses), each must wait for the one before. An input that the manifest "
            "calls a view is the opposite: its readers wait for every writer there."
        ),
        remedy="build the artifact again; a pass must order the readers before the writer",
        run=_aliases,
    ),
)
