"""Pieces that every layer is made of: norms, sums, activations, feed-forward."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx

from export.bundles.graph_index import op_name
from export.bundles.weights import MATMULS
from export.importing.columns import Columns, columns
from export.importing.reader import NORM_OPS, SKIP_NORM, Reader
from export.importing.stored import Weights
from passes.streamed import StreamedTensor

__all__ = ["GATED_NORM", "FeedForwardPart", "Parts", "Residual", "silu"]

GATED_NORM = "com.microsoft.GatedRMSNorm"
SKIP_EPSILON, EPSILON = 1e-12, 1e-5
"""What the operators take where no epsilon is stated."""


@dataclass(frozen=True, slots=True)
class Residual:
    """A sum that a norm reads: the stream and what is added to it."""

    stream: str
    delta: str


@dataclass(frozen=True, slots=True)
class FeedForwardPart:
    """A SwiGLU feed-forward: what it reads, and its weights."""

    normed: str
    weights: dict[str, StreamedTensor]
    inner: int


class Parts:
    """Recognises pieces of one graph and gathers what must be the same everywhere."""

    def __init__(self, reader: Reader, weights: Weights) -> None:
        self.reader, self.weights = reader, weights
        self.epsilons: dict[float, str] = {}
        """Epsilons of the RMS norms, each with the first node that has it."""

    def norm(self, node: onnx.NodeProto, size: int, what: str) -> StreamedTensor:
        """The weights of a norm over the last axis."""
        reader, is_skip = self.reader, op_name(node) == SKIP_NORM
        if op_name(node) not in (*NORM_OPS, GATED_NORM):
            reader.refuse(node, f"{what} is looked for, one of {', '.join(NORM_OPS)}")
        said = reader.allow(node, axis=(-1, 2, 3))
        if is_skip and len(node.input) > 3 and node.input[3]:
            reader.refuse(node, "it has a bias")
        reader.understood(node)
        epsilon = said.get("epsilon", SKIP_EPSILON if is_skip else EPSILON)
        self.epsilons.setdefault(float(str(np.float32(epsilon))), node.name or node.output[0])
        return self.weights.vector(node.input[2 if is_skip else 1], size, what)

    def residual(self, node: onnx.NodeProto) -> Residual | None:
        """The sum that a norm reads; None where it reads something else."""
        if op_name(node) == SKIP_NORM:
            addends = node.input[0], node.input[1]
        else:
            total = self.reader.maker(node.input[0])
            if total is None or op_name(total) != "Add":
                return None
            self.reader.understood(total)
            addends = total.input[0], total.input[1]
        delta = [value for value in addends if self._is_delta(value)]
        if len(delta) != 1:
            self.reader.refuse(node, f"of its addends {' and '.join(addends)}, not one is a "
                                     "product that a layer ends in")  # fmt: skip
        stream = addends[1] if delta[0] == addends[0] else addends[0]
        return Residual(stream, delta[0])

    def total(self, node: onnx.NodeProto) -> str:
        """The value that holds the sum which a norm reads, or what it reads."""
        if op_name(node) == SKIP_NORM:
            return node.output[3] if len(node.output) > 3 else ""
        return self.reader.source(node.input[0])

    def feed_forward(self, delta: str) -> FeedForwardPart:
        """``down(silu(gate(x)) * up(x))``."""
        reader = self.reader
        down = columns(reader, delta, "a feed-forward's last product")
        product = reader.made_by(down.input, ["Mul"], "silu(gate) * up")
        for one, other in (product.input, product.input[::-1]):
            inner = silu(reader, one)
            if inner is not None:
                gate = columns(reader, inner, "a feed-forward's gate")
                up = columns(reader, other, "a feed-forward's up projection")
                return FeedForwardPart(
                    self.same_input(gate, up),
                    {
                        "mlp.gate": self.weights.matrix(gate),
                        "mlp.up": self.weights.matrix(up),
                        "mlp.down": self.weights.matrix(down),
                    },
                    len(gate.index),
                )
        reader.refuse(product, "neither operand is silu(gate)")

    def same_input(self, *picked: Columns) -> str:
        """What all of `picked` multiply; refused where they differ."""
        found = [self.reader.source(one.input) for one in picked]
        for one, source in zip(picked, found, strict=True):
            if source != found[0]:
                self.reader.refuse(one.node, f"it reads '{source}', its neighbours "
                                             f"'{found[0]}'")  # fmt: skip
        return found[0]

    def _is_delta(self, value: str) -> bool:
        """Whether `value` is the product of something gated."""
        node = self.reader.maker(value)
        if node is None or op_name(node) not in MATMULS:
            return False
        gated = self.reader.maker(node.input[0])
        return gated is not None and op_name(gated) in ("Mul", GATED_NORM)


def silu(reader: Reader, value: str) -> str | None:
    """What `value` is the silu of; None where it is something else."""
    node = reader.maker(value)
    if node is None:
        return None
    if op_name(node) in ("com.microsoft.QuickGelu", "Swish"):
        said = reader.allow(node, alpha=(1.0,))
        if op_name(node) == "com.microsoft.QuickGelu" and "alpha" not in said:
            return None
        reader.understood(node)
        return str(node.input[0])
    if op_name(node) != "Mul":
        return None
    for one, other in (node.input, node.input[::-1]):
        sigmoid = reader.maker(other)
        if sigmoid is None or op_name(sigmoid) != "Sigmoid":
            continue
        if reader.source(sigmoid.input[0]) == reader.source(one):
            reader.understood(node, sigmoid)
            return str(one)
    return None
