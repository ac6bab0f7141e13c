"""A small valid artifact, made by hand: the shapes and ports of a real one, toy arithmetic.

One Gated DeltaNet layer, one attention layer and a head, k = 2. States go through an `Add`
or a `GroupQueryAttention`; nothing in it is meant to be run.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from artifacts import (
    AttentionSpec,
    Buffer,
    GdnSpec,
    Graph,
    HeadSpec,
    LayerKind,
    Manifest,
    ModelSpec,
    Port,
    Source,
    Target,
    Weights,
)
from export.weight_file import plan, write_weights
from passes.streamed import from_array

D, V, HKV, HD, HV, DK, DV, TAPS = 8, 16, 1, 4, 2, 4, 4, 4
K, CAPACITY, PREFILL_ROWS = 2, 10, 5
M = K + 1
C = CAPACITY + M
CACHE, CONV, RECURRENT = (1, HKV, C, HD), (1, TAPS - 1, 16), (1, HV, DK, DV)
WEIGHTS = "weights.safetensors"
TYPES = {"float32": 1, "int64": 7, "int32": 6}

SPEC = ModelSpec(
    family="sample",
    hidden_size=D,
    intermediate_size=8,
    vocab_size=V,
    layers=(LayerKind.GDN, LayerKind.ATTENTION),
    attention=AttentionSpec(
        query_heads=2, kv_heads=HKV, head_dim=HD, rotary_dim=2, rope_theta=1e4
    ),
    gdn=GdnSpec(
        key_heads=1, value_heads=HV, key_dim=DK, value_dim=DV, conv_kernel=TAPS,
        output_gate="silu",
    ),
    rms_norm_eps=1e-6,
    tied_embedding=True,
    max_positions=64,
    head=HeadSpec(
        layers=1, hidden_source="post_norm", feedback="post_norm", concat="embed_first",
        cache="own", intermediate_size=8,
    ),
)  # fmt: skip

BUFFERS = {
    "ids": Buffer("int64", (1, M)),
    "draft_count": Buffer("int32", (1,)),
    "length": Buffer("int32", (1,)),
    "accepted": Buffer("int64", (1,)),
    "best": Buffer("int64", (1, M)),
    "hidden": Buffer("float32", (1, M, D)),
    "logits": Buffer("float32", (1, M, V)),
    "result": Buffer("int64", (2 * M + 2,)),
    "prompt_ids": Buffer("int64", (1, PREFILL_ROWS)),
    "prompt_next": Buffer("int64", (1, PREFILL_ROWS)),
    "target.0.conv": Buffer("float32", CONV),
    "target.0.recurrent": Buffer("float32", RECURRENT),
    "target.1.key": Buffer("float32", CACHE),
    "target.1.value": Buffer("float32", CACHE),
    "head.0.key": Buffer("float32", CACHE),
    "head.0.value": Buffer("float32", CACHE),
}
ON_CUDA = {
    "target.conv": Buffer("float32", (M, *CONV[1:])),
    "target.recurrent": Buffer("float32", (M, *RECURRENT[1:])),
    "rows.conv": Buffer("float32", (1, M, *CONV[1:])),
    "rows.recurrent": Buffer("float32", (1, M, *RECURRENT[1:])),
}
"""In the place of the states of layer 0, where those of all layers lie in one buffer."""


def arrays() -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng(3)
    return {
        "embed": random.standard_normal((V, D)).astype(np.float32),
        "mix": random.standard_normal((D, D)).astype(np.float32),
        "unembed": random.standard_normal((D, V)).astype(np.float32),
    }


class Sketch:
    """A graph and its ports while they are drawn."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: list[Port] = []
        self.outputs: list[Port] = []
        self.constants: list[TensorProto] = []
        self.values: list[onnx.ValueInfoProto] = []

    def take(self, name: str, buffer: str, *shape: int | str, **more: Any) -> str:
        self.inputs.append(_port(name, buffer, shape, more))
        return name

    def give(self, name: str, buffer: str, *shape: int | str, **more: Any) -> str:
        self.outputs.append(_port(name, buffer, shape, more))
        return name

    def op(self, kind: str, inputs: list[str], outputs: list[str], **attributes: Any) -> str:
        name = attributes.pop("name", f"{kind.lower()}_{len(self.nodes)}")
        self.nodes.append(helper.make_node(kind, inputs, outputs, name=name, **attributes))
        return outputs[0]

    def constant(self, name: str, array: Any) -> str:
        self.constants.append(onnx.numpy_helper.from_array(np.asarray(array), name))
        return name

    def attend(self, i: int, past: str, key: str, value: str) -> str:
        """A GroupQueryAttention node over `past`, which writes `key` and `value`."""
        inputs = ["qkv", "", "", f"{past}.key", f"{past}.value", "seqlens", "total"]
        attended = f"attended_{i}"
        self.values.append(helper.make_tensor_value_info(attended, 1, [1, 1, D]))
        return self.op(
            "GroupQueryAttention", inputs, [attended, key, value], domain="com.microsoft",
            num_heads=2, kv_num_heads=1, name=f"attention_{i}",
        )  # fmt: skip

    def model(self, name: str) -> onnx.ModelProto:
        def info(port: Port) -> onnx.ValueInfoProto:
            return helper.make_tensor_value_info(port.name, TYPES[port.dtype], port.shape)

        graph = helper.make_graph(
            self.nodes, name, [*map(info, self.inputs)], [*map(info, self.outputs)],
            self.constants + weight_references(), value_info=self.values,
        )  # fmt: skip
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _port(name: str, buffer: str, shape: tuple[int | str, ...], more: dict[str, Any]) -> Port:
    whole = (BUFFERS | ON_CUDA)[buffer]
    return Port(name, buffer, whole.dtype, shape or whole.shape, **more)


def weight_references() -> list[TensorProto]:
    found = []
    for name, place in plan({n: from_array(a) for n, a in arrays().items()})[1].items():
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=place.shape)
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=WEIGHTS)
        tensor.external_data.add(key="offset", value=str(place.offset))
        tensor.external_data.add(key="length", value=str(place.length))
        found.append(tensor)
    return found


def target(rows: int | None, provider: str) -> Sketch:
    """`prefill` (rows None), `decode` (1) or `verify` (M)."""
    g, out = Sketch(), rows or 1
    size: int | str = rows or "S"
    ids = g.take("input_ids", "ids" if rows else "prompt_ids", 1, size)
    if rows is None:
        g.take("next_ids", "prompt_next", 1, "S")
    if rows == M:
        g.take("draft_count", "draft_count")
    past_length = g.take("past_length", "length")

    x = g.op("Gather", ["embed", ids], ["x"], name="look_up")
    if rows is None:
        last = g.constant("last", [-1])
        x = g.op("Gather", [x, last], ["x_last"], axis=1)
    hidden = g.op("MatMul", [x, "mix"], [g.give("hidden", "hidden", 1, out, D)])
    logits = g.op("MatMul", [hidden, "unembed"], [g.give("logits", "logits", 1, out, V)])
    best = g.give("best", "best", 1, out)
    g.op("ArgMax", [logits], [best], axis=-1, keepdims=0)
    first = g.constant("first", [0])
    g.op("Gather", [best, first], [g.give("next_token", "ids", 1, 1)], axis=1)

    g.op("Gather", [best, first], ["some"], axis=1)
    g.op("Squeeze", ["some", first], [g.give("accepted", "accepted")])
    g.op("Cast", ["accepted"], ["accepted_32"], to=TensorProto.INT32)
    g.op("Add", [past_length, "accepted_32"], [g.give("next_length", "length")], name="count")
    g.op("Cast", ["next_length"], ["next_length_64"], to=TensorProto.INT64)
    g.op("Squeeze", [best, first], ["best_flat"])
    g.op("Concat", ["accepted", "next_length_64", "best_flat", "best_flat"],
         [g.give("result", "result", 2 * out + 2)], axis=0)  # fmt: skip

    states = ["target.1.key", "target.1.value"]
    if rows is None:
        states += ["head.0.key", "head.0.value"]
    step = g.constant("step", np.float32(1))
    if provider == "cpu":
        states = ["target.0.conv", "target.0.recurrent", *states]
    else:
        joined(g, "conv", CONV, rows)
        joined(g, "recurrent", RECURRENT, rows)
    for state in states:
        prefix = "head." if state.startswith("head") else ""
        tail = state.split(".", 1)[1]
        past = g.take(f"{prefix}past.{tail}", state)
        present = g.give(f"{prefix}present.{tail}", state)
        g.op("Add", [past, step], [present], name=f"update {state}")
    return g


def joined(g: Sketch, kind: str, shape: tuple[int, ...], rows: int | None) -> None:
    """The state of layer 0 at its slot of a shared buffer; a verify picks a row's state."""
    at = (M - 1) * math.prod(shape)
    if rows != M:
        past = g.take(f"past.0.{kind}", f"target.{kind}", *shape, offset=at)
        present = g.give(f"present.0.{kind}", f"target.{kind}", *shape, offset=at)
        g.op("Add", [past, "step"], [present], name=f"update {kind}")
        return
    window = (1, M, *shape[1:])
    past = g.take(f"past.0.{kind}", f"target.{kind}", *window)
    written = g.give(f"rows.0.{kind}", f"rows.{kind}")
    g.op("Add", [past, "step"], [written], name=f"scan {kind}")
    view = g.take(f"rows.{kind}", f"rows.{kind}", view=True)
    g.op("ReduceMax", [written], [f"max.{kind}"], keepdims=0)
    g.op("Cast", [f"max.{kind}"], [f"whole.{kind}"], to=TensorProto.INT64)
    g.op("Mul", [f"whole.{kind}", "accepted"], [f"picked.{kind}"], name=f"pick {kind}")
    present = g.give(f"present.{kind}", f"target.{kind}", 1, 1, *shape[1:], offset=at)
    g.op("Gather", [view, f"picked.{kind}"], [present], axis=1, name=f"commit {kind}")


def draft() -> Sketch:
    g = Sketch()
    best, _ = g.take("best", "best"), g.take("hidden", "hidden")
    accepted, length = g.take("accepted", "accepted"), g.take("length", "length")
    g.take("head.past.0.key", "head.0.key"), g.take("head.past.0.value", "head.0.value")
    g.op("Identity", [length], ["seqlens"])
    g.op("Cast", [accepted], ["total"], to=TensorProto.INT32)
    g.constant("qkv", np.zeros((1, 1, 16), np.float32))
    past = "head.past.0"
    for i in range(M):
        key = g.give(f"head.present.{i}.key", "head.0.key")
        value = g.give(f"head.present.{i}.value", "head.0.value")
        g.attend(i, past, key, value)
        past = f"head.present.{i}"
    g.op("Gather", ["unembed", best], ["rows"], axis=1)
    g.op("Identity", [best], [g.give("ids", "ids")])
    return g


def write_sample(folder: Path, provider: str = "cpu") -> Manifest:
    """Write the artifact into an empty `folder`."""
    weights: Weights = write_weights(
        folder / WEIGHTS, {name: from_array(array) for name, array in arrays().items()}
    )
    rows = {"prefill": None, "decode": 1, "verify": M}
    sketches = {name: target(count, provider) for name, count in rows.items()}
    sketches["draft"] = draft()
    buffers = dict(BUFFERS)
    if provider == "cuda":
        del buffers["target.0.conv"], buffers["target.0.recurrent"]
        buffers |= ON_CUDA
    graphs = {}
    for name, sketch in sketches.items():
        data = sketch.model(name).SerializeToString()
        (folder / f"{name}.onnx").write_bytes(data)
        graphs[name] = Graph(
            file=f"{name}.onnx",
            sha256=hashlib.sha256(data).hexdigest(),
            rows={"prefill": None, "decode": 1}.get(name, M),
            inputs=tuple(sketch.inputs),
            outputs=tuple(sketch.outputs),
            passes=(),
        )
    (folder / "tokenizer.json").write_text("{}")
    manifest = Manifest(
        producer="onnx-mtp 0",
        spec=SPEC,
        target=Target(provider, "float32"),
        k=K,
        capacity=CAPACITY,
        cache_rows=C,
        prefill_rows=PREFILL_ROWS,
        eos_token_ids=(0,),
        buffers=buffers,
        graphs=graphs,
        weights=weights,
        files={"tokenizer.json": hashlib.sha256(b"{}").hexdigest()},
        source=Source(kind="synthetic", name="sample", config_sha256="", left_out=()),
    )
    manifest.write(folder)
    return manifest


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest's JSON in place."""
    values = json.loads((folder / "manifest.json").read_text())
    change(values)
    (folder / "manifest.json").write_text(json.dumps(values))


def edit_graph(folder: Path, name: str, change: Callable[[onnx.GraphProto], object]) -> None:
    """Change a graph in place, and its digest in the manifest."""
    model = onnx.ModelProto.FromString((folder / f"{name}.onnx").read_bytes())
    change(model.graph)
    data = model.SerializeToString()
    (folder / f"{name}.onnx").write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    edit_manifest(folder, lambda values: values["graphs"][name].update(sha256=digest))


def node_named(graph: onnx.GraphProto, name: str) -> onnx.NodeProto:
    """The node of that name."""
    return next(node for node in graph.node if node.name == name)
