"""Mends every type clash of a model with the fewest casts."""

from __future__ import annotations

import logging
from dataclasses import replace

import onnx_ir as ir

from artifacts.types.table import signature
from artifacts.types.values import Clash, Operand
from passes.operands import RANK, converted_constant, drop_unread, stepped_over, store_beside
from passes.typed_graph import TypedModel, dtype_of

__all__ = ["UnifyTypesPass"]

logger = logging.getLogger(__name__)

ROUNDS = 64
"""Each round mends all clashes in sight; a chain of n that hide each other needs n."""


class UnifyTypesPass(ir.passes.InPlacePass):
    """Give the inputs of each node types that go together.

        before   f16[N] x, f32[N] w, f32[] eps      s = Add(x, eps)      t = Mul(s, w)
        after    f16[N] x, f16[] eps_float16        s = Add(x, eps_float16)
                                                    w_1 = Cast<f16>(w)   t = Mul(s, w_1)

    A small constant is converted, if its values survive that; a cast that only widened a
    value of the right type is stepped over; all else is cast, once for all its readers
    below. Integers go to the floats' side. Casts stand right before their first reader, so
    that order holds. Stale declarations are corrected, and an output of the graph keeps its
    declared type by a cast. In the body of a function, which calls of several types share,
    the odd operand becomes ``CastLike`` another one.

    Where the clash is inside of a function op that `provider` would inline, the floats that
    enter the op are given one type.

    `prefer` decides where as many casts are needed either way; without it the declared type
    of the result does, then the wider one.
    """

    _main: ir.Graph
    _opset: int

    def __init__(self, prefer: str | None = None, provider: str | None = None) -> None:
        self._prefer, self._provider = prefer, provider
        self._casts: dict[tuple[int, str, int], ir.Value] = {}
        self._likened: set[int] = set()

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Mend `model`; modified is False when there was nothing to mend."""
        modified, self._main = False, model.graph
        self._opset = model.graph.opset_imports.get("", 1)
        self._casts.clear()
        for _ in range(ROUNDS):
            typed = TypedModel(model, self._provider)
            self._likened.clear()
            changes = sum([self._mend(typed, clash) for clash in typed.walk.clashes])
            if not changes:
                changes += self._redeclare(typed)
            if not changes:
                break
            modified = True
        return ir.passes.PassResult(model, modified)

    def _mend(self, typed: TypedModel, clash: Clash) -> bool:
        if clash.outer is not None:
            outer = _around(typed, clash)
            return outer is not None and self._mend(typed, outer)
        node = typed.node(clash.node)
        if node is None:
            return False
        if clash.body is not None:
            return self._mend_body(typed, clash)
        if clash.call is not None:
            return self._liken(node, typed.node(clash.call), clash)
        goal = self._goal(node, clash)
        if goal is None:
            return False
        odd = [operand for operand in clash.operands if operand.types != {goal}]
        for operand in odd:
            value = node.inputs[operand.index]
            if value is not None:
                node.replace_input_with(operand.index, self._converted(node, value, goal))
                drop_unread(value)
        logger.debug("%s: %d operands to %s", clash.place, len(odd), goal)
        return bool(odd)

    def _goal(self, node: ir.Node, clash: Clash) -> str | None:
        """The type that costs least: casts first, then what is wanted of the result."""
        kinds = {kind for operand in clash.operands for kind in operand.types}
        choices = sorted(kinds & clash.allowed)
        if not choices:
            choices = [k for k in (self._prefer, "float") if k in clash.allowed]
        wanted = _wanted(node, self._opset)
        floats = kinds & RANK.keys()

        def cost(kind: str) -> tuple[object, ...]:
            read = {node.inputs[operand.index]: operand for operand in clash.operands}
            casts = sum(_price(value, operand, kind) for value, operand in read.items())
            casts += wanted is not None and wanted != kind
            loses = bool(floats) and kind not in RANK
            return loses, casts, kind != self._prefer, kind != wanted, -RANK.get(kind, 0), kind

        return min(choices, key=cost, default=None)

    def _converted(self, node: ir.Node, value: ir.Value, goal: str) -> ir.Value:
        """`value` in the type `goal`, with as little new in the graph as can be."""
        bypass = stepped_over(value, goal)
        if bypass is not None:
            return bypass
        constant = converted_constant(value, goal)
        if constant is not None:
            return store_beside(self._main, value, constant, goal)
        assert node.graph is not None
        key = id(value), goal, id(node.graph)
        made = self._casts.get(key)
        if made is None or not _stands_before(made, node):
            cast = ir.node("Cast", [value], {"to": int(dtype_of(goal))})
            _name(cast, node, value, goal)
            node.graph.insert_before(node, cast)
            made = self._casts[key] = cast.outputs[0]
        return made

    def _liken(self, node: ir.Node, call: ir.Node | None, clash: Clash) -> bool:
        """In a function: give the odd operand the type of another, whatever a call brings."""
        wanted = _wanted(call, self._opset) if call is not None else None
        fit = [o for o in clash.operands if o.types == {wanted}]
        odd = next((o for o in clash.operands if o.index == clash.odd and o not in fit), None)
        odd = odd or next(o for o in clash.operands if o not in fit)
        model = next((o for o in fit or clash.operands if not o.types & odd.types), None)
        value = node.inputs[odd.index]
        like = node.inputs[model.index] if model is not None else None
        if value is None or like is None or node.graph is None or id(node) in self._likened:
            return False
        self._likened.add(id(node))
        cast = ir.node("CastLike", [value, like])
        cast.name = f"{node.name or node.outputs[0].name}/{value.name}/alike"
        cast.outputs[0].name = f"{value.name}_like_{like.name}_for_{node.outputs[0].name}"
        node.graph.insert_before(node, cast)
        for index, read in enumerate(node.inputs):
            if read is value:
                node.replace_input_with(index, cast.outputs[0])
        return True

    def _mend_body(self, typed: TypedModel, clash: Clash) -> bool:
        """Cast an output of a loop's or branch's body to the type that it must have."""
        assert clash.body is not None
        body = typed.body(clash.body[0])
        goal = min(clash.operands[0].types)
        if body is None or len(clash.operands[0].types) != 1:
            return False
        _cast_output(body, clash.body[1], goal)
        return True

    def _redeclare(self, typed: TypedModel) -> int:
        """Correct stale declarations; cast outputs to what they are declared."""
        changes = 0
        for value, kind in typed.declared():
            value.dtype = dtype_of(kind)
            changes += 1
        for fault in typed.walk.mistyped:
            body = typed.body(fault.graph)
            if fault.output and body is not None:
                at = next(i for i, o in enumerate(body.outputs) if o.name == fault.value)
                if body is typed.model.graph:
                    _cast_output(body, at, fault.declared)
                    changes += 1
                elif len(fault.types) == 1:
                    body.outputs[at].dtype = dtype_of(min(fault.types))
                    changes += 1
        return changes


def _around(typed: TypedModel, clash: Clash) -> Clash | None:
    """An inlined clash as one of the node around it, if floats of two types enter that."""
    node = typed.node(clash.outer) if clash.outer is not None else None
    operands = []
    for index, value in enumerate(node.inputs if node is not None else ()):
        known = typed.walk.values.get(value.name or "") if value is not None else None
        if value is not None and known is not None and known.sure in RANK:
            kinds = frozenset({known.sure})
            operands.append(Operand("", index, value.name or "", kinds, known.origin))
    found = frozenset(kind for operand in operands for kind in operand.types)
    if len(found) < 2 or clash.outer is None:
        return None
    return replace(
        clash, node=clash.outer, outer=None, call=None, operands=tuple(operands), allowed=found
    )


def _wanted(node: ir.Node, opset: int, steps: int = 4) -> str | None:
    """The type that the author declared for the result, or for what is made from it."""
    value = node.outputs[0]
    if value.dtype is not None:
        return str(value.dtype.name).lower()
    for user, index in value.uses() if steps else ():
        sig = signature(user.op_type, user.domain, opset)
        read, made = (sig.input(index), sig.output(0)) if sig else (None, None)
        if read and made and read.type == made.type and read.kind != "m":
            found = _wanted(user, opset, steps - 1)
            if found is not None:
                return found
    return None


def _price(value: ir.Value | None, operand: Operand, goal: str) -> int:
    """Casts that bring an operand to `goal`."""
    if value is None or operand.types == {goal}:
        return 0
    free = stepped_over(value, goal) is not None or converted_constant(value, goal) is not None
    return 0 if free else 1


def _stands_before(value: ir.Value, node: ir.Node) -> bool:
    maker, graph = value.producer(), node.graph
    if maker is None or graph is None or maker.graph is not graph:
        return False
    return next(n for n in graph if n is maker or n is node) is maker


def _name(cast: ir.Node, node: ir.Node, value: ir.Value, goal: str) -> None:
    cast.name = f"{node.name or node.outputs[0].name}/{value.name}/to_{goal}"
    cast.outputs[0].name = f"{value.name}_{goal}_for_{node.outputs[0].name}"
    cast.outputs[0].dtype = dtype_of(goal)
    cast.outputs[0].shape = value.shape


def _cast_output(graph: ir.Graph, at: int, goal: str) -> None:
    """A cast behind output `at`, which keeps its name; the value before it gets another."""
    value = graph.outputs[at]
    name = value.name
    cast = ir.node("Cast", [value], {"to": int(dtype_of(goal))}, name=f"{name}/to_{goal}")
    graph.append(cast)
    made = cast.outputs[0]
    made.dtype, made.shape = dtype_of(goal), value.shape
    if not value.is_graph_input() and not value.is_initializer():
        value.name = f"{name}_before_{goal}"
        value.type = value.shape = None
        made.name = name
    else:
        made.name = f"{name}_{goal}"
    graph.outputs[at] = made
