"""What a walk over the types of a model knows, and what it finds."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass

import onnx

from artifacts.types.table import Signature

__all__ = ["Clash", "Known", "Mistyped", "NodeSeen", "Operand", "Scope", "declared_type"]
__all__ += ["element_name", "label", "quoted"]


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a value."""

    types: frozenset[str] | None
    """None: nothing."""
    origin: str
    """Who made it: ``Cast 'x/Cast'``, ``initializer 'w'``."""

    @property
    def sure(self) -> str | None:
        """The type, if there is but one."""
        return next(iter(self.types)) if self.types and len(self.types) == 1 else None


@dataclass(frozen=True, slots=True)
class Operand:
    """One input of a node in a clash."""

    formal: str
    index: int
    value: str
    types: frozenset[str]
    origin: str


@dataclass(frozen=True, slots=True)
class Clash:
    """Inputs of one node whose types do not go together."""

    place: str
    """``graph:node(Op):input``; nodes around it come first, ``/`` between them."""
    op: str
    parameter: str
    """The type parameter that the operands share."""
    operands: tuple[Operand, ...]
    allowed: frozenset[str]
    inlined_from: str | None
    """Place of the op whose body this node stands in, when ONNX Runtime inlines that."""
    node: onnx.NodeProto
    """The node, or the If or loop of a body that gives the wrong type."""
    outer: onnx.NodeProto | None = None
    """The node of the file that is inlined."""
    odd: int = 1
    """Index of the input that the place points at."""
    body: tuple[onnx.GraphProto, int] | None = None
    """The body and which of its outputs has the wrong type."""
    call: onnx.NodeProto | None = None
    """The call of a model-local function that brought these types; all calls share `node`."""


@dataclass(frozen=True, slots=True)
class Mistyped:
    """A value declared with another type than the one that it has."""

    place: str
    value: str
    declared: str
    types: frozenset[str]
    origin: str
    output: bool
    """An output of the graph, not an entry of value_info."""
    graph: onnx.GraphProto
    """Where it is declared."""


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """A node with the types that reached it."""

    place: str
    """``graph:node(Op)``"""
    node: onnx.NodeProto
    sig: Signature
    opsets: Mapping[str, int]
    bound: Mapping[str, str]
    """Type by type parameter and by formal, those that are sure."""
    inputs: tuple[str | None, ...]
    clean: bool
    """No clash here or inside."""


Scope = ChainMap[str, Known]


def label(node: onnx.NodeProto) -> str:
    """``name(Op)``; a node without a name is called after its first output."""
    name = node.name or next((f"'{o}'" for o in node.output if o), "")
    return f"{name}({node.op_type})"


def element_name(element: int) -> str | None:
    """``bfloat16`` for 16; None for a number that is no element type."""
    types = onnx.TensorProto.DataType
    known = element in types.values() and element != onnx.TensorProto.UNDEFINED
    return str(types.Name(element)).lower() if known else None


def declared_type(value: onnx.ValueInfoProto) -> str | None:
    """The element type that a declaration gives, if any."""
    if value.type.HasField("tensor_type"):
        return element_name(value.type.tensor_type.elem_type)
    return None


def quoted(node: onnx.NodeProto) -> str:
    """The node's name in quotes, or that of its first output."""
    return f"'{node.name or next((o for o in node.output if o), '')}'"
