"""The weights of a graph by what they do, found by structure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

import onnx

from export.bundles.data_files import dtype_name, tensor_bytes
from export.bundles.graph_index import GraphIndex, attribute, op_name

__all__ = ["MATMULS", "NORMS", "WeightClass", "WeightTotal", "classify", "embedding"]
__all__ += ["lm_head", "totals"]

MATMULS = frozenset(
    {"MatMul", "Gemm", "com.microsoft.FusedMatMul", "com.microsoft.MatMulNBits"}
    | {"com.microsoft.MatMulBnb4", "com.microsoft.MatMulBlockQuantizedFp8Weight"}
    | {"com.microsoft.MatMulBlockQuantizedFp4Weight", "com.microsoft.QMoE"}
)
ATTENTION = frozenset(
    {"Attention", "com.microsoft.GroupQueryAttention", "com.microsoft.PagedAttention"}
    | {"com.microsoft.MultiHeadAttention"}
)
LINEAR = frozenset(
    {"com.microsoft.LinearAttention", "LinearAttention", "com.microsoft.GatedDeltaNet"}
    | {"com.microsoft.CausalConvWithState", "CausalConvWithState"}
    | {"com.microsoft.LinearAttentionGate", "com.microsoft.VarlenCausalConvWithState"}
)
NORMS = frozenset(
    {"RMSNormalization", "SimplifiedLayerNormalization", "LayerNormalization"}
    | {"com.microsoft.SkipSimplifiedLayerNormalization", "com.microsoft.GatedRMSNorm"}
    | {"com.microsoft.SkipLayerNormalization", "LpNormalization"}
)
ROTARY = frozenset(
    {"RotaryEmbedding", "com.microsoft.RotaryEmbedding", "com.microsoft.MRotaryEmbedding"}
)
LOOKUPS = frozenset({"Gather", "com.microsoft.GatherBlockQuantized"})
UNPACKING = frozenset({"Transpose", "Cast", "DequantizeLinear", "Identity", "Add", "Reshape"})
SCALAR_ELEMENTS = 8
"""Up to here an unnamed tensor is a constant of the graph (axes, shapes), not a weight."""


class WeightClass(StrEnum):
    """What a weight does."""

    EMBEDDING = "embedding"
    LM_HEAD = "lm_head"
    ATTENTION = "attention"
    LINEAR_ATTENTION = "linear_attention"
    MLP = "mlp"
    """All other matrices: the feed-forward, and what joins a head's two inputs."""
    NORM = "norm"
    ROTARY = "rotary"
    CONSTANT = "constant"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class WeightTotal:
    """All weights of one class and dtype."""

    kind: WeightClass
    dtype: str
    """``bfloat16``; ``int4/32`` for four bits in blocks of 32."""
    tensors: int
    bytes: int


def lm_head(index: GraphIndex) -> onnx.NodeProto | None:
    """The product that makes ``logits``: by position, never by width."""
    logits = next((o.name for o in index.graph.output if "logits" in o.name), None)
    if logits is None:
        return None
    node = index.producers.get(index.source(logits))
    return node if node is not None and op_name(node) in MATMULS else None


def embedding(index: GraphIndex) -> onnx.NodeProto | None:
    """The look-up of token ids in an initializer."""
    for node in index.graph.node:
        if op_name(node) in LOOKUPS and len(node.input) > 1:
            ids = index.inputs.get(index.source(node.input[1]))
            tokens = ids is not None and "ids" in ids.name and "position" not in ids.name
            if tokens and node.input[0] in index.initializers:
                found: onnx.NodeProto = node
                return found
    return None


def classify(index: GraphIndex) -> dict[str, WeightClass]:
    """The class of each initializer by the node that reads it."""
    found: dict[str, WeightClass] = {}
    mixers = _mixer_products(index)
    head, lookup = lm_head(index), embedding(index)
    for node in index.graph.node:
        op = op_name(node)
        if node is lookup:
            kind = WeightClass.EMBEDDING
        elif node is head:
            kind = WeightClass.LM_HEAD
        elif id(node) in mixers:
            kind = mixers[id(node)]
        elif op in MATMULS:
            kind = WeightClass.MLP
        elif op in LINEAR or op in ATTENTION:
            kind = WeightClass.LINEAR_ATTENTION if op in LINEAR else WeightClass.ATTENTION
        elif op in NORMS:
            kind = WeightClass.NORM
        elif op in ROTARY or (op in LOOKUPS and _feeds_rotary(index, node)):
            kind = WeightClass.ROTARY
        else:
            continue
        first = 0 if op in LOOKUPS or op in ROTARY else 1
        turned = set(node.input[7:9]) if op == "com.microsoft.GroupQueryAttention" else set()
        for name in _stored(index, node.input[first:]):
            found.setdefault(name, WeightClass.ROTARY if name in turned else kind)
    for name, tensor in index.initializers.items():
        small = math.prod(tensor.dims) <= SCALAR_ELEMENTS
        if small and found.get(name) is not WeightClass.LINEAR_ATTENTION:
            found[name] = WeightClass.CONSTANT
        found.setdefault(name, WeightClass.OTHER)
    return found


def totals(index: GraphIndex) -> tuple[WeightTotal, ...]:
    """Tensors and bytes by class and dtype, the largest first."""
    sums: dict[tuple[WeightClass, str], tuple[int, int]] = {}
    formats = _packed(index)
    for name, kind in classify(index).items():
        tensor = index.initializers[name]
        key = kind, formats.get(name) or dtype_name(tensor.data_type)
        tensors, size = sums.get(key, (0, 0))
        sums[key] = tensors + 1, size + tensor_bytes(tensor)
    rows = (WeightTotal(k, d, n, size) for (k, d), (n, size) in sums.items())
    return tuple(sorted(rows, key=lambda row: (-row.bytes, row.kind, row.dtype)))


def _stored(index: GraphIndex, values: Iterable[str]) -> Iterator[str]:
    """Initializers among `values`, or behind ops that unpack a weight."""
    for value in values:
        if value in index.initializers:
            yield value
        elif value in index.producers:
            node = index.producers[value]
            if op_name(node) in UNPACKING and all(
                name in index.initializers for name in node.input
            ):
                yield from node.input


def _mixer_products(index: GraphIndex) -> dict[int, WeightClass]:
    """Products before and after an attention of either kind, by node id."""

    def product(node: onnx.NodeProto) -> bool:
        return op_name(node) in MATMULS

    def edge(node: onnx.NodeProto) -> bool:
        """A shape that is asked of the layer's input leads back into the layer before."""
        return product(node) or op_name(node) == "Shape"

    found: dict[int, WeightClass] = {}
    for ops, kind in (
        (LINEAR, WeightClass.LINEAR_ATTENTION),
        (ATTENTION, WeightClass.ATTENTION),
    ):
        for mixer in (n for n in index.graph.node if op_name(n) in ops):
            before = [n for n in index.behind(list(mixer.input), edge) if product(n)]
            after = [n for n in index.ahead(list(mixer.output[:1]), edge) if product(n)]
            gates = index.behind([n.input[0] for n in after if n.input], edge)
            for node in (*before, *after, *(n for n in gates if product(n))):
                found.setdefault(id(node), kind)
    return found


def _feeds_rotary(index: GraphIndex, node: onnx.NodeProto) -> bool:
    users = index.consumers.get(node.output[0], [])
    return any(op_name(user) in ROTARY for user in users)


def _packed(index: GraphIndex) -> dict[str, str]:
    """``int4/32`` for the packed matrices of MatMulNBits."""
    return {
        node.input[1]: f"int{attribute(node, 'bits', 4)}/{attribute(node, 'block_size', 32)}"
        for node in index.graph.node
        if op_name(node) == "com.microsoft.MatMulNBits" and node.input[1] in index.initializers
    }
