"""PinShapesPass: named sizes become numbers, and what only computed them goes."""

import numpy as np
import onnx_ir as ir
import pytest
from canonical import assert_complete, tiny
from golden import assert_graph, check, parse, run, unchanged

from passes.pin_shapes import PinShapesPass

BEFORE = """
g (float[1,S,8] x, float[1,2,C,4] cache, int32[1] past)
    => (float[1,S,8] y, int32[1] last, int32 total)
{
    rows = Shape<start=1, end=2>(x)
    rows32 = Cast<to=6>(rows)
    last = Add(past, rows32)
    y = Sigmoid(x)
    sizes = Shape<start=2, end=3>(cache)
    sizes32 = Cast<to=6>(sizes)
    scalar = Squeeze(sizes32)
    total = Add(scalar, scalar)
}
"""
AFTER = """
g (float[1,3,8] x, float[1,2,9,4] cache, int32[1] past)
    => (float[1,3,8] y, int32[1] last, int32 total)
{
    rows32 = Constant<value = int32[1] {3}>()
    last = Add(past, rows32)
    y = Sigmoid(x)
    scalar = Constant<value = int32 {9}>()
    total = Add(scalar, scalar)
}
"""


def test_named_sizes_become_numbers_and_their_arithmetic_a_constant():
    model = parse(BEFORE)
    check(model)
    pass_ = PinShapesPass({"S": 3, "C": 9})
    assert pass_(model).modified
    assert pass_.changes == 8  # x, cache and y; five nodes
    assert_graph(model, AFTER)
    check(model)


def test_second_run_changes_nothing():
    model, pass_ = parse(BEFORE), PinShapesPass({"S": 3, "C": 9})
    pass_(model)
    assert unchanged(pass_, model)


def test_values_are_those_of_the_graph_with_named_sizes():
    model = parse(BEFORE)
    feeds = {
        "x": np.arange(24, dtype=np.float32).reshape(1, 3, 8),
        "cache": np.zeros((1, 2, 9, 4), np.float32),
        "past": np.array([5], np.int32),
    }
    before = run(model, **feeds)
    PinShapesPass({"S": 3, "C": 9})(model)
    after = run(model, **feeds)
    assert before["last"] == 8
    assert before["total"] == 18
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value)


def test_one_name_may_stay_open():
    model = parse(BEFORE)
    PinShapesPass({"C": 9})(model)
    check(model)
    assert [node.op_type for node in model.graph] == [
        "Shape", "Cast", "Add", "Sigmoid", "Constant", "Add"
    ]  # fmt: skip
    assert str(model.graph.inputs[0].shape) == "[1,S,8]"


def test_a_name_that_is_not_there_changes_nothing():
    assert unchanged(PinShapesPass({"N": 4}), parse(BEFORE))


@pytest.mark.parametrize(
    "lines",
    [
        "t = Cast<to=6>(w)  y = Identity(t)",  # a weight is no shape arithmetic
        "t = Cast<to=6>(x)  y = Identity(t)",  # data
        "c = Constant<value = float[2] {1.5, 2.5}>()  t = Cast<to=6>(c)  y = Identity(t)",
    ],
)
def test_what_is_no_shape_arithmetic_is_left(lines):
    text = "g (float[2] x) => (int32[2] y) <float[2] w = {1, 2}> {" + lines + "}"
    assert unchanged(PinShapesPass({"S": 3}), parse(text))


def test_a_weight_is_never_read():
    def read():
        raise AssertionError("a weight was read")

    model = parse("g (float[2] x) => (int32[2] y) <int64[2] w = {1, 2}> { y = Cast<to=6>(w) }")
    weight = model.graph.initializers["w"]
    weight.const_value = ir.LazyTensor(
        read, dtype=ir.DataType.INT64, shape=ir.Shape([2]), name="w"
    )
    assert not PinShapesPass({"S": 3})(model).modified


@pytest.mark.parametrize(
    ("attributes", "size"),
    [("", [1, 3, 8]), ("<start=-2>", [3, 8]), ("<end=-1>", [1, 3]), ("<start=2, end=1>", [])],
)
def test_start_and_end_count_as_onnx_counts(attributes, size):
    text = f"g (float[1,S,8] x) => (int64[N] y) {{ n = Shape{attributes}(x)  y = Neg(n) }}"
    model = parse(text)
    PinShapesPass({"S": 3})(model)
    assert_graph(
        model,
        f"g (float[1,3,8] x) => (int64[N] y) {{ n = Constant<value = int64[{len(size)}] "
        f"{{{', '.join(map(str, size))}}}>()  y = Neg(n) }}",
    )
    x = np.zeros((1, 3, 8), np.float32)
    np.testing.assert_array_equal(run(model, x=x)["y"], -np.array(size, np.int64))


def test_a_size_that_is_an_output_is_given_by_the_constant():
    text = "g (float[1,S] x) => (int64[2] n, int32[2] m) { n = Shape(x)  m = Cast<to=6>(n) }"
    model = parse(text)
    PinShapesPass({"S": 3})(model)
    assert_graph(
        model,
        """g (float[1,3] x) => (int64[2] n, int32[2] m) {
            n = Constant<value = int64[2] {1, 3}>()
            m = Constant<value = int32[2] {1, 3}>()
        }""",
    )
    check(model)


def test_the_body_of_a_control_flow_node_is_pinned_too():
    model = parse("""
    g (float[1,S] x, bool c) => (float[1,S] y) {
        y = If (c) <
            then_branch = a () => (float[1,S] t) {
                n = Shape(x)
                m = Cast<to=1>(n)
                k = Cast<to=6>(n)
                f = Cast<to=1>(k)
                g = Mul(f, m)
                t = Add(x, x)
            },
            else_branch = b () => (float[1,S] u) { u = Neg(x) }
        >
    }
    """)
    pass_ = PinShapesPass({"S": 3})
    pass_(model)
    check(model)
    assert unchanged(pass_, model)
    inner = list(model.graph.all_nodes())
    assert "Shape" not in [node.op_type for node in inner]
    for node in inner:
        for value in node.outputs:
            assert value.shape is None or "S" not in str(value.shape)


def test_the_inputs_of_a_loop_body_are_pinned_too():
    model = parse("""
    g (float[1,S] x, int64 trips, bool go) => (float[1,S] y) {
        y = Loop(trips, go, x) <
            body = b (int64 i, bool c, float[1,S] v) => (bool d, float[1,S] w) {
                d = Identity(c)
                w = Add(v, v)
            }
        >
    }
    """)
    PinShapesPass({"S": 3})(model)
    check(model)
    (body,) = model.graph.subgraphs()
    assert body.inputs[2].shape == body.outputs[1].shape == [1, 3]


@pytest.mark.parametrize("size", [0, -1])
def test_a_size_below_one_is_refused(size):
    with pytest.raises(ValueError, match=f"dimension 'S' cannot be pinned to {size}"):
        PinShapesPass({"S": size})


def test_canonical_graphs_keep_types_names_and_order():
    for graph in (tiny().target_graph(20), tiny().head_graph(20)):
        pass_ = PinShapesPass({"S": 4, "C": 20})
        pass_(graph)
        assert_complete(graph)
        assert unchanged(pass_, graph)
        left = {node.op_type for node in graph.graph}
        assert not left & {"Shape", "Cast", "Squeeze"}
        before = [node.name for node in graph.graph]
        graph.graph.sort()
        assert [node.name for node in graph.graph] == before
