"""One graph of a bundle under import: its layers, embedding and LM head."""

from __future__ import annotations

from export.bundles.graph_index import GraphIndex, op_name
from export.bundles.layout import BundleLayout
from export.bundles.states import find_states
from export.bundles.weights import embedding, lm_head
from export.bundles.wiring import final_norm
from export.errors import BundleError
from export.importing.columns import columns
from export.importing.functions import inlined
from export.importing.parts import Parts
from export.importing.reader import Reader
from export.importing.stack import Layer, Stack, read_stack
from export.importing.stored import Weights
from passes.streamed import StreamedTensor

__all__ = ["BundleGraph"]


class BundleGraph:
    """One graph under import."""

    def __init__(self, layout: BundleLayout, role: str, index: GraphIndex) -> None:
        self.index = inlined(index)
        self.reader = Reader(role, self.index)
        self.weights = Weights(layout, layout.graphs[role], self.reader)
        self.parts = Parts(self.reader, self.weights)
        self.presents = {s.past: s.present for s in find_states(self.index) if s.present}

    def stack(self) -> tuple[Stack, int]:
        """The layers before the final norm, and the width of the stream."""
        norm = final_norm(self.index)
        if norm is None:
            self.reader.refuse(None, "no norm lies before its logits or hidden states")
        weight = norm.input[2 if "Skip" in norm.op_type else 1]
        size = self._size(weight)
        stack = read_stack(self.parts, norm, size, self.presents)
        for layer in stack.layers:
            self._check_states(layer)
        return stack, size

    def embedding(self) -> tuple[str, StreamedTensor] | None:
        """The table that token ids are looked up in: the looked-up value, the table."""
        node = embedding(self.index)
        if node is None:
            return None
        if op_name(node) != "Gather" or self.reader.allow(node, axis=(0,)) is None:
            self.reader.refuse(node, "embeddings that are packed are not known here")
        self.reader.understood(node)
        tensor = self.index.initializers[self.reader.source(node.input[0])]
        shape = tuple(tensor.dims)
        if len(shape) != 2:
            self.reader.refuse(node, f"its table is {list(shape)}")
        return node.output[0], self.weights.whole(tensor.name, shape)

    def lm_head(self) -> StreamedTensor | None:
        """The matrix of the product that makes the logits."""
        node = lm_head(self.index)
        if node is None:
            return None
        logits = next(o.name for o in self.index.graph.output if "logits" in o.name)
        return self.weights.matrix(columns(self.reader, logits, "logits"))

    def finish(self) -> None:
        """Refuse what is left over, by name."""
        for output in self.index.graph.output:  # exposed states only hand a value on
            self.reader.source(output.name)
        left = list(self.reader.leftovers())
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise BundleError(
                f"{self.reader.role}: {left[0]}{more} have no place in the model that can be "
                "built; importing without them would give another model"
            )

    def _size(self, weight: str) -> int:
        name = self.reader.source(weight)
        node = self.index.producers.get(name)
        for candidate in (name, *(node.input if node is not None else ())):
            tensor = self.index.initializers.get(self.reader.source(candidate))
            if tensor is not None and len(tensor.dims) == 1 and tensor.dims[0] > 1:
                return int(tensor.dims[0])
        self.reader.refuse(node, "the weight of the final norm is no stored vector")

    def _check_states(self, layer: Layer) -> None:
        outputs = {self.reader.source(o.name) for o in self.index.graph.output}
        for past, present in layer.mixer.states:
            name = self.reader.source(past)
            if name not in self.index.inputs or self.reader.source(present) not in outputs:
                maker = self.index.producers.get(present)
                self.reader.refuse(
                    maker, f"its state '{past}' is not handed from step to step"
                )
