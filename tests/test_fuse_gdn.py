"""FuseGdnPass: the rewrite, and the words of `GdnRows` against graph and oracle.

`GdnRows` has a CUDA kernel alone, so its words (runtime/kernels/gdn_rows_op.cuh) are written
here once more, in NumPy: graphs after the pass are evaluated with them.
"""

import numpy as np
import onnx_ir as ir
import pytest
import tiny_reference as oracle
from golden import assert_graph, check, run, typed, unchanged
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from passes.fuse_gdn import MAX_ROWS, FuseGdnPass

HK, HV, DK, ROWS = 1, 2, 64, 3
KEYS, VALUES = HK * DK, HV * DK
CONV = 2 * KEYS + VALUES
WIDTH = CONV + 2 * HV + VALUES
ROOT = ", ".join([str(np.float32(DK**-0.5))] * DK)
NORM = "RMSNormalization<epsilon: float = 1.5625e-08>"
RULE = f"""com.microsoft.LinearAttention<q_num_heads: int = {HK}, kv_num_heads: int = {HV},
        scale: float = 0.125, update_rule: string = "gated_delta">"""
CAUSAL = """com.microsoft.CausalConvWithState<activation: string = "silu", ndim: int = 1,
        channels_last: int = 1>"""
WEIGHTS = f"float[{CONV},1,4] taps, float[{HV}] bias, float[{HV}] decay, float[{DK}] norm"
PAST = f'float[1,3,{CONV}] "past.0.conv", float[1,{HV},{DK},{DK}] "past.0.recurrent"'
PRESENT = PAST.replace("past", "present")
HEAD = f"""g (float16[1,{ROWS},{WIDTH}] x, {WEIGHTS}, {PAST})
    => (float16[1,{ROWS},{VALUES}] y, {PRESENT})"""
BEFORE = f"""
{HEAD} {{
    f = Cast<to: int = 1>(x)
    sizes = Constant<value_ints: ints = [{CONV}, {HV}, {HV}, {VALUES}]>()
    qkv, a, b, z = Split<axis: int = 2>(f, sizes)
    c, "present.0.conv" = {CAUSAL}(qkv, taps, , "past.0.conv")
    parts = Constant<value_ints: ints = [{KEYS}, {KEYS}, {VALUES}]>()
    q, k, v = Split<axis: int = 2>(c, parts)
    heads = Constant<value_ints: ints = [0, 0, {HK}, {DK}]>()
    root = Constant<value: tensor = float[{DK}] {{{ROOT}}}>()
    flat = Constant<value_ints: ints = [0, 0, {KEYS}]>()
    q4 = Reshape(q, heads)
    qn = {NORM}(q4, root)
    q3 = Reshape(qn, flat)
    k4 = Reshape(k, heads)
    kn = {NORM}(k4, root)
    k3 = Reshape(kn, flat)
    g, beta = com.microsoft.LinearAttentionGate(a, bias, decay, b)
    o, "present.0.recurrent" = {RULE}(q3, k3, v, "past.0.recurrent", g, beta)
    n = com.microsoft.GatedRMSNorm<epsilon: float = 1e-06, activation: string = "silu">
        (o, norm, z)
    y0 = Cast<to: int = 10>(n)
    y = Neg(y0)
}}
"""
AFTER = f"""
{HEAD} {{
    sizes = Constant<value_ints: ints = [{CONV}, {HV}, {HV}, {VALUES}]>()
    parts = Constant<value_ints: ints = [{KEYS}, {KEYS}, {VALUES}]>()
    heads = Constant<value_ints: ints = [0, 0, {HK}, {DK}]>()
    root = Constant<value: tensor = float[{DK}] {{{ROOT}}}>()
    flat = Constant<value_ints: ints = [0, 0, {KEYS}]>()
    y0, "present.0.conv", "present.0.recurrent" = onnx_mtp.GdnRows<key_heads: int = {HK},
        value_heads: int = {HV}, a_offset: int = {CONV}, b_offset: int = {CONV + HV},
        z_offset: int = {CONV + 2 * HV}, keep_rows: int = 0, sigmoid_gate: int = 0,
        epsilon: float = 1e-06, l2_epsilon: float = 1e-06>
        (x, taps, bias, decay, norm, "past.0.conv", "past.0.recurrent")
    y = Neg(y0)
}}
"""


def windowed(text):
    """The same layer keeping the states of all its rows."""
    text = text.replace("ndim: int = 1", f"state_window: int = {ROWS}, ndim: int = 1")
    text = text.replace("scale: float", f"state_window: int = {ROWS}, scale: float")
    for part in (f"[1,3,{CONV}]", f"[1,{HV},{DK},{DK}]"):
        text = text.replace(f"float{part}", f"float[{ROWS},{part[1:]}")
    return text


WINDOW_AFTER = windowed(AFTER).replace("keep_rows: int = 0", "keep_rows: int = 1")


class GdnRows(OpRun):
    """The operator row by row; `mixed` is q | k | v, and z, b, a where the offsets say."""

    op_domain = "onnx_mtp"

    def _run(
        self, mixed, taps, dt_bias, decay_scale, norm, past_conv, past_state,
        key_heads=None, value_heads=None, a_offset=None, b_offset=None, z_offset=None,
        keep_rows=None, sigmoid_gate=None, epsilon=None, l2_epsilon=None,
    ):  # fmt: skip
        (dk, dv), conv_dim = past_state.shape[-2:], past_conv.shape[-1]
        state = past_state.reshape(-1, value_heads, dk, dv)[-1].copy()
        window = past_conv.reshape(-1, 3, conv_dim)[-1]
        rows, values, convs, states = mixed[0].astype(np.float32), [], [], []
        for row in rows:
            window = np.concatenate([window, row[None, :conv_dim]])
            mixture = silu((window * taps[:, 0].T).sum(0))
            window = window[1:]
            at = key_heads * dk
            q, k = (mixture[i * at : (i + 1) * at].reshape(key_heads, dk) for i in (0, 1))
            q, k = (v / np.sqrt((v**2).sum(-1, keepdims=True) + l2_epsilon) for v in (q, k))
            q, k = (np.repeat(v, value_heads // key_heads, axis=0) for v in (q / dk**0.5, k))
            v = mixture[2 * at :].reshape(value_heads, dv)
            g = decay_scale * np.log1p(
                np.exp(row[a_offset : a_offset + value_heads] + dt_bias)
            )
            beta = sigmoid(row[b_offset : b_offset + value_heads])
            state = state * np.exp(g)[:, None, None]
            delta = beta[:, None] * (v - np.einsum("hkv,hk->hv", state, k))
            state = state + k[:, :, None] * delta[:, None]
            o = np.einsum("hkv,hk->hv", state, q)
            o = o / np.sqrt((o**2).mean(-1, keepdims=True) + epsilon) * norm
            z = row[z_offset : z_offset + value_heads * dv].reshape(value_heads, dv)
            values.append((o * (sigmoid(z) if sigmoid_gate else silu(z))).reshape(-1))
            convs.append(window[None])
            states.append(state[None])
        kept = (np.stack(convs), np.stack(states)) if keep_rows else (convs[-1], states[-1])
        kept = tuple(array.astype(np.float32) for array in kept)
        return (np.stack(values)[None].astype(mixed.dtype), *kept)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def feeds(seed=0):
    rng = np.random.default_rng(seed)

    def normal(*shape, scale=1.0):
        return (scale * rng.standard_normal(shape)).astype(np.float32)

    return {
        "x": normal(1, ROWS, WIDTH).astype(np.float16),
        "taps": normal(CONV, 1, 4, scale=0.5),
        "bias": normal(HV),
        "decay": -np.exp(normal(HV)),
        "norm": 1 + normal(DK, scale=0.2),
        "past.0.conv": normal(1, 3, CONV),
        "past.0.recurrent": normal(1, HV, DK, DK, scale=0.3),
    }


def evaluated(model, values):
    names = [value.name for value in model.graph.outputs]
    reference = ReferenceEvaluator(ir.to_proto(model), new_ops=[GdnRows])
    return dict(zip(names, reference.run(names, values), strict=True))


@pytest.mark.parametrize(
    ("before", "after"), [(BEFORE, AFTER), (windowed(BEFORE), WINDOW_AFTER)]
)
def test_a_layer_becomes_one_node(before, after):
    model, pass_ = typed(before), FuseGdnPass()
    assert pass_(model).modified
    assert pass_.changes == 1
    check(model)
    assert_graph(model, after)


@pytest.mark.parametrize("before", [BEFORE, windowed(BEFORE)])
def test_a_second_run_changes_nothing(before):
    model, pass_ = typed(before), FuseGdnPass()
    pass_(model)
    assert unchanged(pass_, model)


@pytest.mark.parametrize("gate", ["silu", "sigmoid"])
@pytest.mark.parametrize("seed", range(3))
def test_the_operator_says_what_the_layer_computes(gate, seed):
    model, values = (
        typed(BEFORE.replace('"silu">\n        (o', f'"{gate}">\n        (o')),
        feeds(seed),
    )
    want = run(model, **values)
    FuseGdnPass()(model)
    got = evaluated(model, values)
    np.testing.assert_allclose(got["y"], want["y"], rtol=2**-9, atol=1e-4)
    for name in ("present.0.conv", "present.0.recurrent"):
        np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-5)


def test_the_operator_says_what_the_oracle_does_after_every_row():
    """The oracle's layer with projections that take columns apart, so that x is `mixed`."""
    model, values = typed(windowed(BEFORE)), feeds()
    FuseGdnPass()(model)
    past = {name: values.pop(f"past.0.{name}") for name in ("conv", "recurrent")}
    for name, array in past.items():  # of a window, the last slot alone is read
        slots = np.full((ROWS, *array.shape), np.nan, np.float32)
        slots[-1] = array
        values[f"past.0.{name}"] = slots
    got = evaluated(model, values)
    cfg = oracle.tiny_config(
        hidden_size=WIDTH, linear_num_key_heads=HK, linear_num_value_heads=HV,
        linear_key_head_dim=DK, linear_value_head_dim=DK,
    )  # fmt: skip
    columns = np.split(np.eye(WIDTH, dtype=np.float32), [CONV, CONV + HV, CONV + 2 * HV])
    names = ("in_proj_qkv", "in_proj_a", "in_proj_b", "in_proj_z")
    weights = {f"{n}.weight": rows for n, rows in zip(names, columns, strict=True)}
    weights |= {
        "A_log": np.log(-values["decay"]),
        "dt_bias": values["bias"],
        "conv1d.weight": values["taps"],
        "norm.weight": values["norm"],
        "out_proj.weight": np.eye(VALUES, dtype=np.float32),
    }
    state = oracle.GdnState(past["conv"][0].T, past["recurrent"][0])
    x = values["x"][0].astype(np.float32)
    y, snaps, _ = oracle.gated_delta_net(weights, "", cfg, x, state)
    np.testing.assert_allclose(-got["y"][0], y, rtol=2**-9, atol=1e-4)
    for row, snap in enumerate(snaps):
        conv, recurrent = (got[f"present.0.{n}"][row, 0] for n in ("conv", "recurrent"))
        np.testing.assert_allclose(conv, snap.conv.T, rtol=1e-6)
        np.testing.assert_allclose(recurrent, snap.S, rtol=1e-4, atol=1e-5)


def replaced(old, new, text=BEFORE):
    assert old in text
    return text.replace(old, new)


def also_out(value, shape):
    return replaced(
        f'{DK}] "present.0.recurrent"', f'{DK}] "present.0.recurrent", {shape} {value}'
    )


def of_rows(rows):
    text = BEFORE
    for width in (WIDTH, VALUES):
        text = text.replace(f"float16[1,{ROWS},{width}]", f"float16[1,{rows},{width}]")
    return text


ORDER = f"[{CONV}, {HV}, {HV}, {VALUES}]>()\n    qkv, a, b, z ="
NEAR = {
    "keys and queries the other way round": replaced("q, k, v = Split", "k, q, v = Split"),
    "decay and rate the other way round": replaced("g, beta =", "beta, g ="),
    "the convolution's part not in front": replaced(
        ORDER, f"[{HV}, {CONV}, {HV}, {VALUES}]>()\n    a, qkv, b, z ="
    ),
    "a norm that is none of L2": replaced(ROOT, ", ".join(["1"] * DK)),
    "norms of two epsilons": replaced("1.5625e-08>(k4", "1e-06>(k4"),
    "keys without norm": replaced(f"kn = {NORM}(k4, root)", "kn = Neg(k4)"),
    "another scale": replaced("scale: float = 0.125", "scale: float = 1.0"),
    "another rule": replaced('"gated_delta"', '"gated"'),
    "another activation": replaced('activation: string = "silu", ndim', "ndim"),
    "a convolution with holes": replaced("ndim: int", "dilation: int = 2, ndim: int"),
    "a convolution of three taps": replaced(f"{CONV},1,4]", f"{CONV},1,3]").replace(
        f"[1,3,{CONV}]", f"[1,2,{CONV}]"),
    "a result in float32": replaced("to: int = 10", "to: int = 1").replace(
        f"float16[1,{ROWS},{VALUES}] y", f"float[1,{ROWS},{VALUES}] y"),
    "one window of two": replaced("ndim: int", f"state_window: int = {ROWS}, ndim: int")
    .replace(f"float[1,3,{CONV}]", f"float[{ROWS},1,3,{CONV}]"),
    "a window of fewer rows": windowed(BEFORE).replace(
        f"state_window: int = {ROWS}", "state_window: int = 2"),
    "too many rows": of_rows(MAX_ROWS + 1),
    "an open number of rows": of_rows("S"),
    "a gate that is an output": also_out("z", f"float[1,{ROWS},{VALUES}]"),
    "what is read that is an output": also_out("o", f"float[1,{ROWS},{VALUES}]"),
    "a part that others read": also_out("w", f"float[1,{ROWS},{VALUES}]").replace(
        "y = Neg", "w = Neg(v)\n    y = Neg"),
    "a cast that others read": also_out("w", f"float[1,{ROWS},{WIDTH}]").replace(
        "y = Neg", "w = Neg(f)\n    y = Neg"),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR)
def test_near_misses_stay(name):
    assert unchanged(FuseGdnPass(), typed(NEAR[name]))


def test_heads_of_another_width_stay(monkeypatch):
    monkeypatch.setattr("passes.fuse_gdn.HEAD_SIZES", (128,))
    assert unchanged(FuseGdnPass(), typed(BEFORE))


@pytest.mark.parametrize("name", ["GatedRMSNorm<epsilon: float = 1e-06, ", NORM])
def test_an_epsilon_by_default_is_that_of_the_operator(name):
    bare = name.replace("epsilon: float = 1e-06, ", "").replace(
        "<epsilon: float = 1.5625e-08>", ""
    )
    model, values = typed(BEFORE.replace(name, bare)), feeds()
    values["x"] = (values["x"] * 0.02).astype(np.float16)  # so small that epsilons count
    values["past.0.recurrent"] *= 1e-3
    want = run(model, **values)
    assert FuseGdnPass()(model).modified
    got = evaluated(model, values)
    np.testing.assert_allclose(
        got["present.0.recurrent"], want["present.0.recurrent"], rtol=1e-4, atol=1e-7
    )
    np.testing.assert_allclose(got["y"], want["y"], rtol=2**-8, atol=1e-5)
