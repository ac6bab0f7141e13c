"""Decoding with a bundle's own graphs: plain dynamic loops, no artifact, no runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from third_party import Target

__all__ = ["greedy", "on_the_cpu", "speculative"]


def greedy(target: Target, prompt: list[int], count: int) -> list[int]:
    """The `count` tokens that follow `prompt`."""
    tokens: list[int] = []
    fed = prompt
    while len(tokens) < count:
        tokens.append(int(target.step(fed)["logits"][0, -1].argmax()))
        fed = tokens[-1:]
    return tokens


class _Head:
    """A head that keeps its cache; where it has no embedding and LM head, the target's."""

    def __init__(self, bundle: Path) -> None:
        files = [f for f in ("mtp/model.onnx", "mtp.onnx") if (bundle / f).exists()]
        self.graph = Target(bundle / files[0])
        weights = onnx.load(bundle / "model.onnx").graph.initializer
        stored = {tensor.name: tensor for tensor in weights}
        self.own = files[0] == "mtp.onnx"
        if not self.own:
            self.embed = _numbers(stored["model.embed_tokens.weight"])
            self.scores = _numbers(stored["lm_head.weight_t"])

    def draft(self, hidden: np.ndarray, following: list[int]) -> int:
        """Feed rows of the target's hidden states with the tokens that follow them."""
        if self.own:
            made = self.graph.step(following, hidden_states=hidden)
            return int(made["logits"][0, -1].argmax())
        embeds = self.embed[following][None]
        made = self.graph.step(following, hidden_states=hidden, inputs_embeds=embeds)
        return int((made["mtp_hidden"][0, -1] @ self.scores).argmax())


def speculative(bundle: Path, prompt: list[int], count: int) -> tuple[list[int], int, int]:
    """Tokens, drafts tried and drafts accepted, one draft a round."""
    target, head = Target(bundle / "model.onnx"), _Head(bundle)
    first = target.step(prompt)
    tokens = [int(first["logits"][0, -1].argmax())]
    hidden, following = first["hidden_states"], [*prompt[1:], tokens[0]]
    tried = accepted = 0
    while len(tokens) < count:
        draft = head.draft(hidden, following)
        before = target.states
        made = target.step([tokens[-1], draft])
        best = made["logits"][0].argmax(-1)
        tried += 1
        if best[0] == draft:
            accepted += 1
            following = [int(token) for token in best]
        else:
            target.rewind(before)
            made = target.step([tokens[-1]])
            following = [int(made["logits"][0, -1].argmax())]
        hidden = made["hidden_states"]
        tokens += following
    return tokens[:count], tried, accepted


def on_the_cpu(graph: Path) -> None:
    """Rewrite windowed states, which the CPU provider does not run, to the newest one."""
    model = onnx.load(graph, load_external_data=False)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "state_window":
                attribute.i = 0
    for value in (*model.graph.input, *model.graph.output):
        if value.name.endswith((".conv", ".recurrent")):
            del value.type.tensor_type.shape.dim[0]
    onnx.save(model, graph)


def _numbers(tensor: onnx.TensorProto) -> np.ndarray:
    return onnx.numpy_helper.to_array(tensor).astype(np.float32)
