"""FuseAttentionPass: the rewrite, and the words of `CachedAttention` against the graph.

`CachedAttention` has a CUDA kernel alone, so its words
(runtime/kernels/cached_attention_op.cuh) are written here once more, in NumPy: graphs after
the pass are evaluated with them.
"""

import numpy as np
import onnx_ir as ir
import pytest
from golden import assert_graph, check, run, typed, unchanged
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnx_ir.passes.common import RemoveUnusedNodesPass

from passes.fuse_attention import MAX_ROWS, FuseAttentionPass
from passes.fuse_gates import FuseGatesPass
from passes.fuse_qk_norm import FuseQkNormPass

H, HKV, HD, CACHE, HALF, ROWS = 4, 2, 64, 12, 16, 3
Q, KV = H * HD, HKV * HD
WIDTH = 2 * Q + 2 * KV
CACHES = (
    f'float[1,{HKV},{CACHE},{HD}] "past.0.key", float[1,{HKV},{CACHE},{HD}] "past.0.value"'
)
HEAD = f"""g (float[1,{ROWS},{WIDTH}] x, {CACHES}, int32[1] last, int32 total,
       float[{CACHE},{HALF}] c, float[{CACHE},{HALF}] s, float[{HD}] wq, float[{HD}] wk)
    => (float[1,{ROWS},{Q}] y, {CACHES.replace("past", "present")})"""
SPLIT = f"""
    sizes = Constant<value_ints: ints = [{Q}, {KV}, {KV}, {Q}]>()
    q, k, v, g = Split<axis: int = 2>(x, sizes)"""
GATE = """
    gs = Sigmoid(g)
    y0 = Mul(a, gs)
    y = Neg(y0)
"""
ROTARY = f"num_heads: int = {H}, kv_num_heads: int = {HKV}, do_rotary: int = 1"
PAST = '"past.0.key", "past.0.value", last, total, c, s'
PRESENT = '"present.0.key", "present.0.value"'
ATTENTION = f"""
    a, {PRESENT} = com.microsoft.GroupQueryAttention<{ROTARY}, scale: float = 0.125,
        qk_norm_epsilon: float = 1e-06>(q, k, v, {PAST}, , , , , , wq, wk)"""
BEFORE = f"{HEAD} {{ {SPLIT} {ATTENTION} {GATE} }}"
NORM = "RMSNormalization<epsilon: float = 1e-06>"
CANONICAL = f"""{HEAD} {{ {SPLIT}
    qs = Constant<value_ints: ints = [0, 0, {H}, {HD}]>()
    ks = Constant<value_ints: ints = [0, 0, {HKV}, {HD}]>()
    qf = Constant<value_ints: ints = [0, 0, {Q}]>()
    kf = Constant<value_ints: ints = [0, 0, {KV}]>()
    q4 = Reshape(q, qs)
    qn = {NORM}(q4, wq)
    q3 = Reshape(qn, qf)
    k4 = Reshape(k, ks)
    kn = {NORM}(k4, wk)
    k3 = Reshape(kn, kf)
    a, {PRESENT} = com.microsoft.GroupQueryAttention<{ROTARY}, scale: float = 0.125>
        (q3, k3, v, {PAST}) {GATE} }}"""
AFTER = f"""{HEAD} {{
    y0, {PRESENT} = onnx_mtp.CachedAttention<num_heads: int = {H}, kv_num_heads: int = {HKV},
        q_offset: int = 0, k_offset: int = {Q}, v_offset: int = {Q + KV},
        gate_offset: int = {Q + 2 * KV}, epsilon: float = 1e-06, scale: float = 0.125>
        (x, "past.0.key", "past.0.value", last, c, s, wq, wk)
    y = Neg(y0)
}}"""


class CachedAttention(OpRun):
    """The operator row by row and head by head; `mixed` is cut where the offsets say."""

    op_domain = "onnx_mtp"

    def _run(
        self, mixed, past_key, past_value, last, cos, sin, q_norm, k_norm, num_heads=None,
        kv_num_heads=None, q_offset=None, k_offset=None, v_offset=None, gate_offset=None,
        epsilon=None, scale=None,
    ):  # fmt: skip
        width, (rows, group) = len(q_norm), (mixed.shape[1], num_heads // kv_num_heads)
        key, value = past_key.copy(), past_value.copy()
        y = np.zeros((1, rows, num_heads * width), mixed.dtype)

        def part(row, at, head):
            return row[at + head * width : at + (head + 1) * width].astype(np.float64)

        def turned(x, weight, position):
            x = x / np.sqrt((x**2).mean() + epsilon) * weight
            half = cos.shape[1]
            a, b = x[:half], x[half : 2 * half]
            c, s = cos[position], sin[position]
            return np.concatenate([a * c - b * s, b * c + a * s, x[2 * half :]])

        first = int(last[0]) + 1 - rows
        for position, row in enumerate(mixed[0], first):
            for head in range(kv_num_heads):
                key[0, head, position] = turned(part(row, k_offset, head), k_norm, position)
                value[0, head, position] = part(row, v_offset, head)
        for position, row in enumerate(mixed[0], first):
            for head in range(num_heads):
                q = turned(part(row, q_offset, head), q_norm, position)
                seen = slice(0, position + 1)
                scores = np.exp(key[0, head // group, seen] @ q * scale)
                out = scores @ value[0, head // group, seen] / scores.sum()
                gate = 1 / (1 + np.exp(-part(row, gate_offset, head)))
                y[0, position - first, head * width : (head + 1) * width] = out * gate
        return y, key, value


def feeds(seed, last):
    rng = np.random.default_rng(seed)
    angles = np.arange(CACHE)[:, None] * 1e4 ** (-np.arange(HALF) / HALF)
    normal = {
        "x": (1, ROWS, WIDTH),
        "past.0.key": (1, HKV, CACHE, HD),
        "past.0.value": (1, HKV, CACHE, HD),
    }
    values = {name: rng.standard_normal(size) for name, size in normal.items()}
    values |= {"c": np.cos(angles), "s": np.sin(angles)}
    values |= {"wq": rng.uniform(0.5, 2, HD), "wk": rng.uniform(0.5, 2, HD)}
    values = {name: array.astype(np.float32) for name, array in values.items()}
    return values | {"last": np.array([last], np.int32), "total": np.array(CACHE, np.int32)}


def gated(text):
    """The graph as the pass meets it: with its gate as one node."""
    model = typed(text)
    FuseGatesPass()(model)
    return model


def test_a_layer_becomes_one_node():
    model, pass_ = gated(BEFORE), FuseAttentionPass()
    assert pass_(model).modified
    assert pass_.changes == 1
    RemoveUnusedNodesPass()(model)
    check(model)
    assert_graph(model, AFTER)


def test_a_second_run_changes_nothing():
    model, pass_ = gated(BEFORE), FuseAttentionPass()
    pass_(model)
    assert unchanged(pass_, model)


@pytest.mark.parametrize("last", [ROWS - 1, CACHE - 1])
def test_the_operator_says_what_the_layer_computes(last):
    model, values = typed(CANONICAL), feeds(last, last)
    want = run(model, **values)
    for pass_ in (FuseQkNormPass(), FuseGatesPass(), FuseAttentionPass()):
        assert pass_(model).modified
    names = [value.name for value in model.graph.outputs]
    reference = ReferenceEvaluator(ir.to_proto(model), new_ops=[CachedAttention])
    got = dict(zip(names, reference.run(names, values), strict=True))
    np.testing.assert_allclose(got["y"], want["y"], rtol=1e-3, atol=1e-5)
    for name in ("present.0.key", "present.0.value"):
        np.testing.assert_allclose(
            got[name][:, :, : last + 1], want[name][:, :, : last + 1], rtol=1e-4, atol=1e-5
        )


def replaced(old, new):
    assert old in BEFORE
    return BEFORE.replace(old, new)


NEAR_MISSES = {
    "pairs turned in turns": replaced("do_rotary: int = 1", "do_rotary: int = 1, "
                                      "rotary_interleaved: int = 1"),
    "not turned": replaced("do_rotary: int = 1", "do_rotary: int = 0"),
    "a window": replaced("do_rotary: int = 1", "do_rotary: int = 1, "
                        "local_window_size: int = 4"),
    "norms apart": replaced(", , , , , , wq, wk", ""),
    "a position of its own": replaced(", , , , , , wq, wk", ", p, , , , , wq, wk").replace(
        "int32 total", f"int32 total, int64[1,{ROWS}] p"
    ),
    "another gate": replaced("Sigmoid(g)", "com.microsoft.QuickGelu<alpha: float = 1.0>(g)"),
    "a gate from elsewhere": replaced("Sigmoid(g)", "Sigmoid(h)").replace(
        "int32 total", f"int32 total, float[1,{ROWS},{Q}] h"
    ),
    "a query from elsewhere": replaced("(q, k, v,", "(h, k, v,").replace(
        "int32 total", f"int32 total, float[1,{ROWS},{Q}] h"
    ),
    "attention read twice": replaced("y = Neg(y0)", "y1 = Neg(y0)\n    y = Add(y1, a)"),
    "many rows": BEFORE.replace(f"[1,{ROWS},", f"[1,{MAX_ROWS + 1},"),
    "a choice of rows": BEFORE.replace(f"[1,{ROWS},", "[1,S,"),
    "many queries": BEFORE.replace(f"[1,{ROWS},", "[1,9,")
    .replace(f"num_heads: int = {H}, kv_num_heads: int = {HKV}", "num_heads: int = 8, "
             "kv_num_heads: int = 1")
    .replace(f"[{Q}, {KV}, {KV}, {Q}]", "[512, 64, 64, 512]")
    .replace(f"9,{WIDTH}]", "9,1152]").replace(f"9,{Q}]", "9,512]")
    .replace(f"1,{HKV},{CACHE}", f"1,1,{CACHE}"),
    "few angles": BEFORE.replace(f"float[{CACHE},{HALF}]", f"float[{CACHE - 1},{HALF}]"),
    "odd angles": BEFORE.replace(f"float[{CACHE},{HALF}]", f"float[{CACHE},{HALF - 4}]"),
}  # fmt: skip


@pytest.mark.parametrize("text", NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_a_near_miss_is_left(text):
    model = gated(text)
    assert unchanged(FuseAttentionPass(), model)


def test_heads_of_another_width_are_left():
    text = BEFORE.replace(f",{HD}]", ",32]").replace(f"[{HD}]", "[32]")
    text = text.replace(f"num_heads: int = {H},", "num_heads: int = 8,")
    text = text.replace(f"kv_num_heads: int = {HKV}", "kv_num_heads: int = 4")
    model = gated(text.replace(f"1,{HKV},{CACHE}", f"1,4,{CACHE}"))
    assert unchanged(FuseAttentionPass(), model)


def test_a_split_that_others_read_too_stays():
    text = replaced("y = Neg(y0)", "y1 = Neg(y0)\n    y = Add(y1, g)")
    model, pass_ = gated(text), FuseAttentionPass()
    assert pass_(model).modified
    check(model)
    assert [node.op_type for node in model.graph].count("Split") == 1
