"""Canonical and derived graphs of small checkpoints, and plain ways to run them.

Weights are named and folded here by plain NumPy, apart from the build's own code, and the
loop that decodes knows nothing but the ports of the graphs.
"""

import dataclasses
import functools
import json
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

import export
from artifacts import AttentionSpec, GdnSpec, HeadSpec, LayerKind, ModelSpec
from export.decoder import build_target
from export.head import build_head
from passes.accept import AcceptPass, GreedyTailPass
from passes.causal_padding import CausalPaddingPass
from passes.draft import DraftPass
from passes.join_head import JoinHeadPass
from passes.last_row import LastRowPass
from passes.pin_shapes import PinShapesPass
from passes.row_states import KeepRowStatesPass

ORACLE = Path(__file__).parent / "oracle"
if str(ORACLE) not in sys.path:  # its modules import one another by bare names
    sys.path.insert(0, str(ORACLE))

from checkpoint import load_config, load_weights  # noqa: E402
from tiny_reference import (  # noqa: E402
    MtpHead,
    TextModel,
    greedy,
    random_weights,
    speculative,
    tiny_config,
)

__all__ = [
    "CAPACITY",
    "DEMO",
    "Checkpoint",
    "Loop",
    "Run",
    "assert_complete",
    "assert_in_place_order",
    "attach",
    "decode_graph",
    "demo",
    "draft_graph",
    "greedy",
    "greedy_cases",
    "oracle_drafts",
    "prefill_graph",
    "speculative",
    "tiny",
    "verify_graph",
]

DEMO = Path(export.__file__).parent / "demo" / "tiny-hybrid-mtp"
CAPACITY = 96
"""Rows that count in the caches of a `Loop`; the buffers have M more."""
FLOAT = ir.DataType.FLOAT
GARBAGE = 2**40
"""What stands in integer buffers that nothing may read: far outside any vocabulary."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as the oracle knows it, and its canonical graphs."""

    config: object
    weights: dict

    @functools.cached_property
    def model(self):
        return TextModel(self.config, self.weights)

    @functools.cached_property
    def head(self):
        return MtpHead(self.config, self.weights, self.model)

    @functools.cached_property
    def spec(self):
        c = self.config
        return ModelSpec(
            family="qwen3_5_text",
            hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size,
            vocab_size=c.vocab_size,
            layers=tuple(
                LayerKind.GDN if kind == "linear_attention" else LayerKind.ATTENTION
                for kind in c.layer_types
            ),
            attention=AttentionSpec(
                query_heads=c.num_attention_heads,
                kv_heads=c.num_key_value_heads,
                head_dim=c.head_dim,
                rotary_dim=c.rotary_dim,
                rope_theta=c.rope_theta,
            ),
            gdn=GdnSpec(
                key_heads=c.linear_num_key_heads,
                value_heads=c.linear_num_value_heads,
                key_dim=c.linear_key_head_dim,
                value_dim=c.linear_value_head_dim,
                conv_kernel=c.linear_conv_kernel_dim,
                output_gate="silu",
            ),
            rms_norm_eps=c.rms_norm_eps,
            tied_embedding=c.tie_word_embeddings,
            max_positions=4096,
            head=HeadSpec(
                layers=1,
                hidden_source="post_norm",
                feedback="post_norm",
                concat="embed_first",
                cache="own",
                intermediate_size=c.intermediate_size,
            ),
        )

    @functools.cached_property
    def canonical_weights(self):
        return _canonical(self.config, self.weights)

    def target_graph(self, cache_rows):
        graph = build_target(self.spec, dtype=FLOAT, cache_rows=cache_rows)
        return attach(graph, self.canonical_weights)

    def head_graph(self, cache_rows):
        graph = build_head(self.spec, dtype=FLOAT, cache_rows=cache_rows)
        return attach(graph, self.canonical_weights)


@functools.cache
def demo():
    """The trained checkpoint that ships with the project."""
    return Checkpoint(load_config(DEMO), load_weights(DEMO))


@functools.cache
def tiny(seed=0, **sizes):
    """A random checkpoint: untied embedding, three value heads for each key head.

    Half of the 32 channels of a head turn, since the kernel rotates multiples of 16.
    """
    config = tiny_config(**{"partial_rotary_factor": 0.5, **sizes})
    return Checkpoint(config, random_weights(config, seed=seed))


def greedy_cases():
    return json.loads((DEMO / "greedy.json").read_text())["cases"]


def _canonical(config, w):
    """Published names to canonical ones; ``1 + w`` and ``-exp(A_log)`` folded."""
    out = {"embed": w["model.embed_tokens.weight"], "norm": 1 + w["model.norm.weight"]}
    if not config.tie_word_embeddings:
        out["lm_head"] = w["lm_head.weight"]

    def attention(src, dst):
        width = config.head_dim
        packed = w[src + "self_attn.q_proj.weight"].reshape(
            config.num_attention_heads, 2 * width, -1
        )
        out[dst + "attention.q"] = packed[:, :width].reshape(-1, packed.shape[2])
        out[dst + "attention.gate"] = packed[:, width:].reshape(-1, packed.shape[2])
        for name in "kvo":
            out[dst + f"attention.{name}"] = w[src + f"self_attn.{name}_proj.weight"]
        for name in "qk":
            out[dst + f"attention.{name}_norm"] = 1 + w[src + f"self_attn.{name}_norm.weight"]

    def common(src, dst):
        out[dst + "input_norm"] = 1 + w[src + "input_layernorm.weight"]
        out[dst + "post_norm"] = 1 + w[src + "post_attention_layernorm.weight"]
        for name in ("gate", "up", "down"):
            out[dst + f"mlp.{name}"] = w[src + f"mlp.{name}_proj.weight"]

    for i, kind in enumerate(config.layer_types):
        src, dst = f"model.layers.{i}.", f"layers.{i}."
        common(src, dst)
        if kind == "full_attention":
            attention(src, dst)
            continue
        gdn = src + "linear_attn."
        for name in ("qkv", "z", "b", "a"):
            out[dst + f"gdn.{name}"] = w[gdn + f"in_proj_{name}.weight"]
        out[dst + "gdn.conv"] = w[gdn + "conv1d.weight"]
        out[dst + "gdn.decay_scale"] = -np.exp(w[gdn + "A_log"])
        out[dst + "gdn.dt_bias"] = w[gdn + "dt_bias"]
        out[dst + "gdn.norm"] = w[gdn + "norm.weight"]
        out[dst + "gdn.out"] = w[gdn + "out_proj.weight"]
    common("mtp.layers.0.", "head.layers.0.")
    attention("mtp.layers.0.", "head.layers.0.")
    out["head.fc"] = w["mtp.fc.weight"]
    out["head.embed_norm"] = 1 + w["mtp.pre_fc_norm_embedding.weight"]
    out["head.hidden_norm"] = 1 + w["mtp.pre_fc_norm_hidden.weight"]
    out["head.norm"] = 1 + w["mtp.norm.weight"]
    return {
        name: ir.tensor(np.ascontiguousarray(value, np.float32), name=name)
        for name, value in out.items()
    }


def attach(model, weights):
    """Give every initializer that has none its value."""
    for name, value in model.graph.initializers.items():
        if value.const_value is None:
            assert tuple(value.shape.numpy()) == tuple(weights[name].shape.numpy()), name
            value.const_value = weights[name]
    return model


def assert_complete(model):
    """Names are unique, every value has a type and a shape, the full checker is content."""
    nodes = [node.name for node in model.graph if node.name]
    assert len(nodes) == len(set(nodes)), "two nodes of one name"
    values = [value.name for node in model.graph for value in node.outputs if value.name]
    values += [value.name for value in model.graph.inputs]
    values += list(model.graph.initializers)
    assert len(values) == len(set(values)), "two values of one name"
    for node in model.graph:
        for value in node.outputs:
            if value.name:
                assert value.dtype is not None, f"{value.name} has no type"
                assert value.shape is not None, f"{value.name} has no shape"
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


def assert_in_place_order(model):
    """Each reader of an input is an ancestor of the output that goes onto its memory."""
    graph = model.graph
    onto = {"input_ids": "next_token", "past_length": "next_length"}
    outputs = {value.name: value for value in graph.outputs}
    pairs = 0
    for value in graph.inputs:
        name = onto.get(value.name) or value.name.replace("past.", "present.")
        if name not in outputs or name == value.name:
            continue
        pairs += 1
        writer = outputs[name].producer()
        ancestors, todo = {writer}, [writer]
        while todo:
            for made in todo.pop().inputs:
                node = None if made is None else made.producer()
                if node is not None and node not in ancestors:
                    ancestors.add(node)
                    todo.append(node)
        for node, _ in value.uses():
            assert node in ancestors, f"{node.op_type} may read {value.name} after {name}"
    assert pairs > 2


class Run:
    """A model on ONNX Runtime's CPU provider: ``run(name=array, ..) -> {name: array}``."""

    def __init__(self, model):
        proto = ir.to_proto(model)
        onnx.checker.check_model(proto, full_check=True)
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1  # idle threads would spin beside the oracle
        self.session = ort.InferenceSession(
            proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        self.inputs = {value.name: value for value in self.session.get_inputs()}
        self.outputs = {value.name: value for value in self.session.get_outputs()}

    def __call__(self, feeds):
        names = list(self.outputs)
        return dict(zip(names, self.session.run(names, feeds), strict=True))

    def zeros(self, cache_rows):
        """Empty states for every ``past.*``."""
        return {
            name: np.zeros([cache_rows if n == "C" else n for n in value.shape], np.float32)
            for name, value in self.inputs.items()
            if "past." in name
        }

    def bound(self, feeds, outputs):
        """Run on the memory of these arrays: inputs read there, outputs written there."""
        binding = self.session.io_binding()
        for bind, arrays in ((binding.bind_input, feeds), (binding.bind_output, outputs)):
            for name, array in arrays.items():
                assert array.flags.c_contiguous
                bind(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        self.session.run_with_iobinding(binding)


def decode_graph(target, cache_rows):
    return _derived(target, PinShapesPass({"S": 1, "C": cache_rows}), GreedyTailPass())


def verify_graph(target, k, cache_rows):
    rows = k + 1
    return _derived(
        target,
        PinShapesPass({"S": rows, "C": cache_rows}),
        CausalPaddingPass(rows),
        KeepRowStatesPass(rows),
        AcceptPass(rows),
    )


def prefill_graph(target, head, cache_rows):
    return _derived(
        target,
        JoinHeadPass(head),
        LastRowPass(),
        GreedyTailPass(),
        PinShapesPass({"C": cache_rows}),
    )


def draft_graph(head, k, cache_rows):
    draft = DraftPass(k)(head).model
    PinShapesPass({"C": cache_rows})(draft)
    return draft


def _derived(model, *passes):
    model = model.clone()
    for pass_ in passes:
        pass_(model)
    return model


class Loop:
    """Decoding over the derived graphs and the buffers of the runtime's contract.

    `in_place` binds outputs onto the memory of inputs; without it every graph but the draft
    (whose caches are one by design) writes into arrays of its own, which are copied over.
    All buffers but the recurrent states start as NaN or as ids outside the vocabulary.
    """

    def __init__(self, checkpoint, k, *, in_place=False, capacity=CAPACITY):
        self.k, self.capacity, self.in_place = k, capacity, in_place
        self.rows = rows = capacity + k + 1
        target, head = checkpoint.target_graph(rows), checkpoint.head_graph(rows)
        self.prefill = Run(prefill_graph(target, head, rows))
        self.decode = Run(decode_graph(target, rows))
        self.verify = Run(verify_graph(target, k, rows))
        self.draft = Run(draft_graph(head, k, rows))
        self.reset()

    def reset(self):
        self.buffers = {
            "ids": np.full((1, self.k + 1), GARBAGE),
            "draft_count": np.zeros(1, np.int32),
            "length": np.zeros(1, np.int32),
            "accepted": np.zeros(1, np.int64),
            "best": np.full((1, self.k + 1), GARBAGE),
            "result": np.full(2 * self.k + 4, GARBAGE),
        }
        for name in ("hidden", "logits"):
            shape = self.verify.outputs[name].shape
            self.buffers[name] = np.full(shape, np.nan, np.float32)
        for name, value in self.prefill.inputs.items():
            if "past." in name:
                kept = name.endswith((".conv", ".recurrent"))
                fill = 0 if kept else np.nan
                self.buffers[self._buffer(name)] = np.full(value.shape, fill, np.float32)

    @staticmethod
    def _buffer(port):
        """Where a port of the target, or one named head.*, lies."""
        ports = {"input_ids": "ids", "next_token": "ids", "past_length": "length"}
        if port == "next_length":
            return "length"
        for word in ("past", "present"):
            if port.startswith(f"head.{word}."):
                return port.replace(f"head.{word}.", "head.")
            if port.startswith(f"{word}."):
                return port.replace(f"{word}.", "target.")
        return ports.get(port, port)

    @staticmethod
    def _draft_buffer(port):
        if port.startswith(("past.", "present.")):
            return "head." + ".".join(port.split(".")[1:3])
        return port

    def _start(self, name, shape):
        """The array of `shape` at the start of a buffer, in its memory."""
        count = int(np.prod(shape))
        return self.buffers[name].reshape(-1)[:count].reshape(shape)

    def run(self, graph, buffer_of=None, *, in_place=None, extra=()):
        """One forward over the buffers."""
        buffer_of = buffer_of or self._buffer
        feeds = {
            name: self._start(buffer_of(name), value.shape)
            for name, value in graph.inputs.items()
            if name not in dict(extra)
        } | dict(extra)
        outputs = {
            name: self._start(buffer_of(name), value.shape)
            for name, value in graph.outputs.items()
        }
        if self.in_place if in_place is None else in_place:
            graph.bound(feeds, outputs)
            return
        made = graph(feeds)
        for name, array in outputs.items():
            np.copyto(array, made[name])

    def feed_prompt(self, prompt, chunk=None):
        """Prefill; the last row of the last chunk gets a next token that means nothing."""
        chunk = chunk or len(prompt)
        following = [*prompt[1:], 0]
        for start in range(0, len(prompt), chunk):
            ports = {
                "input_ids": np.array([prompt[start : start + chunk]]),
                "next_ids": np.array([following[start : start + chunk]]),
            }
            self.run(self.prefill, extra=ports.items())

    def step(self, draft_count=None, drafts=None):
        """Draft, verify; give the tokens that were emitted."""
        self.run(self.draft, self._draft_buffer, in_place=True)
        if drafts is not None:
            self.buffers["ids"][0, 1 : 1 + len(drafts)] = drafts
        count = self.k if draft_count is None else draft_count
        self.buffers["draft_count"][0] = count
        self.buffers["ids"][0, 1 + count :] = GARBAGE
        self.run(self.verify)
        accepted = int(self.buffers["result"][0])
        return self.buffers["result"][2 : 3 + accepted].tolist()

    def generate(self, prompt, count, chunk=None):
        """Tokens after the prompt, and how many drafts each step accepted."""
        self.reset()
        self.feed_prompt(prompt, chunk)
        tokens, accepted = [int(self.buffers["best"][0, 0])], []
        while len(tokens) < count:
            emitted = self.step()
            accepted.append(len(emitted) - 1)
            tokens += emitted
        return tokens[:count], accepted

    def generate_greedy(self, prompt, count, chunk=None):
        """The same by decode alone."""
        self.reset()
        self.feed_prompt(prompt, chunk)
        tokens = [int(self.buffers["best"][0, 0])]
        while len(tokens) < count:
            self.run(self.decode)
            tokens.append(int(self.buffers["result"][2]))
        return tokens


def oracle_drafts(checkpoint, tokens, k):
    """The k drafts after `tokens` (the last of them emitted, not fed), rows of the head's
    own cache after its catch-up [len(tokens) - 1, Hkv, hd]."""
    model, head = checkpoint.model, checkpoint.head
    hidden = model.forward(tokens[:-1], model.new_cache(), 0)["hidden"]
    cache = head.new_cache()
    m, logits = head.forward(tokens[1:], hidden, cache, 0)
    drafts = [int(logits[-1].argmax())]
    rows = (cache[0].k.copy(), cache[0].v.copy())
    for j in range(1, k):
        m, logits = head.forward(drafts[-1:], m[-1:], cache, len(tokens) - 2 + j)
        drafts.append(int(logits[-1].argmax()))
    return drafts, rows
