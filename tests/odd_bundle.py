"""A bundle in forms that neither fixture has, of sizes that no two of are alike.

Sums and norms apart, matrices ``[out, in]`` behind a Transpose or with transB, one product for
gate and up, one for q, gate, k and v of attention, sigmoid as the output gate, an embedding
that is the LM head. The graph is well formed; it is made to be read, not run.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import helper

__all__ = ["SIZES", "write_odd_bundle"]

SIZES = {
    "D": 40, "I": 56, "V": 72, "H": 6, "Hkv": 3, "hd": 32, "Hk": 2, "Hv": 4, "dk": 16,
    "dv": 24, "K": 5, "theta": 5e5, "eps": 1e-5,
}  # fmt: skip


class _Writer:
    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.stored: dict[str, np.ndarray] = {}
        self.rng = np.random.default_rng(11)
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []

    def put(self, op: str, *inputs: str, outputs: int = 1, **attributes) -> str | list[str]:
        names = [f"t{len(self.nodes)}_{i}" for i in range(outputs)]
        contrib = {
            "LinearAttention",
            "CausalConvWithState",
            "FusedMatMul",
            "GroupQueryAttention",
        }
        domain = "com.microsoft" if op in contrib else ""
        self.nodes.append(
            helper.make_node(op, list(inputs), names, domain=domain, **attributes)
        )
        return names[0] if outputs == 1 else names

    def weight(self, name: str, *shape: int, scale: float = 0.1) -> str:
        values = self.rng.standard_normal(shape) * scale
        self.stored[name] = values.astype(np.float32)
        return name

    def constant(self, *numbers: int) -> str:
        name = f"c{'_'.join(map(str, numbers))}"
        self.stored[name] = np.array(numbers, np.int64)
        return name

    def scalar(self, number: float) -> str:
        self.stored[f"s{number}"] = np.array(number, np.float32)
        return f"s{number}"

    def linear(self, x: str, name: str, rows: int, width: int) -> str:
        turned = self.put("Transpose", self.weight(name, rows, width), perm=[1, 0])
        return self.put("MatMul", x, turned)

    def port(self, past: str, present: str, made: str, *shape: int | str) -> None:
        self.inputs.append(helper.make_tensor_value_info(past, 1, shape))
        self.put("Identity", made)
        self.nodes[-1].output[0] = present
        self.outputs.append(helper.make_tensor_value_info(present, 1, shape))


def write_odd_bundle(folder: Path) -> dict[str, np.ndarray]:
    """Write it; gives the weights by canonical name."""
    s, w = SIZES, _Writer()
    embed = w.weight("embed", s["V"], s["D"])
    w.inputs.append(helper.make_tensor_value_info("input_ids", 7, [1, "S"]))
    w.inputs.append(helper.make_tensor_value_info("attention_mask", 7, [1, "P + S"]))
    stream = w.put("Gather", embed, "input_ids")
    for i, mixer in enumerate((_delta_net, _attention)):
        normed = _norm(w, stream, f"layers.{i}.input_norm", s["D"])
        stream = w.put("Add", mixer(w, normed, i), stream)
        normed = _norm(w, stream, f"layers.{i}.post_norm", s["D"])
        both = w.put(
            "FusedMatMul", normed, w.weight(f"{i}.both", 2 * s["I"], s["D"]), transB=1
        )
        up, gate = w.put("Split", both, w.constant(s["I"], s["I"]), outputs=2, axis=-1)
        product = w.put("Mul", up, w.put("Mul", w.put("Sigmoid", gate), gate))
        down = w.linear(product, f"layers.{i}.mlp.down", s["D"], s["I"])
        stream = w.put("Add", stream, down)
    hidden = _norm(w, stream, "norm", s["D"])
    w.put("MatMul", hidden, w.put("Transpose", embed, perm=[1, 0]))
    w.nodes[-1].output[0] = "logits"
    w.outputs.append(helper.make_tensor_value_info("logits", 1, [1, "S", s["V"]]))
    graph = helper.make_graph(
        w.nodes, "odd", w.inputs, w.outputs,
        [onnx.numpy_helper.from_array(array, name) for name, array in w.stored.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
    folder.mkdir()
    onnx.save(helper.make_model(graph, opset_imports=opsets), folder / "model.onnx")
    return _canonical(w.stored)


def _norm(w: _Writer, x: str, name: str, size: int) -> str:
    weight = w.weight(name, size)
    one_plus = w.put("Add", w.scalar(1.0), weight)
    return w.put("RMSNormalization", x, one_plus, epsilon=SIZES["eps"])


def _delta_net(w: _Writer, x: str, i: int) -> str:
    s, n = SIZES, f"layers.{i}.gdn"
    keys, values = s["Hk"] * s["dk"], s["Hv"] * s["dv"]
    conv_dim = 2 * keys + values
    qkv = w.linear(x, f"{n}.qkv", conv_dim, s["D"])
    mixed, conv = w.put(
        "CausalConvWithState", qkv, w.weight(f"{n}.conv", conv_dim, 1, s["K"]), "",
        f"past.{i}.conv", outputs=2, activation="silu", channels_last=1,
    )  # fmt: skip
    w.port(f"past.{i}.conv", f"present.{i}.conv", conv, 1, s["K"] - 1, conv_dim)
    q, k, v = w.put("Split", mixed, w.constant(keys, keys, values), outputs=3, axis=2)
    units = []
    for part in (q, k):
        heads = w.put("Reshape", part, w.constant(0, 0, s["Hk"], s["dk"]))
        squares = w.put("ReduceSumSquare", heads, w.constant(-1))
        root = w.put("Sqrt", w.put("Add", squares, w.scalar(1e-6)))
        units.append(w.put("Reshape", w.put("Div", heads, root), w.constant(0, 0, keys)))
    a = w.linear(x, f"{n}.a", s["Hv"], s["D"])
    soft = w.put("Softplus", w.put("Add", w.weight(f"{n}.dt_bias", s["Hv"]), a))
    slope = w.put("Neg", w.put("Exp", w.weight(f"{n}.decay_scale", s["Hv"])))
    beta = w.put("Sigmoid", w.linear(x, f"{n}.b", s["Hv"], s["D"]))
    read, state = w.put(
        "LinearAttention", *units, v, f"past.{i}.recurrent", w.put("Mul", soft, slope), beta,
        outputs=2, q_num_heads=s["Hk"], kv_num_heads=s["Hv"],
    )  # fmt: skip
    shape = (1, s["Hv"], s["dk"], s["dv"])
    w.port(f"past.{i}.recurrent", f"present.{i}.recurrent", state, *shape)
    rows = w.put("Reshape", read, w.constant(-1, s["dv"]))
    norm = w.put("RMSNormalization", rows, w.weight(f"{n}.norm", s["dv"]), epsilon=s["eps"])
    z = w.put("Reshape", w.linear(x, f"{n}.z", values, s["D"]), w.constant(-1, s["dv"]))
    gated = w.put("Mul", w.put("Sigmoid", z), norm)
    flat = w.put("Reshape", gated, w.constant(0, -1, values))
    return w.linear(flat, f"{n}.out", s["D"], values)


def _attention(w: _Writer, x: str, i: int) -> str:
    s, n = SIZES, f"layers.{i}.attention"
    heads, kv = s["H"] * s["hd"], s["Hkv"] * s["hd"]
    packed = w.put(
        "FusedMatMul", x, w.weight(f"{i}.qgkv", 2 * heads + 2 * kv, s["D"]), transB=1
    )
    sizes = w.constant(heads, kv, kv, heads)
    q, k, v, gate = w.put("Split", packed, sizes, outputs=4, axis=-1)
    normed = []
    for part, name, count in ((q, "q_norm", s["H"]), (k, "k_norm", s["Hkv"])):
        split = w.put("Reshape", part, w.constant(0, 0, count, s["hd"]))
        norm = _norm(w, split, f"{n}.{name}", s["hd"])
        normed.append(w.put("Reshape", norm, w.constant(0, 0, -1)))
    angle = np.arange(128)[:, None] * s["theta"] ** -(np.arange(8) / 8)
    w.stored["cos"] = np.cos(angle).astype(np.float32)
    w.stored["sin"] = np.sin(angle).astype(np.float32)
    total = w.put("ReduceSum", "attention_mask", w.constant(1), keepdims=0)
    last = w.put("Cast", w.put("Sub", total, w.constant(1)), to=6)
    length = w.put("Squeeze", w.put("Shape", "attention_mask", start=1))
    attended, key, value = w.put(
        "GroupQueryAttention", *normed, v, f"past.{i}.key", f"past.{i}.value", last,
        w.put("Cast", length, to=6), "cos", "sin", outputs=3, num_heads=s["H"],
        kv_num_heads=s["Hkv"], do_rotary=1,
    )  # fmt: skip
    for name, made in (("key", key), ("value", value)):
        shape = (1, s["Hkv"], "P", s["hd"])
        w.port(f"past.{i}.{name}", f"present.{i}.{name}", made, *shape)
    gated = w.put("Mul", w.put("Sigmoid", gate), attended)
    return w.linear(gated, f"{n}.o", s["D"], heads)


def _canonical(stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    s, found = SIZES, {}
    heads, kv = s["H"] * s["hd"], s["Hkv"] * s["hd"]
    for name, array in stored.items():
        if name.endswith("both"):
            layer = f"layers.{name[0]}.mlp"
            found[f"{layer}.up"], found[f"{layer}.gate"] = np.split(array, 2)
        elif name.endswith("qgkv"):
            parts = np.split(array, np.cumsum([heads, kv, kv]))
            for part, rows in zip(("q", "k", "v", "gate"), parts, strict=True):
                found[f"layers.{name[0]}.attention.{part}"] = rows
        elif name.endswith("decay_scale"):
            found[name] = -np.exp(array)
        elif name.endswith("norm") and not name.endswith("gdn.norm"):
            found[name] = np.float32(1) + array
        elif name.startswith("layers.") or name == "embed":
            found[name] = array
    return found
