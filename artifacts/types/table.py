"""What one release of ONNX Runtime has: schemas of its own ops, kernels of its providers.

`ort_table.json` is written by ``export.kernels.generate`` from the wheel's own registry; no
line of it was written by hand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import onnx

__all__ = ["OPEN_ENDED", "Formal", "OrtTable", "Signature", "ort_table", "signature"]

OPEN_ENDED = 2**31 - 1
"""Last version of a kernel that goes on being registered."""


@dataclass(frozen=True, slots=True)
class Formal:
    """A formal input or output of an op."""

    name: str
    type: str
    """A type parameter (``T``), or one type: ``int64``, ``seq(tensor(float))``."""
    kind: str
    """s single, o optional, v variadic, m variadic with mixed types."""


@dataclass(frozen=True, slots=True)
class Signature:
    """An op's inputs and outputs and the types that its parameters allow."""

    since: int
    inputs: tuple[Formal, ...]
    outputs: tuple[Formal, ...]
    types: Mapping[str, frozenset[str]]

    def input(self, index: int) -> Formal | None:
        """The formal of an input, the last one standing for all of a variadic."""
        return _formal(self.inputs, index)

    def output(self, index: int) -> Formal | None:
        """The formal of an output."""
        return _formal(self.outputs, index)


@dataclass(frozen=True, slots=True)
class _Kernel:
    first: int
    last: int
    types: Mapping[str, frozenset[str]]

    def serves(self, since: int, bound: Mapping[str, str]) -> bool:
        """ONNX Runtime's own rule: a range that is open does not reach newer versions."""
        inside = self.first < since <= self.last != OPEN_ENDED
        if self.first != since and not inside:
            return False
        return all(bound.get(name) in (None, *types) for name, types in self.types.items())


class OrtTable:
    """Schemas and kernels of one ONNX Runtime."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.version: str = values["onnxruntime"]
        self._signatures = {op: _signature(row) for op, row in values["schemas"].items()}
        self._kernels = {
            provider: {
                op: tuple(
                    _Kernel(first, last, {n: frozenset(t) for n, t in types.items()})
                    for first, last, types in rows
                )
                for op, rows in ops.items()
            }
            for provider, ops in values["kernels"].items()
        }

    @property
    def providers(self) -> tuple[str, ...]:
        """``cpu``, ``cuda``."""
        return tuple(self._kernels)

    def signature(self, op: str) -> Signature | None:
        """The schema of an op that ONNX does not define."""
        return self._signatures.get(op)

    def has_kernel(self, provider: str, op: str, since: int, bound: Mapping[str, str]) -> bool:
        """Whether `provider` runs `op` with these types.

        `bound` gives the type of each type parameter and of each formal, as far as known; an
        unknown one is taken to fit.
        """
        rows = self._kernels[provider].get(op, ())
        return any(kernel.serves(since, bound) for kernel in rows)


@cache
def ort_table() -> OrtTable:
    """The table that this project was built with."""
    text = (resources.files("artifacts.types") / "ort_table.json").read_text(encoding="utf-8")
    return OrtTable(json.loads(text))


@cache
def signature(op: str, domain: str, opset: int) -> Signature | None:
    """The schema of `op` in force at `opset`, ONNX's or ONNX Runtime's; None if unknown."""
    if domain == "":
        try:
            schema = onnx.defs.get_schema(op, max_inclusive_version=opset, domain="")
        except onnx.defs.SchemaError:
            return ort_table().signature(op)
        return _of_onnx(schema)
    return ort_table().signature(f"{domain}.{op}")


def short(type_string: str) -> str:
    """``float16`` for ``tensor(float16)``; other kinds of types as they are."""
    plain = type_string.startswith("tensor(")
    return type_string[len("tensor(") : -1] if plain else type_string


def _formal(formals: tuple[Formal, ...], index: int) -> Formal | None:
    if index < len(formals):
        return formals[index]
    return formals[-1] if formals and formals[-1].kind in "vm" else None


def _of_onnx(schema: onnx.defs.OpSchema) -> Signature:
    def formals(values: Any) -> tuple[Formal, ...]:
        return tuple(Formal(v.name, short(v.type_str), _kind(v)) for v in values)

    types = {
        c.type_param_str: frozenset(short(t) for t in c.allowed_type_strs)
        for c in schema.type_constraints
    }
    return Signature(
        schema.since_version, formals(schema.inputs), formals(schema.outputs), types
    )


def _kind(formal: Any) -> str:
    letter: str = formal.option.name[0].lower()
    return "m" if letter == "v" and not formal.is_homogeneous else letter


def _signature(row: Mapping[str, Any]) -> Signature:
    def formals(values: Any) -> tuple[Formal, ...]:
        return tuple(Formal(*value) for value in values)

    types = {name: frozenset(allowed) for name, allowed in row["types"].items()}
    return Signature(row["since"], formals(row["inputs"]), formals(row["outputs"]), types)
