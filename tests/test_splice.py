"""splice: a copy of one graph's nodes inside another."""

import numpy as np
import onnx_ir as ir
import pytest
from golden import assert_graph, check, parse, run

from passes.splice import splice

SOURCE = """
s (float[2] a) => (float[2] b) <float[2] w = {1, 2}, float[2] own = {3, 4}> {
    t = Add(a, w)
    b = Mul(t, own)
}
"""
INTO = "g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { t = Neg(x)  y = Add(t, w) }"
JOINED = """
g (float[2] x) => (float[2] y, float[2] z) <float[2] w = {1, 2}, float[2] own = {3, 4}> {
    t = Neg(x)
    y = Add(t, w)
    "s/t" = Add(t, w)
    z = Mul("s/t", own)
}
"""


def value_of(model, name):
    return next(v for n in model.graph for v in n.outputs if v.name == name)


def test_nodes_are_copied_and_weights_shared_by_name():
    source, into = parse(SOURCE), parse(INTO)
    outputs = splice(source.graph, into.graph, {"a": value_of(into, "t")}, prefix="s/")
    assert outputs["b"].name == "s/b"
    outputs["b"].name = "z"
    into.graph.outputs.append(outputs["b"])
    assert_graph(into, JOINED)
    assert_graph(source, SOURCE)  # left as it was
    x = np.array([5, 6], np.float32)
    got = run(into, x=x)
    np.testing.assert_array_equal(got["y"], [-4, -4])
    np.testing.assert_array_equal(got["z"], [-12, -16])
    check(into)


def test_two_copies_stand_side_by_side():
    source, into = parse(SOURCE), parse(INTO)
    first = splice(source.graph, into.graph, {"a": value_of(into, "t")}, prefix="1/")
    splice(source.graph, into.graph, {"a": first["b"]}, prefix="2/")
    names = [v.name for n in into.graph for v in n.outputs]
    assert names == ["t", "y", "1/t", "1/b", "2/t", "2/b"]
    check(into)


def test_an_output_that_is_an_input_is_what_it_was_tied_to():
    source = parse("s (float[2] a) => (float[2] a, float[2] b) { b = Neg(a) }")
    into = parse(INTO)
    tie = value_of(into, "t")
    assert splice(source.graph, into.graph, {"a": tie}, prefix="s/")["a"] is tie


def test_names_inside_control_flow_are_prefixed_too():
    source = parse("""
    s (float[2] a, bool c) => (float[2] b) {
        b = If(c) <
            then_branch = p () => (float[2] q) { t = Neg(a)  q = Neg(t) },
            else_branch = r () => (float[2] u) { u = Identity(a) }
        >
    }
    """)
    into = parse(INTO.replace("float[2] x", "float[2] x, bool c"))
    ties = {"a": value_of(into, "t"), "c": into.graph.inputs[1]}
    outputs = splice(source.graph, into.graph, ties, prefix="s/")
    into.graph.outputs.append(outputs["b"])
    names = [v.name for n in into.graph.all_nodes() for v in n.outputs]
    assert len(names) == len(set(names)) == 6
    got = run(into, x=np.array([5, 6], np.float32), c=np.array(True))
    np.testing.assert_array_equal(got["s/b"], [-5, -6])


CLASHES = {
    "untied": (SOURCE, {}, "inputs of 's' left untied: a"),
    "type": (
        SOURCE.replace("float[2] a", "float16[2] a"),
        None,
        r"'a' of 's' is FLOAT16\[2\]",
    ),
    "shape": (SOURCE.replace("float[2] a", "float[1,2] a"), None, r"is FLOAT\[1,2\]; it cann"),
    "weight shape": (
        SOURCE.replace("float[2] w = {1, 2}", "float[1] w = {1}"),
        None,
        r"initializer 'w' is FLOAT\[2\] in one graph and FLOAT\[1\] in the other",
    ),
    "weight values": (
        SOURCE.replace("{1, 2}", "{1, 7}"),
        None,
        "initializer 'w' has other values",
    ),
}


@pytest.mark.parametrize(("text", "ties", "said"), CLASHES.values(), ids=CLASHES)
def test_what_does_not_fit_is_refused_before_anything_changes(text, ties, said):
    source, into = parse(text), parse(INTO)
    ties = {"a": value_of(into, "t")} if ties is None else ties
    with pytest.raises(ValueError, match=said):
        splice(source.graph, into.graph, ties, prefix="s/")
    assert_graph(into, INTO)


def test_a_prefix_that_is_taken_is_refused():
    source, into = parse(SOURCE), parse(INTO)
    splice(source.graph, into.graph, {"a": value_of(into, "t")}, prefix="s/")
    with pytest.raises(
        ValueError, match="has a value 's/t' already; give the copy of 's' ano"
    ):
        splice(source.graph, into.graph, {"a": value_of(into, "t")}, prefix="s/")


def test_weights_that_lie_in_files_are_not_read_to_compare_them():
    def read():
        raise AssertionError("a weight was read")

    source, into = parse(SOURCE), parse(INTO)
    for model in (source, into):
        model.graph.initializers["w"].const_value = ir.LazyTensor(
            read, dtype=ir.DataType.FLOAT, shape=ir.Shape([2]), name="w"
        )
    splice(source.graph, into.graph, {"a": value_of(into, "t")}, prefix="s/")
