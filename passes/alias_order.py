"""Proof that outputs written over inputs' memory leave every reader its old values."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import onnx_ir as ir

from passes.in_place import appends, refuses_in_place
from passes.node_order import NodeOrder
from passes.node_place import place

__all__ = ["AliasOrderPass"]

VIEWS = frozenset(
    {("", "Identity"), ("", "Reshape"), ("", "Squeeze"), ("", "Unsqueeze"), ("", "Flatten")}
)
"""(domain, op) whose output ONNX Runtime may lay over its first input: reading it later reads
the input's memory later."""
SHAPE_READERS = frozenset({("", "Shape"), ("", "Size")})
"""(domain, op) that read no element."""


class AliasOrderPass(ir.passes.PassBase):
    """Check that outputs bound onto inputs' memory change nothing; never modifies.

        right    r = Mul(past, w);  present = Add(past, r)         Mul is an ancestor of Add
        wrong    r = Mul(past, w);  present = Add(past, w)         Mul may run after Add

    ONNX Runtime does not know of the binding and may run a reader of the input after the node
    that writes the output. Therefore each reader, also one in a subgraph or behind a view of
    the input, must be the writer or an ancestor of it, and the writer, where it reads the
    input, an op that reads each element before it writes it.

    Several outputs may share an input: their writers form a chain, each an ancestor of the
    next, readers of the input come before the first and readers of an output before the
    writer that follows. Of the later writers only those that append (attentions) may read the
    input, or an earlier output, itself: they find there what the earlier ones wrote.

    A *view* is an input that is meant to show what this run's outputs write: there every
    writer must be an ancestor of every reader.

    Args:
        aliases: Pairs of an output's name and the name of an input whose memory it touches.
        provider: ``cpu`` or ``cuda``.
        rows: Rows of a forward; None where a run chooses. `CausalConvWithState` works in
            place on the CPU, elsewhere for one row only.
        views: Names of the inputs that are views.
    """

    def __init__(
        self,
        aliases: Iterable[tuple[str, str]],
        *,
        provider: str,
        rows: int | None,
        views: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.aliases = tuple(aliases)
        self.views = frozenset(views)
        self.convolves = provider == "cpu" or rows == 1

    @property
    def in_place(self) -> bool:
        """The same model is handed on."""
        return True

    @property
    def changes_input(self) -> bool:
        """Nothing is changed."""
        return False

    def requires(self, model: ir.Model) -> None:
        """Prove the order.

        Raises:
            PreconditionError: Lists every offending pair, and how to mend it.
        """
        faults = list(self._faults(model.graph))
        if faults:
            raise ir.passes.PreconditionError(
                f"{len(faults)} faults of outputs bound onto inputs' memory: "
                + "; ".join(faults)
            )

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Hand the model on; `requires` has checked it."""
        return ir.passes.PassResult(model, modified=False)

    def _faults(self, graph: ir.Graph) -> Iterator[str]:
        inputs = {value.name: value for value in graph.inputs}
        outputs = {value.name: value for value in graph.outputs}
        order = NodeOrder(graph)
        shared: dict[ir.Value, list[_Write]] = {}
        for output_name, input_name in self.aliases:
            output, memory = outputs.get(output_name), inputs.get(input_name)
            if output is None or memory is None:
                yield (
                    f"{output_name!r} on {input_name!r}: the graph has no such "
                    f"{'output' if output is None else 'input'}"
                )
            elif (writer := output.producer()) is None or writer.graph is not graph:
                yield f"{output_name!r} on {input_name!r}: no node writes it; add an Identity"
            elif output.dtype != memory.dtype:
                yield (
                    f"{output_name!r} on {input_name!r}: it is {output.dtype}, its memory "
                    f"{memory.dtype}; cast it before it is given"
                )
            else:
                shared.setdefault(memory, []).append(_Write(output, writer))
        for memory, writes in shared.items():
            if memory.name in self.views:
                yield from self._view_faults(memory, writes, order)
            else:
                yield from self._memory_faults(memory, writes, order)

    def _view_faults(
        self, view: ir.Value, writes: list[_Write], order: NodeOrder
    ) -> Iterator[str]:
        for reader, _, _ in _readers(view, order):
            before = order.ancestors(reader)
            for write in writes:
                if write.writer not in before:
                    yield (
                        f"{write.on(view)}: {place(reader)} reads the view and may run before "
                        "it; make it depend on the writer"
                    )

    def _memory_faults(
        self, memory: ir.Value, writes: list[_Write], order: NodeOrder
    ) -> Iterator[str]:
        writes = sorted(writes, key=lambda write: len(order.ancestors(write.writer)))
        for write, following in itertools.pairwise(writes):
            if write.writer not in order.ancestors(following.writer):
                yield (
                    f"{following.on(memory)}: it may run before {place(write.writer)}, which "
                    f"writes {write.output.name!r} there; let it read that output"
                )
        if memory.is_graph_output():
            yield (
                f"{writes[0].on(memory)}: the input is an output itself, read after every "
                "node; give one of them its own memory"
            )
        # what lies in the memory before each write: the input, then each earlier output
        for index, source in enumerate((memory, *(write.output for write in writes[:-1]))):
            yield from self._version_faults(memory, source, writes, index, order)

    def _version_faults(
        self,
        memory: ir.Value,
        source: ir.Value,
        writes: list[_Write],
        index: int,
        order: NodeOrder,
    ) -> Iterator[str]:
        following = writes[index]
        slots = {write.writer: write.output.index() or 0 for write in writes[index:]}
        for reader, operand, position in _readers(source, order):
            if reader is following.writer or (reader in slots and appends(reader)):
                reason = refuses_in_place(
                    reader, operand, position, slots[reader], self.convolves
                )
                if reason is not None:
                    yield f"{following.on(memory)}: {reason}"
            elif reader in slots:
                yield (
                    f"{following.on(memory)}: {place(reader)} reads {source.name!r} and "
                    "writes there after it; let it read the output before"
                )
            elif reader not in order.ancestors(following.writer):
                yield (
                    f"{following.on(memory)}: {place(reader)} reads {source.name!r} and may "
                    "run after it; make what it computes an input of what leads to the "
                    "writer, or give the output its own memory and swap the two"
                )


@dataclass(frozen=True, slots=True)
class _Write:
    output: ir.Value
    writer: ir.Node

    def on(self, memory: ir.Value) -> str:
        return f"{self.output.name!r} on {memory.name!r}, written by {place(self.writer)}"


def _readers(
    source: ir.Value, order: NodeOrder
) -> Iterator[tuple[ir.Node, ir.Value, int | None]]:
    """Nodes of the main graph that read the memory of `source`, through what, at which input.

    The position is None for a node whose subgraph reads it.
    """
    reached, stack = {source}, [source]
    while stack:
        value = stack.pop()
        for use in value.uses():
            key = (use.node.domain, use.node.op_type)
            if key in SHAPE_READERS:
                continue
            reader = order.outer(use.node)
            yield reader, value, use.idx if reader is use.node else None
            view = use.node.outputs[0] if key in VIEWS and use.idx == 0 else None
            if view is not None and view not in reached and not view.is_graph_output():
                reached.add(view)
                stack.append(view)
