"""One-node models over a grid of element types, and what ONNX Runtime says of each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import onnx
import onnxruntime as ort
from onnx import helper
from onnxruntime.capi import onnxruntime_pybind11_state as state

__all__ = ["GRID", "OneNode", "models", "verdict"]

REFUSALS = (state.Fail, state.InvalidGraph, state.NotImplemented, state.InvalidArgument)
ELEMENTS = {"float": 1, "float16": 10, "bfloat16": 16, "double": 11, "int64": 7, "bool": 9}
ELEMENTS |= {"int32": 6, "uint8": 2}
FLOATS = ("float", "float16", "bfloat16")


@dataclass(frozen=True)
class OneNode:
    """An op, its inputs as choices of types with a rank, and the ranks of its outputs."""

    op: str
    inputs: tuple[tuple[tuple[str, ...], int], ...]
    outputs: int = 1
    attributes: dict[str, Any] = field(default_factory=dict)
    domain: str = ""


def _plain(op: str, inputs: int, rank: int = 2, **attributes: Any) -> OneNode:
    return OneNode(op, ((FLOATS, rank),) * inputs, attributes=attributes)


I64 = (("int64",), 1)
MS = "com.microsoft"
GRID = (
    *(_plain(op, 2) for op in ("Add", "Mul", "Div", "MatMul", "Pow", "Less", "Equal", "Min")),
    *(_plain(op, 1) for op in ("Sqrt", "Exp", "Neg", "Sigmoid", "Softplus", "Softmax")),
    *(_plain(op, 1) for op in ("Identity", "Transpose", "ReduceSum", "ReduceMax", "Swish")),
    *(_plain(op, 1) for op in ("ReduceSumSquare", "LpNormalization", "Gelu", "Tanh", "Relu")),
    _plain("Sum", 3),
    _plain("Concat", 2, axis=0),
    _plain("Gemm", 3),
    _plain("Clip", 3, rank=0),
    _plain("LayerNormalization", 2),
    _plain("RMSNormalization", 2),
    OneNode("Add", ((("float", "int64", "bool"), 2),) * 2),
    OneNode("Where", ((("bool", "float"), 2), (FLOATS, 2), (FLOATS, 2))),
    OneNode("Pad", ((FLOATS, 1), I64, (FLOATS, 0))),
    OneNode("Gather", ((FLOATS, 2), (("int64", "int32", "float"), 1))),
    OneNode("Expand", ((FLOATS, 1), (("int64", "int32"), 1))),
    OneNode("Attention", ((FLOATS, 4), (FLOATS, 4), (FLOATS, 4), ((*FLOATS, "bool"), 2)),
            attributes={"is_causal": 1}),
    OneNode("Attention", ((FLOATS, 4), (FLOATS, 4), (FLOATS, 4), ((*FLOATS, "bool"), 2))),
    OneNode("SimplifiedLayerNormalization", ((FLOATS, 2), (FLOATS, 1))),
    OneNode("SkipSimplifiedLayerNormalization", ((FLOATS, 3), (FLOATS, 3), (FLOATS, 1)),
            domain=MS),
    OneNode("LinearAttention", ((FLOATS, 3),) * 3, 2,
            {"q_num_heads": 1, "kv_num_heads": 1, "update_rule": "linear"}, MS),
    OneNode("CausalConvWithState", ((FLOATS, 3), (FLOATS, 3)), 2, {"activation": "silu"}, MS),
    OneNode("GatedRMSNorm", ((FLOATS, 3), (FLOATS, 3), (FLOATS, 1)), domain=MS),
)  # fmt: skip


def models(case: OneNode) -> Iterator[tuple[str, onnx.ModelProto]]:
    """A model for each choice of input types, named by them; outputs are left untyped."""
    for kinds in itertools.product(*(choices for choices, _ in case.inputs)):
        inputs = [
            helper.make_tensor_value_info(f"x{i}", ELEMENTS[kind], [None] * rank)
            for i, (kind, (_, rank)) in enumerate(zip(kinds, case.inputs, strict=True))
        ]
        names = [f"y{i}" for i in range(case.outputs)]
        node = helper.make_node(
            case.op, [i.name for i in inputs], names, "n", domain=case.domain,
            **case.attributes,
        )  # fmt: skip
        outputs = [onnx.ValueInfoProto(name=name) for name in names]
        graph = helper.make_graph([node], "g", inputs, outputs)
        opsets = [helper.make_opsetid("", 24), helper.make_opsetid(MS, 1)]
        yield (
            f"{case.op}({', '.join(kinds)})",
            helper.make_model(graph, opset_imports=opsets, ir_version=11),
        )


def verdict(model: onnx.ModelProto) -> tuple[str, str]:
    """What ORT's CPU provider says: types, kernel, other or loads; and its message."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    except REFUSALS as e:
        text = str(e)
        if "NOT_IMPLEMENTED" in text:
            return "kernel", text
        typed = "Type Error" in text or "inconsistent type" in text or "invalid type" in text
        return ("types" if typed else "other"), text
    return "loads", ""
