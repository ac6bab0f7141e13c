"""CausalPaddingPass: padding takes a real token, and nothing lets it reach another row."""

import numpy as np
import onnx_ir as ir
import pytest
from canonical import assert_complete, tiny
from golden import assert_graph, check, parse, run, unchanged
from onnx_ir.passes import PreconditionError

from passes.causal_padding import CausalPaddingPass
from passes.pin_shapes import PinShapesPass

M = 4
WEIGHTS = """<
    float[5,4] embed = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19},
    float[4] w = {1, 2, 3, 4}
>"""
BEFORE = f"""
g (int64[1,4] input_ids) => (float[1,4,5] logits, float[1,4,4] hidden) {WEIGHTS}
{{
    x = Gather<axis=0>(embed, input_ids)
    hidden = RMSNormalization<epsilon=0.1>(x, w)
    logits = com.microsoft.FusedMatMul<transB=1>(hidden, embed)
}}
"""
AFTER = f"""
g (int64[1,4] input_ids, int32[1] draft_count)
    => (float[1,4,5] logits, float[1,4,4] hidden) {WEIGHTS}
{{
    zero = Constant<value_ints = [0]>()
    first = Gather<axis=1>(input_ids, zero)
    row = Constant<value = int32[1,4] {{0, 1, 2, 3}}>()
    counts = LessOrEqual(row, draft_count)
    ids = Where(counts, input_ids, first)
    x = Gather<axis=0>(embed, ids)
    hidden = RMSNormalization<epsilon=0.1>(x, w)
    logits = com.microsoft.FusedMatMul<transB=1>(hidden, embed)
}}
"""


def test_rows_that_do_not_count_take_the_id_of_the_first():
    model, pass_ = parse(BEFORE), CausalPaddingPass(M)
    assert pass_(model).modified
    assert pass_.changes == 1
    assert_graph(model, AFTER)
    check(model)


def test_second_run_changes_nothing():
    model, pass_ = parse(BEFORE), CausalPaddingPass(M)
    pass_(model)
    assert unchanged(pass_, model)


@pytest.mark.parametrize("count", range(-1, M + 2))
def test_values_are_those_of_the_rows_that_count(count):
    model = parse(BEFORE)
    ids = np.array([[3, 1, 4, 2]])
    want = run(model, input_ids=ids)
    CausalPaddingPass(M)(model)
    kept = 1 + min(max(count, 0), M - 1)
    ids[:, kept:] = 2**40
    got = run(model, input_ids=ids, draft_count=np.array([count], np.int32))
    for name in ("logits", "hidden"):
        np.testing.assert_array_equal(got[name][:, :kept], want[name][:, :kept])
        for row in range(kept, M):
            np.testing.assert_array_equal(got[name][:, row], want[name][:, 0])


def graph(lines):
    """A verify of four rows around `lines`, which turn `x [1,4,4]` into `y`."""
    return parse(f"""
    g (int64[1,4] input_ids) => (float[1,4,5] logits, float[1,4,4] hidden)
    <
        float[5,4] embed = {{0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19}},
        float[4] w = {{1, 2, 3, 4}}, float[1,4,4] square = {{1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1}},
        float[4,4] four = {{1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1}},
        float[1,4,4] x, float[1,4,4] y, float[1,4,4] t, float[1,4,4] u, int64[1,4] i,
        int64[4] flat
    >
    {{
        x = Gather<axis=0>(embed, input_ids)
        {lines}
        hidden = RMSNormalization<epsilon=0.1>(y, w)
        logits = com.microsoft.FusedMatMul<transB=1>(hidden, embed)
    }}
    """)


FINE = {
    "elementwise with a table of one entry a row": "y = Add(x, square)",
    "a square split and put together": """
        n = Constant<value_ints = [2, 2]>()
        a, b = Split<axis=2>(x, n)
        y = Concat<axis=-1>(b, a)""",
    "rows with themselves": "t = Mul(x, x)  y = Sub(t, x)",
    "norm and residual": """
        y, m, d, s = com.microsoft.SkipSimplifiedLayerNormalization(x, square, w)""",
}


@pytest.mark.parametrize("lines", FINE.values(), ids=FINE)
def test_operators_that_work_row_by_row_pass(lines):
    model = graph(lines)
    # Shapes of what no inference knows are what the passes of this project write.
    for node in model.graph:
        for value in node.outputs:
            if value.shape is None:
                value.shape = model.graph.node(0).outputs[0].shape
    assert CausalPaddingPass(M)(model).modified


MIXING = {
    "Transpose": "y = Transpose<perm=[0, 2, 1]>(x)",
    "Softmax": "y = Softmax<axis=1>(x)",
    "CumSum": "o = Constant<value_int = 1>()  y = CumSum(x, o)",
    "MatMul": "y = MatMul(square, x)",
    "ReduceSum": "o = Constant<value_ints = [1]>()  s = ReduceSum(x, o)  y = Add(s, square)",
    "Concat": "two = Concat<axis=1>(x, x)  y = Identity(x)",
    "Concat ": "two = Concat<axis=-2>(square, x)  y = Identity(x)",
    "Split": """
        n = Constant<value_ints = [1, 3]>()
        a, b = Split<axis=1>(x, n)
        y = Concat<axis=1>(b, a)""",
    "RMSNormalization": "y = RMSNormalization<axis=1>(x, square)",
    "FusedMatMul": "y = com.microsoft.FusedMatMul(square, x)",
    "FusedMatMul ": "y = com.microsoft.FusedMatMul<transA=1>(x, square)",
    "FusedMatMul  ": "y = com.microsoft.FusedMatMul<transBatchA=1>(x, four)",
    "FusedMatMul   ": "y = com.microsoft.FusedMatMul(x, square)",
    "Gather": "o = Constant<value_ints = [3, 2, 1, 0]>()  y = Gather<axis=1>(x, o)",
    "Where": "c = Constant<value = bool[1] {1}>()  y = Where(c, x, square)",
    "If": """
        c = Constant<value = bool {1}>()
        y = If (c) <
            then_branch = a () => (float[1,4,4] p) { p = Transpose<perm=[0, 2, 1]>(x) },
            else_branch = b () => (float[1,4,4] q) { q = Identity(x) }
        >""",
}


@pytest.mark.parametrize(("name", "lines"), MIXING.items(), ids=MIXING)
def test_an_operator_that_may_mix_rows_is_refused_by_name(name, lines):
    model = graph(lines)
    op_type = name.strip()
    with pytest.raises(PreconditionError, match=f"^{op_type} .*may mix the rows of"):
        CausalPaddingPass(M)(model)
    assert [value.name for value in model.graph.inputs] == ["input_ids"]


def shaped(lines, inner):
    """A graph whose inner values have the types given, for rules that go by shape."""
    return parse(f"""
    g (int64[1,4] input_ids, float[?,4,4] more, int64[3] anything)
        => (float[1,4,4] hidden, float[1,4,4] logits)
    <float[4,4] embed = {{0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15}}, {inner}>
    {{ {lines} logits = Identity(hidden) }}
    """)


SQUARE = {
    "rows met by another axis as long": """
        x = Gather(embed, input_ids)
        s = Constant<value_ints = [4, 4]>()
        i = Cast<to=1>(input_ids)
        hidden = Add(x, i)""",
    "rows folded into another axis": """
        x = Gather(embed, input_ids)
        s = Constant<value_ints = [4, 1, 4]>()
        r = Reshape(x, s)
        hidden = Identity(x)""",
    "rows laid out flat": """
        x = Gather(embed, input_ids)
        s = Constant<value_ints = [16]>()
        f = Reshape(x, s)
        hidden = Identity(x)""",
    "rows of unknown number": """
        x = Gather(embed, input_ids)
        o = Add(x, more)
        p = Reshape(o, anything)
        hidden = Identity(x)""",
}
INNER = (
    "float[1,4,4] x, float[1,4] i, float[4,1,4] r, float[16] f, float[?,4,4] o, float[?,4,4] p"
)


@pytest.mark.parametrize("lines", SQUARE.values(), ids=SQUARE)
def test_axes_of_equal_length_are_not_taken_for_one_another(lines):
    model = shaped(lines, INNER)
    for node in model.graph:  # inference gives unknown sizes names of their own
        for value in node.outputs:
            if value.name in ("o", "p"):
                value.shape = ir.Shape([None, 4, 4])
    with pytest.raises(PreconditionError, match="may mix the rows of"):
        CausalPaddingPass(M)(model)


def test_a_norm_over_rows_that_a_gather_put_last_is_refused():
    """Counted from the wrong end the rows would be axis 0, then 1 below four axes."""
    model = parse("""
    g (int64[1,4] input_ids) => (float[1,4,1,4] hidden, float[1,4,1,4] logits)
    <
        float[4,5] table = {0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19},
        float[4] w = {1, 2, 3, 4}, float[1,4,1,4] more = {1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1}
    >
    {
        x = Gather<axis=-1>(table, input_ids)
        n = RMSNormalization<epsilon=0.1>(x, w)
        hidden = Add(n, more)
        logits = Identity(hidden)
    }
    """)
    with pytest.raises(PreconditionError, match=r"^RMSNormalization .*may mix the rows"):
        CausalPaddingPass(M)(model)


def test_an_embedding_that_is_gathered_by_column_has_its_rows_last():
    """Gather<axis=-1>(table [4,5], ids [1,4]) is [4,1,4]: rows are axis 2, not axis 0."""
    model = parse("""
    g (int64[1,4] input_ids) => (float[4,1,4] hidden, float[4,1,4] logits)
    <float[4,5] table = {0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19}>
    { hidden = Gather<axis=-1>(table, input_ids)  logits = Identity(hidden) }
    """)
    with pytest.raises(PreconditionError, match=r"logits does not have the rows .* on axis 1"):
        CausalPaddingPass(M)(model)


CONV = """
g (int64[1,4] input_ids, float[1,{state}] "past.0.conv")
    => (float[1,4,4] logits, float[1,4,4] hidden, float[1,{state}] "present.0.conv")
<
    float[5,4] embed = {{0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19}},
    float[4,1,3] taps = {{1,2,3,4,5,6,7,8,9,10,11,12}}, float[1,4,4] x, float[1,{state}] more
>
{{
    x = Gather(embed, input_ids)
    hidden, "present.0.conv" = com.microsoft.CausalConvWithState<ndim=1 {layout}>
        (x, taps, , "past.0.conv")
    {lines}
    logits = Identity(hidden)
}}
"""


def test_a_convolution_along_the_rows_is_causal():
    model = parse(CONV.format(state="2,4", layout=", channels_last=1", lines=""))
    assert CausalPaddingPass(M)(model).modified
    check(model)


def test_a_convolution_that_takes_rows_for_channels_is_refused():
    """Channels-first is the operator's default: its time is axis 2."""
    model = parse(CONV.format(state="4,2", layout="", lines=""))
    with pytest.raises(PreconditionError, match=r"^CausalConvWithState .*may mix the rows of"):
        CausalPaddingPass(M)(model)


def test_a_state_that_flows_back_into_the_graph_is_refused():
    lines = 'more = Neg("present.0.conv")'
    model = parse(CONV.format(state="2,4", layout=", channels_last=1", lines=lines))
    with pytest.raises(PreconditionError, match=r"^Neg .*reads 'present\.0\.conv', which pad"):
        CausalPaddingPass(M)(model)


ATTENTION = """
g (int64[1,4] input_ids, float[1,1,9,8] "past.0.key", float[1,1,9,8] "past.0.value",
   float[1,1,4,8] bias)
    => (float[1,4,8] logits, float[1,4,8] hidden,
        float[1,1,9,8] "present.0.key", float[1,1,9,8] "present.0.value")
<
    float[1,8] embed = {{0,1,2,3,4,5,6,7}}, int32[1] last = {{3}}, int32 total = {{9}},
    float[1,4,8] x, float[1,1,4,8] b
>
{{
    x = Gather(embed, input_ids)
    hidden, "present.0.key", "present.0.value" = com.microsoft.GroupQueryAttention
        <num_heads=1, kv_num_heads=1 {attributes}>
        (x, x, x, "past.0.key", "past.0.value", last, total {inputs})
    logits = Identity(hidden)
}}
"""


@pytest.mark.parametrize(
    ("attributes", "inputs", "fine"),
    [
        ("", "", True),
        (", causal=1", "", True),
        (", causal=0", "", False),
        ("", ", , , , x", False),
    ],
    ids=["default", "causal", "not causal", "rows in the bias"],
)
def test_attention_is_causal_unless_it_says_otherwise(attributes, inputs, fine):
    model = parse(ATTENTION.format(attributes=attributes, inputs=inputs))
    if fine:
        assert CausalPaddingPass(M)(model).modified
        return
    with pytest.raises(PreconditionError, match=r"^GroupQueryAttention .*may mix the rows"):
        CausalPaddingPass(M)(model)


@pytest.mark.parametrize("ids", ["int64[1,5]", "int64[1,S]", "int64[4]", "int64[2,4]"])
def test_ids_of_another_shape_are_refused(ids):
    model = parse(f"g ({ids} input_ids) => ({ids} logits) {{ logits = Identity(input_ids) }}")
    with pytest.raises(PreconditionError, match=r"padding needs \[1, 4\]. Pin S first"):
        CausalPaddingPass(M)(model)


def test_a_graph_without_ids_is_refused_with_what_it_has():
    model = parse("g (float[1,4] embeds) => (float[1,4] logits) { logits = Identity(embeds) }")
    with pytest.raises(PreconditionError, match="no input 'input_ids'; there are embeds"):
        CausalPaddingPass(M)(model)


def test_logits_that_do_not_come_from_the_ids_are_refused():
    model = parse("""
    g (int64[1,4] input_ids, float[1,4,8] x) => (float[1,4,8] logits, float[1,4,8] hidden)
    { logits = Identity(x)  hidden = Neg(x) }
    """)
    with pytest.raises(PreconditionError, match="logits does not have the rows of input_ids"):
        CausalPaddingPass(M)(model)


@pytest.mark.parametrize("rows", [2, 4, 8])
def test_the_canonical_target_is_proved_row_by_row(rows):
    for checkpoint in (tiny(), tiny(layer_types=("full_attention", "linear_attention") * 2)):
        graph = checkpoint.target_graph(20)
        PinShapesPass({"S": rows, "C": 20})(graph)
        assert CausalPaddingPass(rows)(graph).modified
        assert_complete(graph)
