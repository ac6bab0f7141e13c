"""HoistCastsPass: one cast before a split."""

import numpy as np
import pytest
from golden import assert_graph, check, parse, run, unchanged

from passes.hoist_casts import HoistCastsPass

BEFORE = """
g (float16[1,S,5] x) => (float[1,S,3] y, float[1,S,2] z) {
    sizes = Constant<value_ints: ints = [3, 2]>()
    a, b = Split<axis: int = 2>(x, sizes)
    a32 = Cast<to: int = 1>(a)
    b32 = Cast<to: int = 1>(b)
    y = Neg(a32)
    z = Neg(b32)
}
"""
AFTER = """
g (float16[1,S,5] x) => (float[1,S,3] y, float[1,S,2] z) {
    sizes = Constant<value_ints: ints = [3, 2]>()
    x32 = Cast<to: int = 1>(x)
    a, b = Split<axis: int = 2>(x32, sizes)
    y = Neg(a)
    z = Neg(b)
}
"""


def test_one_cast_takes_the_place_of_one_behind_each_part():
    model, pass_ = parse(BEFORE), HoistCastsPass()
    assert pass_(model).modified
    assert pass_.changes == 1
    check(model)
    assert_graph(model, AFTER)


def test_values_are_the_same_bit_for_bit():
    x = np.random.default_rng(0).standard_normal((1, 4, 5)).astype(np.float16)
    before, after = parse(BEFORE), parse(BEFORE)
    HoistCastsPass()(after)
    want, got = run(before, x=x), run(after, x=x)
    assert all(got[name].tobytes() == want[name].tobytes() for name in want)


def test_a_second_run_changes_nothing():
    model, pass_ = parse(BEFORE), HoistCastsPass()
    pass_(model)
    assert unchanged(pass_, model)


NEAR = {
    "another type": BEFORE.replace("b32 = Cast<to: int = 1>", "b32 = Cast<to: int = 11>")
    .replace("float[1,S,2] z", "double[1,S,2] z"),
    "a part that is read as it is": BEFORE.replace("z = Neg(b32)", "z0 = Cast<to: int = 1>(b)")
    .replace("b32 = Cast<to: int = 1>(b)", "b32 = Neg(b)\n    z = Cast<to: int = 1>(b32)"),
    "a part that is read twice": BEFORE.replace("z = N", "c = Neg(b)\n    z = N"),
    "a part that is an output": BEFORE.replace(
        "float[1,S,2] z)", "float[1,S,2] z, float16[1,S,2] b)"
    ),
    "a part that nobody reads": BEFORE.replace("b32 = Cast<to: int = 1>(b)", "")
    .replace("z = Neg(b32)", "z = Identity(w)")
    .replace("float16[1,S,5] x", "float16[1,S,5] x, float[1,S,2] w"),
    "a cast that is an output": BEFORE.replace(
        "float[1,S,2] z)", "float[1,S,2] z, float[1,S,2] b32)"
    ),
    "a split of another domain": BEFORE.replace("Split<", "elsewhere.Split<"),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR)
def test_near_misses_stay(name):
    assert unchanged(HoistCastsPass(), parse(NEAR[name]))


def test_a_cast_inside_a_branch_stays():
    text = """
    g (float16[1,S,4] x, bool c) => (float[1,S,2] y, float[1,S,2] z) {
        a, b = Split<axis: int = 2, num_outputs: int = 2>(x)
        a32 = Cast<to: int = 1>(a)
        y = Neg(a32)
        z = If (c) <
            then_branch = t () => (float[1,S,2] t0) { t0 = Cast<to: int = 1>(b) },
            else_branch = e () => (float[1,S,2] e0) { e0 = Identity(y) }>
    }
    """
    assert unchanged(HoistCastsPass(), parse(text))
