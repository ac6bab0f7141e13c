"""FuseQkNormPass: the norms of queries and keys go into GroupQueryAttention."""

import pytest
from golden import assert_graph, check, parse, typed, unchanged

from passes.fuse_qk_norm import FuseQkNormPass

SIZES = "num_heads: int = 2, kv_num_heads: int = 1, scale: float = 0.25, do_rotary: int = 1"
INPUTS = """g (float[1,S,32] q, float[1,S,16] k, float[1,S,16] v, float[1,1,9,16] pk,
    float[1,1,9,16] pv, int32[1] last, int32 total, float[9,8] cos, float[9,8] sin,
    float[16] wq, float[16] wk)
    => (float[1,S,32] y, float[1,1,9,16] nk, float[1,1,9,16] nv)"""
BEFORE = f"""
{INPUTS} {{
    q4s = Constant<value_ints: ints = [0, 0, 2, 16]>()
    q4 = Reshape(q, q4s)
    qn = RMSNormalization<epsilon: float = 1e-6>(q4, wq)
    q3s = Constant<value_ints: ints = [0, 0, 32]>()
    q3 = Reshape(qn, q3s)
    k4s = Constant<value_ints: ints = [0, 0, 1, 16]>()
    k4 = Reshape(k, k4s)
    kn = RMSNormalization<epsilon: float = 1e-6>(k4, wk)
    k3s = Constant<value_ints: ints = [0, 0, 16]>()
    k3 = Reshape(kn, k3s)
    y, nk, nv = com.microsoft.GroupQueryAttention<{SIZES}>
        (q3, k3, v, pk, pv, last, total, cos, sin)
}}
"""
AFTER = f"""
{INPUTS} {{
    q4s = Constant<value_ints: ints = [0, 0, 2, 16]>()
    q3s = Constant<value_ints: ints = [0, 0, 32]>()
    k4s = Constant<value_ints: ints = [0, 0, 1, 16]>()
    k3s = Constant<value_ints: ints = [0, 0, 16]>()
    y, nk, nv = com.microsoft.GroupQueryAttention<{SIZES}, qk_norm_epsilon: float = 1e-6>
        (q, k, v, pk, pv, last, total, cos, sin, , , , , , wq, wk)
}}
"""


def test_norms_and_reshapes_become_two_inputs():
    model, pass_ = typed(BEFORE), FuseQkNormPass()
    assert pass_(model).modified
    assert pass_.changes == 1
    check(model)
    assert_graph(model, AFTER)


def test_a_second_run_changes_nothing():
    model, pass_ = typed(BEFORE), FuseQkNormPass()
    pass_(model)
    assert unchanged(pass_, model)


def test_a_reshape_that_others_read_too_stays():
    text = BEFORE.replace("nv)\n", "nv, float[1,S,2,16] n)\n", 1)
    text = text.replace("float[1,1,9,16] nv)", "float[1,1,9,16] nv, float[1,S,2,16] n)")
    text = text.replace("q3s = Const", "n = Neg(q4)\n    q3s = Const")
    model = typed(text)
    assert FuseQkNormPass()(model).modified
    check(model)
    assert [node.op_type for node in model.graph if node.op_type != "Constant"] == [
        "Reshape", "Neg", "GroupQueryAttention"
    ]  # fmt: skip


NEAR = {
    "two epsilons": BEFORE.replace("1e-6>(k4", "1e-5>(k4"),
    "an epsilon by default": BEFORE.replace("<epsilon: float = 1e-6>(k4", "(k4"),
    "a key without norm": BEFORE.replace(
        "kn = RMSNormalization<epsilon: float = 1e-6>(k4, wk)", "kn = Neg(k4)"),
    "a norm that is an output": BEFORE.replace(
        "float[1,1,9,16] nv)", "float[1,1,9,16] nv, float[1,S,2,16] qn)"),
    "normed queries that are an output": BEFORE.replace(
        "float[1,1,9,16] nv)", "float[1,1,9,16] nv, float[1,S,32] q3)"),
    "a norm that another reads": BEFORE.replace(
        "float[1,1,9,16] nv)", "float[1,1,9,16] nv, float[1,S,2,16] n)").replace(
        "q3s = Const", "n = Neg(qn)\n    q3s = Const"),
    "a weight of its own for each head": BEFORE.replace("float[16] wq", "float[2,16] wq"),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR)
def test_near_misses_stay(name):
    assert unchanged(FuseQkNormPass(), typed(NEAR[name]))


def test_an_operator_of_the_same_name_elsewhere_is_left():
    assert unchanged(FuseQkNormPass(), parse(BEFORE.replace("com.microsoft.", "elsewhere.")))
