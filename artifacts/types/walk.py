"""Types of all values of a model, and every place where they clash.

A value's type is the set of those that it may have: one for most, several where a clash
leaves open which operand is the wrong one and nothing is declared, None where nothing is
known. So one fault gives one clash, and what lies behind it is not blamed for it.

If, Loop and Scan bodies, model-local functions and the bodies that ONNX Runtime inlines are
walked with the types that really reach them, each under the path of the nodes around it.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx

from artifacts.types.agreement import BodyOutput, contradiction, disagreement, either
from artifacts.types.calls import calls, fed_to_body, opsets_of, stored, with_attributes
from artifacts.types.inference import bind, output_types, sure_types
from artifacts.types.table import signature
from artifacts.types.values import (
    Clash,
    Known,
    Mistyped,
    NodeSeen,
    Scope,
    declared_type,
    label,
    quoted,
)

__all__ = ["Walk"]

DEEPEST = 12
"""Bodies within bodies; real models have three, a file that calls itself has no end."""


Visit = Callable[["Walk", NodeSeen, Scope], None]


@dataclass(slots=True)
class Walk:
    """One pass over a model; `clashes` and `mistyped` hold what it found."""

    model: onnx.ModelProto
    name: str
    visit: Visit | None = None
    """Called for each node of a known op, after its outputs have their types."""
    clashes: list[Clash] = field(default_factory=list)
    mistyped: list[Mistyped] = field(default_factory=list)
    values: dict[str, Known] = field(default_factory=dict)
    """The values of the main graph."""
    inlined_from: str | None = None
    outer: onnx.NodeProto | None = None
    _meant: dict[str, str | None] = field(default_factory=dict)
    _depth: int = 0
    _caller: onnx.NodeProto | None = None

    def run(self) -> Walk:
        """Walk the main graph."""
        opsets = opsets_of(self.model.opset_import)
        scope: Scope = ChainMap(self.values)
        self.graph(self.model.graph, scope, opsets, f"{self.name}:", ())
        return self

    def graph(
        self,
        graph: onnx.GraphProto,
        scope: Scope,
        opsets: Mapping[str, int],
        path: str,
        fed: Sequence[Known | None],
    ) -> list[Known]:
        """Walk a graph in `scope`; `fed` are what a body's inputs get. Returns its outputs."""
        for tensor in graph.initializer:
            scope[tensor.name] = stored(tensor.name, tensor.data_type)
        for sparse in graph.sparse_initializer:
            scope[sparse.values.name] = stored(sparse.values.name, sparse.values.data_type)
        self._meant |= {v.name: declared_type(v) for v in (*graph.value_info, *graph.output)}
        for i, value in enumerate(graph.input):
            self._input(value, fed[i] if i < len(fed) else None, scope, path, graph)
        for node in graph.node:
            self.node(node, scope, opsets, path)
        for declared, output in (*((v, False) for v in graph.value_info),
                                 *((o, True) for o in graph.output)):  # fmt: skip
            self._declared(declared, scope, path, output, graph)
        return [scope.get(o.name, Known(None, "")) for o in graph.output]

    def node(
        self,
        node: onnx.NodeProto,
        scope: Scope,
        opsets: Mapping[str, int],
        path: str,
        origin: onnx.NodeProto | None = None,
    ) -> None:
        """Check one node and give its outputs their types.

        `origin` is the node of the file when `node` is a copy with a call's attributes.
        """
        domain = "" if node.domain == "ai.onnx" else node.domain
        sig = signature(node.op_type, domain, opsets.get(domain, 1))
        place, before = path + label(node), len(self.clashes)
        if sig is None:
            self._call(node, scope, path)
            return
        inputs = [scope.get(name) if name else None for name in node.input]
        bindings, clashes = bind(node, sig, inputs, place)
        for clash in clashes:
            self._note(clash, origin or node)
        made = self._bodies(node, scope, opsets, place, inputs)
        for i, name in enumerate(node.output):
            if name:
                types = made[i].types if i < len(made) else None
                types = types or output_types(node, sig, i, bindings)
                scope[name] = self._made(node, name, types)
        if self.visit is not None:
            seen = NodeSeen(
                place, node, sig, opsets, sure_types(node, sig, bindings, scope),
                tuple(k.sure if k else None for k in inputs), len(self.clashes) == before,
            )  # fmt: skip
            self.visit(self, seen, scope)

    def function(
        self,
        body: onnx.FunctionProto,
        fed: Sequence[Known | None],
        path: str,
        attributes: Mapping[str, onnx.AttributeProto],
    ) -> list[Known]:
        """Walk a function body; missing inputs are None. Returns its outputs."""
        if self._depth >= DEEPEST:
            return []
        self._depth += 1
        scope: Scope = ChainMap({})
        for name, known in zip(body.input, fed, strict=False):
            if known is not None:
                scope[name] = known
        opsets = opsets_of(body.opset_import)
        for node in body.node:
            self.node(with_attributes(node, attributes), scope, opsets, path, node)
        self._depth -= 1
        return [scope.get(name, Known(None, "")) for name in body.output]

    def _call(self, node: onnx.NodeProto, scope: Scope, path: str) -> None:
        """A model-local function, or an op of which nothing is known."""
        body = next((f for f in self.model.functions if calls(f, node)), None)
        made: list[Known] = []
        if body is not None:
            fed = [scope.get(name) if name else None for name in node.input]
            given = {a.name: a for a in body.attribute_proto}
            given |= {a.name: a for a in node.attribute}
            outer, self._caller = self._caller, self._caller or node
            made = self.function(body, fed, f"{path}{label(node)}/", given)
            self._caller = outer
        for i, name in enumerate(node.output):
            if name:
                types = made[i].types if i < len(made) else None
                scope[name] = self._made(node, name, types)

    def _note(self, clash: Clash, node: onnx.NodeProto) -> None:
        """Keep a clash, with the node of the file and what stands around it."""
        self.clashes.append(
            replace(
                clash, node=node, call=self._caller, outer=self.outer,
                inlined_from=self.inlined_from,
            )
        )  # fmt: skip

    def _made(self, node: onnx.NodeProto, name: str, types: frozenset[str] | None) -> Known:
        """An output; where a clash left its type open, what the author declared holds."""
        meant = self._meant.get(name)
        if meant is not None and types and len(types) > 1 and meant in types:
            types = frozenset({meant})
        return Known(types, f"{node.op_type} {quoted(node)}")

    def _bodies(
        self,
        node: onnx.NodeProto,
        scope: Scope,
        opsets: Mapping[str, int],
        place: str,
        inputs: Sequence[Known | None],
    ) -> list[Known]:
        """Walk If, Loop and Scan bodies; returns what is then known of the outputs."""
        bodies = [a for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
        if not bodies or self._depth >= DEEPEST:
            return []
        self._depth += 1
        carried, fed = fed_to_body(node, inputs)
        results = []
        for body in bodies:
            inner = f"{place}/{body.name}/" if len(bodies) > 1 else f"{place}/"
            results.append(self.graph(body.g, scope.new_child(), opsets, inner, fed))
            self._carry(node, body.g, results[-1], carried, fed, inner)
        self._depth -= 1
        if node.op_type == "If" and len(results) == 2:
            return self._branches(node, bodies, results, place)
        skip = 1 if node.op_type == "Loop" else 0
        return results[0][skip:]

    def _carry(
        self,
        node: onnx.NodeProto,
        body: onnx.GraphProto,
        made: list[Known],
        carried: int,
        fed: Sequence[Known | None],
        path: str,
    ) -> None:
        """A state leaves a loop body with the type that it came in with."""
        start = 2 if node.op_type == "Loop" else 0
        for i in range(start, start + carried):
            out = i - 1 if node.op_type == "Loop" else i
            before = fed[i] if i < len(fed) else None
            if before is None or out >= len(made):
                continue
            place = f"{path}{body.output[out].name}"
            self._same(place, node, before, made[out], (body, out))

    def _branches(
        self,
        node: onnx.NodeProto,
        bodies: Sequence[onnx.AttributeProto],
        results: Sequence[Sequence[Known]],
        place: str,
    ) -> list[Known]:
        """Both branches of an If give the same types."""
        merged = []
        for i, (one, other) in enumerate(zip(*results, strict=False)):
            where = f"{place}:{bodies[1].g.output[i].name}"
            self._same(where, node, one, other, (bodies[1].g, i))
            merged.append(either(one, other))
        return merged

    def _same(
        self, place: str, node: onnx.NodeProto, one: Known, other: Known, body: BodyOutput
    ) -> None:
        """Note a body whose output `other` is not of the type `one` that it must have."""
        fault = disagreement(place, node, one, other, body)
        if fault is not None:
            self._note(fault, node)

    def _input(
        self,
        value: onnx.ValueInfoProto,
        fed: Known | None,
        scope: Scope,
        path: str,
        graph: onnx.GraphProto,
    ) -> None:
        known = fed or scope.maps[0].get(value.name)
        if known is None or not known.types:
            declared = declared_type(value)
            types = frozenset({declared}) if declared else None
            known = Known(types, f"input '{value.name}'")
        self.mistyped += contradiction(value, known, path, False, graph)
        scope[value.name] = known

    def _declared(
        self,
        value: onnx.ValueInfoProto,
        scope: Scope,
        path: str,
        output: bool,
        graph: onnx.GraphProto,
    ) -> None:
        self.mistyped += contradiction(value, scope.get(value.name), path, output, graph)
