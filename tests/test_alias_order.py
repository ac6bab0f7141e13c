"""AliasOrderPass: what may be bound onto an input's memory, proven and refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from gdn_scan import text
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.alias_order import AliasOrderPass

HEAD = '<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1, "onnx_mtp": 1]>'
PAST = {"present": "past"}


def parse(source: str) -> ir.Model:
    return ir.from_onnx_text(HEAD + source)


def accept(source: str, aliases: dict[str, str] = PAST, **options: Any) -> None:
    model = parse(source)
    before = text(model)
    result = AliasOrderPass(aliases.items(), **{"provider": "cuda", "rows": None} | options)(
        model
    )
    assert result.model is model and not result.modified
    assert text(model) == before


def refuse(source: str, aliases: dict[str, str] = PAST, **options: Any) -> str:
    model = parse(source)
    before = text(model)
    with pytest.raises(ir.passes.PreconditionError) as refusal:
        AliasOrderPass(aliases.items(), **{"provider": "cuda", "rows": None} | options)(model)
    assert text(model) == before
    return str(refusal.value)


def test_readers_that_lead_to_the_writer_are_accepted() -> None:
    accept("""
g (float[2] past, float[2] w) => (float[2] present) {
  r = Mul (past, w)
  present = Add (past, r)
}""")


def test_a_reader_that_does_not_lead_to_the_writer_is_named_with_the_remedy() -> None:
    source = """
g (float[2] past, float[2] w) => (float[2] present, float[2] y) {
  [late] y = Mul (past, w)
  [writer] present = Add (past, w)
}"""
    assert refuse(source) == (
        "1 faults of outputs bound onto inputs' memory: 'present' on 'past', written by "
        "g:writer(Add): g:late(Mul) reads 'past' and may run after it; make what it computes "
        "an input of what leads to the writer, or give the output its own memory and swap "
        "the two"
    )


def test_the_order_of_the_file_proves_nothing() -> None:
    for order in (
        "y = Mul (past, w)  present = Add (w, w)",
        "present = Add (w, w)  y = Mul (past, w)",
    ):
        source = (
            f"g (float[2] past, float[2] w) => (float[2] present, float[2] y) {{ {order} }}"
        )
        assert "g:y(Mul) reads 'past'" in refuse(source)


def test_every_offending_pair_is_listed() -> None:
    message = refuse(
        """
g (float[2] past, float[2] old, float[2] w) => (float[2] present, float[2] new, float[2] y) {
  y1 = Mul (past, w)
  y2 = Mul (old, y1)
  y = Neg (past)
  present = Exp (w)
  new = Exp (w)
}""",
        {"present": "past", "new": "old"},
    )
    assert message.startswith("3 faults")
    for reader, value in (("y1(Mul)", "past"), ("y(Neg)", "past"), ("y2(Mul)", "old")):
        assert f"g:{reader} reads {value!r}" in message


def test_a_reader_within_a_branch_counts_for_the_node_that_holds_it() -> None:
    source = """
g (float[2] past, float[2] w, bool c) => (float[2] present, float[2] y) {{
  y = If (c) <then_branch = t () => (float[2] a) {{ a = Exp (past) }},
              else_branch = f () => (float[2] b) {{ b = Neg (w) }}>
  present = Add (past, {operand})
}}"""
    assert "g:y(If) reads 'past'" in refuse(source.format(operand="w"))
    accept(source.format(operand="y"))


def test_a_writer_that_a_branch_of_it_feeds_from_the_input_is_refused() -> None:
    message = refuse("""
g (float[2] past, float[2] w, bool c) => (float[2] present) {
  present = If (c) <then_branch = t () => (float[2] a) { a = Exp (past) },
                    else_branch = f () => (float[2] b) { b = Neg (w) }>
}""")
    assert "a subgraph of g:present(If) reads it" in message


def test_what_a_branch_captures_leads_to_its_node() -> None:
    accept("""
g (float[2] past, float[2] w, bool c) => (float[2] present) {
  r = Mul (past, w)
  present = If (c) <then_branch = t () => (float[2] a) { a = Exp (r) },
                    else_branch = f () => (float[2] b) { b = Neg (w) }>
}""")


def test_reading_a_view_of_the_input_is_reading_the_input() -> None:
    source = """
g (float[2] past, float[2] w, int64[2] s) => (float[2] present, float[1,2] y) {
  v = Reshape (past, s)
  u = Squeeze (v)
  present = Add (w, u)
  y = Exp (v)
}"""
    assert "g:y(Exp) reads 'past'" in refuse(source)


def test_reading_only_its_shape_is_not_reading_it() -> None:
    accept("""
g (float[2] past, float[2] w) => (float[2] present, int64[1] y) {
  y = Shape (past)
  present = Add (past, w)
}""")


@pytest.mark.parametrize(
    ("writer", "reason"),
    [
        ("present = Gather (past, i)", "Gather reads it at input 0 while it writes"),
        ("present = Softmax (past)", "Softmax reads it at input 0"),
        ("present = ReduceMax <keepdims = 1> (past, i)", "ReduceMax reads it at input 0"),
    ],
)
def test_a_writer_that_needs_other_elements_may_not_read_the_input(
    writer: str, reason: str
) -> None:
    message = refuse(f"g (float[2] past, int64[2] i) => (float[2] present) {{ {writer} }}")
    assert reason in message
    assert "give the output its own memory and swap the two" in message


def test_a_broadcast_input_is_read_more_than_once() -> None:
    message = refuse("""
g (float[1] past, float[1,3] w) => (float[1,3] present) { present = Add (past, w) }""")
    assert "Add reads [1] and writes [1,3]" in message
    accept("g (float[1] past, float[1,3] w) => (float[1,3] present) { present = Exp (w) }")


def test_another_dtype_or_name_or_no_writer_is_refused() -> None:
    assert "it is DOUBLE, its memory FLOAT" in refuse(
        "g (float[2] past, double[2] w) => (double[2] present) { present = Neg (w) }"
    )
    source = "g (float[2] past, float[2] w) => (float[2] present) { present = Neg (w) }"
    assert "the graph has no such output" in refuse(source, {"presant": "past"})
    assert "the graph has no such input" in refuse(source, {"present": "passed"})
    handed = parse("g (float[2] past) => (float[2] y) { y = Neg (past) }")
    handed.graph.outputs.append(handed.graph.inputs[0])
    with pytest.raises(ir.passes.PreconditionError, match="no node writes it"):
        AliasOrderPass([("past", "past")], provider="cpu", rows=1)(handed)
    with pytest.raises(ir.passes.PreconditionError, match="the input is an output itself"):
        AliasOrderPass([("y", "past")], provider="cpu", rows=1)(handed)


CONV = """
g (float[1,4,2] x, float[4,1,3] w, float[1,4,2] past)
  => (float[1,4,2] y, float[1,4,2] present) {
  y, present = com.microsoft.CausalConvWithState (x, w, , past)
}"""


def test_a_convolution_works_in_place_on_the_cpu_or_for_one_row() -> None:
    accept(CONV, provider="cpu", rows=4)
    accept(CONV, provider="cuda", rows=1)
    for rows in (4, None):
        message = refuse(CONV, provider="cuda", rows=rows)
        assert "works in place on the CPU or for one row only" in message


def attention(name: str, query: str, past: tuple[str, str], present: tuple[str, str]) -> str:
    return (
        f"[{name}] {name}_out, {', '.join(present)} = com.microsoft.GroupQueryAttention "
        f"<num_heads = 1, kv_num_heads = 1> ({query}, x, x, {', '.join(past)}, n, t)\n"
    )


def own_attention(
    name: str, rows: str, past: tuple[str, str], present: tuple[str, str]
) -> str:
    return (
        f"[{name}] {name}_out, {', '.join(present)} = onnx_mtp.CachedAttention "
        f"<num_heads = 1, kv_num_heads = 1> ({rows}, {', '.join(past)}, n)\n"
    )


GQA_INPUTS = (
    "g (float[1,1,8] x, float[1,1,4,8] key, float[1,1,4,8] value, int32[1] n, int32 t) => "
)
SHARED = {"key1": "key", "value1": "value", "key2": "key", "value2": "value"}


@pytest.mark.parametrize("second_reads", [("key1", "value1"), ("key", "value")])
def test_attention_nodes_of_a_chain_share_a_cache(second_reads: tuple[str, str]) -> None:
    nodes = attention("one", "x", ("key", "value"), ("key1", "value1"))
    nodes += attention("two", "one_out", second_reads, ("key2", "value2"))
    outputs = "(float[1,1,8] two_out, " + ", ".join(
        f"float[1,1,4,8] {name}" for name in SHARED
    )
    accept(f"{GQA_INPUTS} {outputs}) {{ {nodes} }}", SHARED)


@pytest.mark.parametrize("second_reads", [("key1", "value1"), ("key", "value")])
def test_own_attention_nodes_of_a_chain_share_a_cache(second_reads: tuple[str, str]) -> None:
    nodes = own_attention("one", "x", ("key", "value"), ("key1", "value1"))
    nodes += own_attention("two", "one_out", second_reads, ("key2", "value2"))
    outputs = "(float[1,1,8] two_out, " + ", ".join(
        f"float[1,1,4,8] {name}" for name in SHARED
    )
    accept(f"{GQA_INPUTS} {outputs}) {{ {nodes} }}", SHARED)
    swapped = SHARED | {"key2": "value", "value2": "key"}
    assert "CachedAttention cannot share memory" in refuse(
        f"{GQA_INPUTS} {outputs}) {{ {nodes} }}", swapped
    )


def test_attention_nodes_side_by_side_do_not_share_a_cache() -> None:
    nodes = attention("one", "x", ("key", "value"), ("key1", "value1"))
    nodes += attention("two", "x", ("key", "value"), ("key2", "value2"))
    outputs = ", ".join(f"float[1,1,4,8] {name}" for name in SHARED)
    message = refuse(f"{GQA_INPUTS} ({outputs}) {{ {nodes} }}", SHARED)
    assert "it may run before g:one(GroupQueryAttention)" in message or (
        "it may run before g:two(GroupQueryAttention)" in message
    )


def test_key_and_value_may_not_change_places() -> None:
    nodes = attention("one", "x", ("key", "value"), ("key1", "value1"))
    source = f"{GQA_INPUTS} (float[1,1,4,8] key1, float[1,1,4,8] value1) {{ {nodes} }}"
    message = refuse(source, {"key1": "value", "value1": "key"})
    assert "input 3 and output 2 of GroupQueryAttention cannot share memory" in message
    assert "input 4 and output 1 of GroupQueryAttention cannot share memory" in message


def test_of_later_writers_only_those_that_append_may_read_the_input() -> None:
    source = """
g (float[2] past, float[2] w) => (float[2] one, float[2] two) {{
  one = Add (past, w)
  two = Add (one, {operand})
}}"""
    shared = {"one": "past", "two": "past"}
    accept(source.format(operand="w"), shared)
    message = refuse(source.format(operand="past"), shared)
    assert "g:two(Add) reads 'past' and writes there after it" in message


def test_a_reader_of_an_earlier_output_comes_before_the_next_writer() -> None:
    source = """
g (float[2] past, float[2] w) => (float[2] one, float[2] two, float[2] y) {{
  one = Add (past, w)
  y = Neg (one)
  two = Add (one, {operand})
}}"""
    shared = {"one": "past", "two": "past"}
    accept(source.format(operand="y"), shared)
    assert "g:y(Neg) reads 'one'" in refuse(source.format(operand="w"), shared)


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    """For each node the values it reads; 0 is the memory, 1 another input, then the nodes."""
    count = draw(st.integers(2, 8))
    reads = [
        draw(st.lists(st.integers(0, 1 + i), min_size=1, max_size=3)) for i in range(count)
    ]
    writers = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=2, unique=True))
    return reads, sorted(writers)


def orders(reads: list[list[int]]) -> list[list[int]]:
    """Every order in which the nodes may run."""
    found: list[list[int]] = []

    def extend(done: list[int]) -> None:
        if len(done) == len(reads):
            found.append(done)
        for node, values in enumerate(reads):
            if node not in done and all(v < 2 or v - 2 in done for v in values):
                extend([*done, node])

    extend([])
    return found


def evaluate(reads: list[list[int]], order: list[int], writers: list[int]) -> list[Any]:
    """What each node reads when the writers' values lie in the memory of value 0."""
    cells: dict[int, Any] = {0: "past", 1: "other"}
    seen: list[Any] = [None] * len(reads)
    shared = {0, *(2 + w for w in writers)}
    memory: Any = "past"
    for node in order:
        seen[node] = tuple(memory if v in shared else cells[v] for v in reads[node])
        result = (node, seen[node])
        cells[2 + node] = result
        if node in writers:
            memory = result
    return seen


@settings(max_examples=150, deadline=None)
@given(graphs())
def test_random_graphs_are_accepted_exactly_when_every_order_gives_the_unshared_values(
    case: tuple[list[list[int]], list[int]],
) -> None:
    reads, writers = case
    if len(reads) > 6:
        reads = reads[:6]
        writers = [w for w in writers if w < 6] or [5]
    names = ["past", "other", *(f"v{i}" for i in range(len(reads)))]
    nodes = " ".join(
        f"v{i} = Max ({', '.join(names[v] for v in values)})"
        if i not in writers
        else f"v{i} = Where (c, {names[values[0]]}, {names[values[-1]]})"
        for i, values in enumerate(reads)
    )
    reads = [[v[0], v[-1]] if i in writers else v for i, v in enumerate(reads)]
    outputs = ", ".join(f"float[2] v{i}" for i in range(len(reads)))
    model = parse(f"g (bool[2] c, float[2] past, float[2] other) => ({outputs}) {{ {nodes} }}")
    check = AliasOrderPass([(f"v{w}", "past") for w in writers], provider="cpu", rows=1)
    plain = evaluate(reads, list(range(len(reads))), [])
    same = all(evaluate(reads, order, writers) == plain for order in orders(reads))
    chained = all(
        order.index(writers[0]) <= order.index(writers[-1]) for order in orders(reads)
    )
    if same and chained:
        check(model)
    else:
        with pytest.raises(ir.passes.PreconditionError):
            check(model)


def bound(model: ir.Model, feeds: dict[str, Any], aliases: dict[str, str]) -> dict[str, Any]:
    """Outputs of a run whose aliased outputs lie over their inputs."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(
        ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    binding = session.io_binding()
    values = {n: ort.OrtValue.ortvalue_from_numpy(a.copy()) for n, a in feeds.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for output in session.get_outputs():
        if output.name in aliases:
            binding.bind_ortvalue_output(output.name, values[aliases[output.name]])
        else:
            binding.bind_output(output.name)
    session.run_with_iobinding(binding)
    return {
        output.name: array
        for output, array in zip(
            session.get_outputs(), binding.copy_outputs_to_cpu(), strict=True
        )
    }


ONE = [
    *("Abs", "Ceil", "Exp", "Floor", "Identity", "Log", "Neg", "Reciprocal", "Relu"),
    *("Sigmoid", "Sqrt", "Tanh"),
]
WRITERS: list[tuple[str, str, str]] = [
    *((op, f"{op} (past)", "float") for op in ONE),
    *((f"{op} left", f"{op} (past, w)", "float") for op in ("Add", "Sub", "Mul", "Div")),
    *((f"{op} right", f"{op} (w, past)", "float") for op in ("Add", "Sub", "Mul", "Div")),
    ("Clip", "Clip (past, low)", "float"),
    ("Cast", "Cast <to = 1> (past)", "float"),
    ("Where left", "Where (c, past, w)", "float"),
    ("Where right", "Where (c, w, past)", "float"),
    ("And", "And (past, w)", "bool"),
    ("Or", "Or (w, past)", "bool"),
    ("Not", "Not (past)", "bool"),
]


@pytest.mark.parametrize(
    ("writer", "kind"), [w[1:] for w in WRITERS], ids=[w[0] for w in WRITERS]
)
def test_ops_of_the_table_give_the_same_values_in_place(writer: str, kind: str) -> None:
    size = 5000  # more than one thread's share and no multiple of a vector
    model = parse(f"""
g ({kind}[{size}] past, {kind}[{size}] w, {kind}[{size}] d, bool[{size}] c)
  => ({kind}[{size}] present) <float low = {{0.5}}> {{ present = {writer} }}""")
    AliasOrderPass(PAST.items(), provider="cpu", rows=None)(model)
    rng = np.random.default_rng(7)
    make: Callable[[], Any] = lambda: rng.random(size).astype(np.float32) + 0.1  # noqa: E731
    if kind == "bool":
        make = lambda: rng.random(size) < 0.5  # noqa: E731
    feeds = {"past": make(), "w": make(), "d": make(), "c": rng.random(size) < 0.5}
    apart, over = bound(model, feeds, {}), bound(model, feeds, PAST)
    np.testing.assert_array_equal(over["present"], apart["present"])
    assert (
        not np.array_equal(feeds["past"], apart["present"])
        or "Identity" in writer
        or (writer.startswith(("Abs", "Relu", "Cast")))
    )


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("last", [0, 1])
def test_a_convolution_gives_the_same_values_in_place_on_the_cpu(rows: int, last: int) -> None:
    def shape(length: int) -> tuple[int, ...]:
        return (1, length, 64) if last else (1, 64, length)

    def dims(length: int) -> str:
        return ",".join(map(str, shape(length)))

    model = parse(f"""
g (float[{dims(rows)}] x, float[64,1,4] w, float[{dims(3)}] past)
  => (float[{dims(rows)}] y, float[{dims(3)}] present) {{
  y, present = com.microsoft.CausalConvWithState <channels_last = {last}> (x, w, , past)
}}""")
    rng = np.random.default_rng(8)
    feeds = {
        name: rng.standard_normal(size).astype(np.float32)
        for name, size in (("x", shape(rows)), ("w", (64, 1, 4)), ("past", shape(3)))
    }
    apart, over = bound(model, feeds, {}), bound(model, feeds, PAST)
    for name, value in apart.items():
        np.testing.assert_array_equal(over[name], value, err_msg=name)
    joined = np.concatenate([feeds["past"], feeds["x"]], axis=1 if last else 2)
    tail = joined[:, -3:] if last else joined[:, :, -3:]
    np.testing.assert_array_equal(apart["present"], tail)


@pytest.mark.parametrize("rows", [1, 3])
def test_linear_attention_gives_the_same_values_in_place_on_the_cpu(rows: int) -> None:
    model = parse(f"""
g (float[1,{rows},32] q, float[1,{rows},32] k, float[1,{rows},64] v, float[1,4,16,16] past,
   float[1,{rows},4] g0, float[1,{rows},4] b)
  => (float[1,{rows},64] y, float[1,4,16,16] present) {{
  y, present = com.microsoft.LinearAttention <q_num_heads = 2, kv_num_heads = 4>
    (q, k, v, past, g0, b)
}}""")
    AliasOrderPass(PAST.items(), provider="cuda", rows=rows)(model)
    rng = np.random.default_rng(9)
    feeds = {
        str(value.name): 0.3 * rng.standard_normal(value.shape.numpy()).astype(np.float32)
        for value in model.graph.inputs
        if value.shape is not None
    }
    apart, over = bound(model, feeds, {}), bound(model, feeds, PAST)
    for name, value in apart.items():
        np.testing.assert_array_equal(over[name], value, err_msg=name)


@pytest.mark.parametrize("second_reads", [("key1", "value1"), ("key", "value")])
def test_a_chain_of_attention_nodes_gives_the_same_values_over_one_cache(
    second_reads: tuple[str, str],
) -> None:
    """Over one cache the second may read the input: it finds the first one's row there."""

    def chain(second: tuple[str, str]) -> ir.Model:
        nodes = attention("one", "x", ("key", "value"), ("key1", "value1"))
        nodes += "step = Constant <value = int32[1] {1}> ()  m = Add (n, step)\n"
        nodes += (
            attention("two", "one_out", second, ("key2", "value2"))
            .replace("x, x,", "one_out, one_out,")
            .replace(", n, t)", ", m, t)")
        )
        outputs = ", ".join(f"float[1,1,4,8] {name}" for name in SHARED)
        return parse(f"{GQA_INPUTS} (float[1,1,8] two_out, {outputs}) {{ {nodes} }}")

    rng = np.random.default_rng(10)
    feeds = {
        "x": rng.standard_normal((1, 1, 8)).astype(np.float32),
        "key": rng.standard_normal((1, 1, 4, 8)).astype(np.float32),
        "value": rng.standard_normal((1, 1, 4, 8)).astype(np.float32),
        "n": np.array([1], np.int32),
        "t": np.array(4, np.int32),
    }
    apart = bound(chain(("key1", "value1")), feeds, {})
    over = bound(chain(second_reads), feeds, SHARED)
    np.testing.assert_array_equal(over["two_out"], apart["two_out"])
    for name in ("key2", "value2"):  # three rows count, one given and two appended
        rows = apart[name][:, :, :3], over[name][:, :, :3]
        assert np.all(np.any(rows[0] != 0, axis=-1))
        np.testing.assert_array_equal(rows[1], rows[0], err_msg=name)


VIEWED = """
<ir_version: 10, opset_import: ["" : 21]>
agraph (float[4] x, float[4] view) => (float[4] rows, float[4] picked) {
   rows = Exp(x)
   %s
   picked = Add(view, late)
}
"""


def test_a_view_is_read_after_it_was_written() -> None:
    model = ir.from_onnx_text(VIEWED % "late = Neg(rows)")
    AliasOrderPass([("rows", "view")], provider="cpu", rows=1, views=["view"])(model)


def test_a_view_that_may_be_read_before_it_was_written_is_refused() -> None:
    model = ir.from_onnx_text(VIEWED % "late = Neg(x)")
    with pytest.raises(ir.passes.PreconditionError, match="make it depend on the writer"):
        AliasOrderPass([("rows", "view")], provider="cpu", rows=1, views=["view"])(model)
