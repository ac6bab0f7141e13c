"""The base of this project's passes: they count the places they changed."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult, PreconditionError

__all__ = ["CountedPass", "input_named", "output_named"]


class CountedPass(InPlacePass):
    """A pass whose `changes` says, after each call, in how many places it changed the graph.

    The build writes it into the manifest: a pass that should have found something and found
    nothing shows there.
    """

    changes: int = 0

    def call(self, model: ir.Model) -> PassResult:
        """Run `rewrite`, keep its count, sort the nodes if anything changed."""
        self.changes = self.rewrite(model)
        if self.changes:
            model.graph.sort()
        return PassResult(model, modified=bool(self.changes))

    @abc.abstractmethod
    def rewrite(self, model: ir.Model) -> int:
        """Change `model` in place; give the number of places changed."""


def input_named(graph: ir.Graph, name: str) -> ir.Value:
    """The graph input `name`; raises `PreconditionError` that lists what there is."""
    return _named(graph.inputs, name, f"graph {graph.name!r} has no input")


def output_named(graph: ir.Graph, name: str) -> ir.Value:
    """The graph output `name`; raises `PreconditionError` that lists what there is."""
    return _named(graph.outputs, name, f"graph {graph.name!r} has no output")


def _named(values: Sequence[ir.Value], name: str, complaint: str) -> ir.Value:
    for value in values:
        if value.name == name:
            return value
    there = ", ".join(str(value.name) for value in values)
    raise PreconditionError(f"{complaint} {name!r}; there are {there}")
