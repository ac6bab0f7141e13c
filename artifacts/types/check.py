"""Findings about the types of a model: every clash at once, and kernels that do not exist.

types.clash       inputs of one node whose types do not go together
types.value_info  a type declared for a value that has another
types.kernel      types are right, and the provider has no kernel for them
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import onnx

from artifacts.findings import Finding, Severity
from artifacts.types.bodies import function_body
from artifacts.types.table import ort_table
from artifacts.types.values import Clash, Known, Mistyped, NodeSeen, Operand, Scope
from artifacts.types.walk import Walk

__all__ = ["check_types", "walk_model"]

NO_KERNEL = frozenset({"If", "Loop", "Scan", "Constant"})
"""Control flow runs by its bodies; a constant becomes an initializer before any look-up."""


def check_types(model: onnx.ModelProto, name: str, provider: str = "cpu") -> list[Finding]:
    """All findings about types, in the order of the nodes.

    `provider` (``cpu`` or ``cuda``) decides which function ops are inlined, so which bodies
    are looked into, and whose kernels must exist.
    """
    walk, missing = walk_model(model, name, provider)
    findings = [_clash(clash) for clash in walk.clashes]
    findings += [_mistyped(value) for value in walk.mistyped]
    return findings + [_kernel(group, provider) for group in missing]


def walk_model(
    model: onnx.ModelProto, name: str, provider: str | None
) -> tuple[Walk, list[Missing]]:
    """Walk `model`; with a provider, walk what it inlines too and gather missing kernels."""
    if provider is None:
        return Walk(model, name).run(), []
    kernels = _Kernels(provider)
    walk = Walk(model, name, kernels.visit).run()
    return walk, list(kernels.missing.values())


@dataclass(slots=True)
class Missing:
    """Nodes of one op and one set of types that a provider does not run."""

    op: str
    types: str
    places: list[str] = field(default_factory=list)
    inner: tuple[str, ...] = ()
    """Ops of the inlined body that lack the kernel, when the op has a body."""
    elsewhere: bool = False
    """The CPU provider runs it."""


class _Kernels:
    """Looks up each node as ONNX Runtime does; inlines where it would."""

    def __init__(self, provider: str) -> None:
        self.provider = provider
        self.missing: dict[tuple[str, str, bool], Missing] = {}
        self._inside: list[str] | None = None

    def visit(self, walk: Walk, seen: NodeSeen, scope: Scope) -> None:
        """Called for each node with the types that reached it."""
        del scope
        if not seen.clean or seen.node.op_type in NO_KERNEL or self._has(seen, seen.bound):
            return
        op = _op(seen.node)
        body = function_body(seen.node, seen.opsets.get("", 1), seen.inputs)
        if body is None and self._cast_runs(seen):
            return
        lacking = [op] if body is None else self._inline(walk, seen, body)
        if self._inside is not None:
            self._inside += lacking
        elif lacking:
            self._note(op, seen, tuple(dict.fromkeys(lacking)) if body is not None else ())

    def _has(self, seen: NodeSeen, bound: Mapping[str, str]) -> bool:
        return ort_table().has_kernel(self.provider, _op(seen.node), seen.sig.since, bound)

    def _cast_runs(self, seen: NodeSeen) -> bool:
        """The CPU provider wraps a float16 node in casts when it has a float kernel."""
        wide = {n: "float" if t == "float16" else t for n, t in seen.bound.items()}
        return self.provider == "cpu" and wide != seen.bound and self._has(seen, wide)

    def _inline(self, walk: Walk, seen: NodeSeen, body: onnx.FunctionProto) -> list[str]:
        """Walk the body with the node's types; returns the ops in it without a kernel."""
        before, name, node = self._inside, walk.inlined_from, walk.outer
        self._inside, walk.inlined_from = [], name or seen.place
        walk.outer = node or seen.node
        fed = [Known(frozenset({t}), f"input {i} of {seen.place}") if t else None
               for i, t in enumerate(seen.inputs)]  # fmt: skip
        for entry in body.opset_import:  # inlined nodes follow the graph that they land in
            entry.version = max(entry.version, seen.opsets.get(entry.domain, 1))
        walk.function(body, fed, f"{seen.place}/", {a.name: a for a in seen.node.attribute})
        lacking, self._inside = self._inside, before
        walk.inlined_from, walk.outer = name, node
        return lacking

    def _note(self, op: str, seen: NodeSeen, inner: tuple[str, ...]) -> None:
        types = ", ".join(dict.fromkeys(t for t in seen.inputs if t)) or "its types"
        elsewhere = self.provider != "cpu" and ort_table().has_kernel(
            "cpu", op, seen.sig.since, seen.bound
        )
        group = self.missing.setdefault((op, types, elsewhere), Missing(op, types))
        group.inner, group.elsewhere = inner, elsewhere
        group.places.append(seen.place)


def _op(node: onnx.NodeProto) -> str:
    domain = "" if node.domain == "ai.onnx" else node.domain
    return f"{domain}.{node.op_type}" if domain else node.op_type


def _clash(clash: Clash) -> Finding:
    told = "; ".join(_operand(operand) for operand in clash.operands)
    found = frozenset.union(*(operand.types for operand in clash.operands))
    if len(found) == 1 and not found & clash.allowed:
        wrong = f"{clash.op} does not take {_names(found)} there ({told})"
    else:
        wrong = f"{clash.op} needs one type for {clash.parameter}: {told}"
    if clash.inlined_from:
        wrong += f"; ONNX Runtime inlines {clash.inlined_from}, having no kernel for its types"
        remedy = (
            "give the outer node types that the provider has a kernel for, or a form whose "
            "body agrees (for Attention: no is_causal beside a mask that is causal already)"
        )
    else:
        remedy = "bring the odd operand to the others' type where it is made"
    return Finding("types.clash", Severity.ERROR, clash.place, wrong, remedy)


def _mistyped(value: Mistyped) -> Finding:
    what = "output" if value.output else "value"
    return Finding(
        "types.value_info",
        Severity.ERROR,
        value.place,
        f"the {what} '{value.value}' is declared {value.declared}, {value.origin} makes it "
        f"{_names(value.types)}",
        "cast it to the declared type" if value.output else "drop or correct the declaration",
    )


def _kernel(group: Missing, provider: str) -> Finding:
    others = len(group.places) - 1
    count = f" ({others} more such node{'s' if others > 1 else ''})" if others else ""
    inner = f": its body needs {', '.join(group.inner)}" if group.inner else ""
    where = f"the {provider} provider of ONNX Runtime {ort_table().version}"
    if group.elsewhere:
        message = f"{where} has no kernel for {group.op} of {group.types}; it runs on the CPU"
        severity = Severity.WARNING
    else:
        message = f"{where} has no kernel for {group.op} of {group.types}{inner}"
        severity = Severity.ERROR
    return Finding(
        "types.kernel",
        severity,
        group.places[0],
        message + count,
        "bring the model to a type that the provider runs, or use another provider",
    )


def _operand(operand: Operand) -> str:
    return f"{operand.formal} is {_names(operand.types)} from {operand.origin}"


def _names(types: Sequence[str] | frozenset[str]) -> str:
    return " or ".join(sorted(types))
