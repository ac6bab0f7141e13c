"""Clean typed graphs of every class of multi-input op, and faults planted in them."""

from __future__ import annotations

from dataclasses import dataclass

import onnx
from hypothesis import strategies as st
from onnx import helper

__all__ = ["Planted", "planted_models"]

F32, F16 = 1, 10
value = helper.make_tensor_value_info
CONSTANTS = (
    helper.make_tensor("flag", 9, [], [True]),
    helper.make_tensor("first", 7, [1], [0]),
)
JOINS = ("Add", "Mul", "Sub", "Max", "MatMul", "Concat", "Where", "Gemm", "LayerNorm", "Sum")
INSIDE = ("graph", "branch", "function")


@dataclass(frozen=True)
class Planted:
    """A model and the names of the nodes that hold a fault."""

    model: onnx.ModelProto
    faulty: frozenset[str]


def _join(op: str, a: str, b: str, out: str, name: str) -> list[onnx.NodeProto]:
    """The node of one step; what it makes is as large as `a`."""
    if op == "Concat":
        both = helper.make_node("Concat", [a, b], [f"{out}_both"], name, axis=0)
        return [both, helper.make_node("Gather", [f"{out}_both", "first"], [out])]
    if op == "Where":
        return [helper.make_node("Where", ["flag", a, b], [out], name)]
    if op == "LayerNorm":
        return [helper.make_node("LayerNormalization", [a, b], [out], name)]
    if op in ("Sum", "Gemm"):
        return [helper.make_node(op, [a, b, a], [out], name)]
    return [helper.make_node(op, [a, b], [out], name)]


@st.composite
def planted_models(draw: st.DrawFn) -> Planted:
    """A chain of joins of one type, some inside of a branch or a function; faults in some."""
    kind = draw(st.sampled_from([F32, F16]))
    other = F16 if kind == F32 else F32
    steps = draw(
        st.lists(
            st.tuples(
                st.sampled_from(JOINS), st.sampled_from(INSIDE), st.booleans(),
                st.sampled_from(["none", "cast", "constant"]),
            ),
            min_size=1, max_size=8,
        )
    )  # fmt: skip
    nodes, stored, functions, faulty = [], list(CONSTANTS), [], []
    last = "x"
    for i, (op, inside, first, fault) in enumerate(steps):
        name, second = f"n{i}", f"w{i}"
        element = other if fault == "constant" else kind
        stored.append(helper.make_tensor(second, element, [1, 1], [0.5]))
        left, made = last, []
        if fault == "cast":
            made = [helper.make_node("Cast", [last], [f"c{i}"], f"cast{i}", to=other)]
            left = f"c{i}"
        pair = (left, second) if first else (second, left)
        if op == "LayerNorm":
            pair = (left, second)
        if fault != "none":
            faulty.append(name)
        if inside == "function":
            body = _join(op, "a", "b", "out", name)
            own = [helper.make_node("Constant", [], [c.name], value=c) for c in CONSTANTS]
            functions.append(
                helper.make_function("own", f"F{i}", ["a", "b"], ["out"], [*own, *body],
                                     [helper.make_opsetid("", 24)])
            )  # fmt: skip
            nodes += [*made, helper.make_node("F" + str(i), [*pair], [f"v{i}"], domain="own")]
        elif inside == "branch":
            branches = {}
            for side in ("then_branch", "else_branch"):
                inner = _join(op, *pair, f"{side}{i}", name)
                if side == "else_branch":
                    inner = [helper.make_node("Identity", [last], [f"{side}{i}"])]
                branches[side] = helper.make_graph(
                    inner, side, [], [value(f"{side}{i}", kind, None)]
                )
            nodes += [*made, helper.make_node("If", ["flag"], [f"v{i}"], f"if{i}", **branches)]
        else:
            nodes += [*made, *_join(op, *pair, f"v{i}", name)]
        last = f"v{i}"
    nodes.append(helper.make_node("Identity", [last], ["y"], "end"))
    declared = [value(f"v{i}", kind, None) for i in range(len(steps))]  # as exporters do
    graph = helper.make_graph(
        nodes, "g", [value("x", kind, [None, None])], [value("y", kind, None)], stored,
        value_info=declared,
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("own", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11, functions=functions)
    return Planted(model, frozenset(faulty))
