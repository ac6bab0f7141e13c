"""MergeProjectionsPass: one matrix for those that read the same rows."""

import numpy as np
import pytest
from golden import assert_graph, check, parse, plain, run, typed, unchanged, with_weights

from passes.merge_projections import MergeProjectionsPass

RNG = np.random.default_rng(3)
SHAPES = {"q": (6, 8), "k": (3, 8), "v": (5, 8)}
WEIGHTS = {
    name: RNG.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()
}
PRODUCT = "com.microsoft.FusedMatMul<transB: int = 1>"
BEFORE = f"""
g (float[1,S,8] x, float[6,8] q, float[3,8] k, float[5,8] v)
    => (float[1,S,6] a, float[1,S,3] b, float[1,S,5] c) {{
    a0 = {PRODUCT}(x, q)
    b0 = {PRODUCT}(x, k)
    c0 = {PRODUCT}(x, v)
    a = Neg(a0)
    b = Neg(b0)
    c = Neg(c0)
}}
"""
AFTER = f"""
g (float[1,S,8] x, float[14,8] _q_k_v) => (float[1,S,6] a, float[1,S,3] b, float[1,S,5] c) {{
    wide = {PRODUCT}(x, _q_k_v)
    sizes = Constant<value_ints: ints = [6, 3, 5]>()
    a0, b0, c0 = Split<axis: int = 2>(wide, sizes)
    a = Neg(a0)
    b = Neg(b0)
    c = Neg(c0)
}}
"""


def made(text=BEFORE):
    return with_weights(typed(text), **WEIGHTS)


def test_three_projections_become_one_and_a_split():
    model, pass_ = made(), MergeProjectionsPass(100)
    assert pass_(model).modified
    assert pass_.changes == 1
    check(model)
    assert_graph(plain(model), AFTER)


def test_values_are_those_of_before():
    x = RNG.standard_normal((1, 4, 8)).astype(np.float32)
    model = made()
    MergeProjectionsPass(100)(model)
    got = run(model, x=x)
    for name, weight in zip("abc", WEIGHTS.values(), strict=True):
        np.testing.assert_allclose(got[name], -(x @ weight.T), rtol=1e-5, atol=1e-5)


def test_a_second_run_changes_nothing():
    model, pass_ = made(), MergeProjectionsPass(100)
    pass_(model)
    assert unchanged(pass_, model)


def test_rows_of_the_merged_weight_are_streamed_one_matrix_after_the_other():
    model = made()
    MergeProjectionsPass(100)(model)
    (weight,) = (value.const_value for value in model.graph.initializers.values())
    assert [block.tobytes() for block in weight.blocks()] == [
        array.tobytes() for array in WEIGHTS.values()
    ]


@pytest.mark.parametrize(
    ("pass_", "left"),
    [(MergeProjectionsPass(6), {"q"}), (MergeProjectionsPass(100, "k"), {"k"})],
    ids=["large enough alone", "kept apart by name"],
)
def test_one_that_is_left_does_not_keep_the_others_from_merging(pass_, left):
    model = made()
    pass_(model)
    assert pass_.changes == 1
    joined = "." + "|".join(name for name in WEIGHTS if name not in left)
    assert set(model.graph.initializers) == {joined, *left}


@pytest.mark.parametrize("pass_", [MergeProjectionsPass(4), MergeProjectionsPass(100, "")])
def test_one_alone_is_left(pass_):
    assert unchanged(pass_, made())


NEAR = {
    "scaled": BEFORE.replace("transB: int = 1", "transB: int = 1, alpha: float = 0.5"),
    "other rows each": BEFORE.replace("(x, k)", "(y, k)")
    .replace("(x, v)", "(z, v)")
    .replace("float[1,S,8] x", "float[1,S,8] x, float[1,S,8] y, float[1,S,8] z"),
    "rows without a batch axis": BEFORE.replace("float[1,S,", "float[S,"),
}


@pytest.mark.parametrize("name", NEAR)
def test_near_misses_stay(name):
    assert unchanged(MergeProjectionsPass(100), made(NEAR[name]))


def test_an_operator_of_the_same_name_elsewhere_is_left():
    model = with_weights(parse(BEFORE.replace("com.microsoft.", "elsewhere.")), **WEIGHTS)
    assert unchanged(MergeProjectionsPass(100), model)


def test_a_weight_that_another_node_reads_too_stays():
    text = BEFORE.replace("float[1,S,5] c)", "float[1,S,5] c, float[6,8] n)")
    text = text.replace("a = Neg(a0)", "a = Neg(a0)\n    n = Neg(q)")
    model, pass_ = made(text), MergeProjectionsPass(100)
    pass_(model)
    assert set(model.graph.initializers) == {"q", ".k|v"}


def test_a_product_that_is_an_output_stays():
    text = f"""
    g (float[1,S,8] x, float[6,8] q, float[3,8] k, float[5,8] v)
        => (float[1,S,6] a, float[1,S,3] b, float[1,S,5] c) {{
        a = {PRODUCT}(x, q)
        b = {PRODUCT}(x, k)
        c = {PRODUCT}(x, v)
    }}
    """
    assert unchanged(MergeProjectionsPass(100), made(text))


def test_weights_that_are_no_initializers_stay():
    assert unchanged(MergeProjectionsPass(100), typed(BEFORE))
