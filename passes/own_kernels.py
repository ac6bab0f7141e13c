"""This project's own operators (``onnx_mtp``) in the place of stock ones (CUDA, Hopper)."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
from onnx_ir.passes import PreconditionError

from passes.contrib import is_contrib
from passes.counted import CountedPass
from passes.quantise import BLOCK, PackedMatrix
from passes.repack_w4 import SCALES, interleave, repack
from passes.streamed import StreamedTensor

__all__ = ["OWN_DOMAIN", "OwnMatricesPass"]

OWN_DOMAIN = "onnx_mtp"


class OwnMatricesPass(CountedPass):
    """Let four-bit matrices be read by `MatMulW4`, gates and values of a feed-forward as one.

        before   MatMulNBits(x, w.q4, w.q4.scales)
        after    MatMulW4<N>(x, w.w4)                   the same numbers in another order

        before   Mul(QuickGelu<alpha=1>(MatMulNBits(x, gate)), MatMulNBits(x, up))
        after    MatMulW4<N, silu=1>(x, gate|up)        rows of the two by turns

    Repacked matrices are kept between calls, so that target and head share them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._repacked: dict[str, StreamedTensor] = {}
        self._sources: dict[str, tuple[str, str]] = {}

    def rewrite(self, model: ir.Model) -> int:
        """See the class."""
        graph = model.graph
        for node in graph:
            if is_contrib(node, "MatMulNBits"):
                _matrix(node)  # refuses before anything has changed
        pairs = [found for node in graph if (found := _gate_and_value(node)) is not None]
        for mul, gate, value in pairs:
            self._replace_pair(graph, mul, gate, value)
        single = [node for node in graph if is_contrib(node, "MatMulNBits")]
        for node in single:
            matrix = _matrix(node)
            name = _stem(node)
            packed = self._repack(name, lambda m=matrix: m)  # type: ignore[misc]
            self._remember(packed, all=matrix)
            _insert(graph, node, node, packed, node.attributes.get_int("N", 0), silu=0)
            graph.remove(node, safe=True)
        _drop_unread(graph)
        if pairs or single:
            graph.opset_imports[OWN_DOMAIN] = 1
        return len(pairs) + len(single)

    @property
    def sources(self) -> dict[str, tuple[str, str]]:
        """Name of a matrix or its scales -> the packed one, and which part of it it is."""
        return dict(self._sources)

    def _replace_pair(
        self, graph: ir.Graph, mul: ir.Node, gate: ir.Node, value: ir.Node
    ) -> None:
        name = f"{_stem(gate)}|{_stem(value).rpartition('.')[2]}"
        packed = self._repack(name, lambda: interleave(_matrix(gate), _matrix(value)))
        self._remember(packed, gates=_matrix(gate), values=_matrix(value))
        _insert(graph, mul, gate, packed, gate.attributes.get_int("N", 0), silu=1)
        activation = gate.outputs[0].consumers()[0]
        graph.remove([mul], safe=True)
        graph.remove([activation], safe=True)
        graph.remove([gate, value], safe=True)

    def _remember(self, packed: StreamedTensor, **parts: PackedMatrix) -> None:
        for part, matrix in parts.items():
            for tensor in (matrix.data, matrix.scales):
                self._sources[tensor.name or ""] = (packed.name or "", part)

    def _repack(self, name: str, matrix: Callable[[], PackedMatrix]) -> StreamedTensor:
        if name not in self._repacked:
            self._repacked[name] = repack(matrix(), f"{name}.w4")
        return self._repacked[name]


def _gate_and_value(mul: ir.Node) -> tuple[ir.Node, ir.Node, ir.Node] | None:
    """``mul``, the gate's and the value's product, where it is a gated feed-forward."""
    if mul.op_type != "Mul" or mul.domain != "":
        return None
    for index in (0, 1):
        activation, value = (_maker(mul.inputs[i]) for i in (index, 1 - index))
        if activation is None or value is None or not is_contrib(activation, "QuickGelu"):
            continue
        gate = _maker(activation.inputs[0])
        if gate is None or activation.attributes.get_float("alpha", 1.702) != 1.0:
            continue
        both = is_contrib(gate, "MatMulNBits") and is_contrib(value, "MatMulNBits")
        if both and gate.inputs[0] is value.inputs[0] and _alone(gate, activation, value):
            return mul, gate, value
    return None


def _maker(value: ir.Value | None) -> ir.Node | None:
    return None if value is None else value.producer()


def _alone(*nodes: ir.Node) -> bool:
    return all(
        len(node.outputs[0].uses()) == 1 and not node.outputs[0].is_graph_output()
        for node in nodes
    )


def _matrix(node: ir.Node) -> PackedMatrix:
    """The streamed weights of a MatMulNBits; refuses any other form of it."""
    tensors = [value.const_value for value in node.inputs[1:3] if value is not None]
    whole = len(node.inputs) == 3 and len(tensors) == 2
    block = node.attributes.get_int("block_size", 0), node.attributes.get_int("bits", 0)
    aligned = node.attributes.get_int("K", 0) % BLOCK == 0
    streamed = [tensor for tensor in tensors if isinstance(tensor, StreamedTensor)]
    if not whole or block != (BLOCK, 4) or len(streamed) != 2 or not aligned:
        raise PreconditionError(
            f"MatMulNBits {node.name!r} cannot be read by MatMulW4: it takes four bits in "
            "blocks of 32 without zero points or bias, streamed, and whole blocks of columns"
        )
    if streamed[1].dtype not in SCALES:
        raise PreconditionError(
            f"the scales of MatMulNBits {node.name!r} are {streamed[1].dtype}; MatMulW4 takes "
            "FLOAT16 or BFLOAT16. Build for one of these: --dtype fp16"
        )
    return PackedMatrix(*streamed)


def _stem(node: ir.Node) -> str:
    data = node.inputs[1]
    return "" if data is None else (data.name or "").removesuffix(".q4")


def _insert(
    graph: ir.Graph,
    place: ir.Node,
    like: ir.Node,
    packed: StreamedTensor,
    n: int,
    *,
    silu: int,
) -> None:
    """A MatMulW4 before `place`, whose output takes the place of that one's."""
    name = packed.name or ""
    if name not in graph.initializers:
        graph.initializers[name] = ir.Value(
            name=name,
            type=ir.TensorType(packed.dtype),
            shape=packed.shape,
            const_value=packed,
        )
    made = ir.node(
        "MatMulW4",
        [like.inputs[0], graph.initializers[name]],
        {"N": n} | ({"silu": 1} if silu else {}),
        domain=OWN_DOMAIN,
        name=place.name,
    )
    graph.insert_before(place, made)
    old, new = place.outputs[0], made.outputs[0]
    new.name, new.type, new.shape = old.name, old.type, old.shape
    if old.is_graph_output():
        graph.outputs[list(graph.outputs).index(old)] = new
    ir.convenience.replace_all_uses_with(old, new)


def _drop_unread(graph: ir.Graph) -> None:
    for name in [n for n, value in graph.initializers.items() if not value.uses()]:
        if name.endswith((".q4", ".q4.scales")):
            del graph.initializers[name]
