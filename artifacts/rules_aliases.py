"""Rules about ports that share a buffer: nobody reads a value after it was overwritten.

ONNX Runtime does not know that an output is bound onto an input's memory, and may run the
writer of the one before a reader of the other. So the graph itself must order them.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator

import onnx

from artifacts.findings import Severity
from artifacts.manifest import Graph, Manifest, Port, overlaps
from artifacts.rule import Case, Fault, Rule

__all__ = ["ALIAS_RULES", "Flow"]

VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"})
"""Operators whose output ONNX Runtime leaves in the memory of their first input."""


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
                found.add(i)
                node = self.nodes[i]
                if node.op_type in VIEWS and (seen | until).isdisjoint(node.output):
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
        yield from _shapes(name, graph)
        if name in models:
            flow = Flow(models[name].graph)
            yield from _order(name, graph, flow)


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


def _shapes(name: str, graph: Graph) -> Iterator[Fault]:
    for output, given in graph.aliases():
        if not _covers(given.shape, output.shape):
            yield Fault(
                f"{name}:{output.name}",
                f"{output.name} is {list(output.shape)} and updates {given.name}, "
                f"{list(given.shape)}, in place; it must be of that shape, or fewer rows "
                "(axis 1) of it",
            )


def _covers(given: tuple[int | str, ...], output: tuple[int | str, ...]) -> bool:
    if given == output or given[:1] != (1,) or output[:1] != (1,):
        return True  # the states of all layers, written together, or a window over them
    if len(given) != len(output) or len(given) < 2:
        return False
    rows, written = given[1], output[1]
    fewer = isinstance(written, int) and (isinstance(rows, str) or written <= rows)
    return fewer and given[2:] == output[2:]


def _order(name: str, graph: Graph, flow: Flow) -> Iterator[Fault]:
    """Each value in shared memory is read before the next one is written there."""
    outputs = {port.name for port in graph.outputs}
    aliases = graph.aliases()
    for output, port in aliases:
        writer = flow.writer(output.name)
        if writer is None:
            continue
        before = flow.before(writer) | {writer}
        for reader in sorted(flow.readers(port.name, outputs)):
            late = writer in flow.before(reader)
            if port.view or (late and _appends(reader, port, aliases, flow)):
                in_order = late
            else:
                in_order = reader in before
            if not in_order:
                yield Fault(
                    f"{name}:{flow.shown(reader)}:{port.name}",
                    f"{flow.shown(reader)} reads {port.name}, and nothing makes it run "
                    f"{'after' if port.view else 'before'} {flow.shown(writer)} writes "
                    f"{output.name} over it in {output.buffer}",
                )
    yield from _chain(name, graph, flow)


def _appends(
    reader: int, port: Port, aliases: tuple[tuple[Port, Port], ...], flow: Flow
) -> bool:
    """Whether `reader` is an attention node that itself adds rows to the cache it reads."""
    writes = {flow.writer(output.name) for output, given in aliases if given is port}
    return flow.nodes[reader].op_type == "GroupQueryAttention" and reader in writes


def _chain(name: str, graph: Graph, flow: Flow) -> Iterator[Fault]:
    """Several outputs over the same memory are written one after the other."""
    outputs = {port.name for port in graph.outputs}
    for first, second in itertools.combinations(graph.outputs, 2):
        if first.buffer != second.buffer or not overlaps((first,), (second,)):
            continue
        one, other = flow.writer(first.name), flow.writer(second.name)
        if one is None or other is None:
            continue
        early, late, made = one, other, first
        if other in flow.before(one):
            early, late, made = other, one, second
        before = flow.before(late) | {late}
        if early == late or early not in before:
            yield Fault(
                f"{name}:{flow.shown(late)}:{second.name}",
                f"{first.name} and {second.name} are both written to {first.buffer}, and "
                f"nothing makes {flow.shown(early)} run before {flow.shown(late)}",
            )
        for reader in sorted(flow.readers(made.name, outputs) - before):
            yield Fault(
                f"{name}:{flow.shown(reader)}:{made.name}",
                f"{flow.shown(reader)} reads {made.name}, and nothing makes it run before "
                f"{flow.shown(late)} writes over it in {first.buffer}",
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
            "draft's guesses), each must wait for the one before."
        ),
        remedy="build the artifact again; a pass must order the readers before the writer",
        run=_aliases,
    ),
)
