"""A hand-written artifact whose every token can be predicted on paper.

The "target" is arithmetic on whole numbers, exact in float32, that reads every kind of state
a hybrid model has: row p with token x keeps

    recurrent   r = (r + (p + 1) * x) mod V             order counts
    conv        the two tokens before                   the window counts
    key, value  x and 2 * x + 1                         all earlier rows count

and the next token is ``(r + sum(key) + sum(value) + 5 * x[-1] + 7 * x[-2] + 3) mod V``.
The "head" computes the same from the hidden state, so it is right, except that

    its guess after token n is one off where n % miss == 0,
    all its guesses are two off where its own cache does not hold the tokens that it must.

Written with `onnx.helper` alone: nothing of the exporter is used.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from artifacts import AttentionSpec, GdnSpec, HeadSpec, LayerKind, ModelSpec
from artifacts.manifest import (
    Buffer,
    Graph,
    Manifest,
    Port,
    Source,
    Target,
    Weights,
    WeightTensor,
)

F, I64, I32 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32
DTYPES = {F: "float32", I64: "int64", I32: "int32"}
D, TAPS, CONV = 5, 3, 3
WEIGHTS = "weights.safetensors"


@dataclass(frozen=True)
class Counting:
    """What to build, and what it must then do."""

    k: int = 3
    capacity: int = 64
    prefill_rows: int = 16
    vocab: int = 320
    miss: int = 3
    """The head misses after tokens that this divides; 1 always, 0 never."""
    decode_bump: float = 0.0
    """Pulls prefill's and decode's logits towards the token after the right one."""
    verify_bump: float = 0.0
    """The same for verify: from 0.5 on it picks that token."""
    keep_row: int | None = None
    """A fault to plant: verify commits the state after this row, whatever was accepted."""
    poison: bool = False
    """A fault to plant: decode gives NaN."""
    eos: tuple[int, ...] = ()
    kind: str = "checkpoint"
    """Of the source."""
    catch_up: bool = False
    """Whether the graph that only fills the head's cache is there."""

    @property
    def rows(self) -> int:
        return self.k + 1

    @property
    def cache_rows(self) -> int:
        return self.capacity + self.rows

    # what must come out, by plain arithmetic

    def next_token(self, tokens: list[int]) -> int:
        r = sum((p + 1) * x for p, x in enumerate(tokens))
        sums = sum(3 * x + 1 for x in tokens)
        before = [0, 0, *tokens]
        return (r + sums + 5 * before[-2] + 7 * before[-3] + 3) % self.vocab

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(self.next_token(tokens))
        return tokens[len(prompt) :]

    def guesses(self, tokens: list[int], k: int) -> list[int]:
        """What the head drafts when `tokens` were emitted, the last one not yet fed."""
        guessed = list(tokens)
        for _ in range(k):
            right = self.next_token(guessed)
            off = bool(self.miss) and guessed[-1] % self.miss == 0
            guessed.append((right + off) % self.vocab)
        return guessed[len(tokens) :]

    def accepts(self, tokens: list[int], drafts: int) -> int:
        """How many of the head's drafts stand."""
        right = self.greedy(tokens, drafts)
        same = [a == b for a, b in zip(self.guesses(tokens, drafts), right, strict=True)]
        return [*same, False].index(False)

    # the state after feeding `tokens`, for comparison with buffers

    def states(self, tokens: list[int]) -> dict[str, np.ndarray]:
        r = sum((p + 1) * x for p, x in enumerate(tokens)) % self.vocab
        window = [0, 0, *tokens][-2:]
        return {
            "target.0.recurrent": np.full((1, 1, 1, 1), r, np.float32),
            "target.0.conv": np.repeat(np.float32(window)[None, :, None], CONV, axis=2),
            "target.1.key": np.float32(tokens).reshape(1, 1, -1, 1),
            "target.1.value": 2 * np.float32(tokens).reshape(1, 1, -1, 1) + 1,
        }

    def write(self, folder: Path) -> Path:
        """Write the artifact into `folder` and return it."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = _write_weights(folder / WEIGHTS, self.vocab)
        graphs = {
            "prefill": _target(self, "prefill", None),
            "decode": _target(self, "decode", 1),
        }
        if self.k:
            graphs |= {"verify": _target(self, "verify", self.rows), "draft": _draft(self)}
        if self.catch_up:
            graphs["catch_up"] = _catch_up(self)
        described = {}
        for name, net in graphs.items():
            path = folder / f"{name}.onnx"
            path.write_bytes(net.model(weights).SerializeToString())
            described[name] = Graph(
                file=path.name,
                sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
                rows=net.rows,
                inputs=tuple(net.inputs.values()),
                outputs=tuple(net.outputs.values()),
                passes=(),
            )
        _manifest(self, described, weights).write(folder)
        return folder


class Net:
    """A graph under construction: `net("Add", a, b)` adds a node and names its output."""

    def __init__(self, name: str, rows: int | None) -> None:
        self.name, self.rows = name, rows
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.values: dict[str, list[onnx.ValueInfoProto]] = {"in": [], "out": []}
        self.inputs: dict[str, Port] = {}
        self.outputs: dict[str, Port] = {}

    def __call__(self, op: str, *inputs: str, to: str | None = None, **attributes) -> str:
        output = to or f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [output], **attributes))
        return output

    def const(self, value, dtype=np.float32) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.array(value, dtype), name))
        return name

    def input(self, name: str, buffer: str, kind: int, *shape) -> str:
        """Declare an input; only the copy returned is read, so that in-place updates of the
        buffer cannot come before a read."""
        self._declare("in", self.inputs, name, buffer, kind, shape)
        zero = {F: np.float32, I64: np.int64, I32: np.int32}[kind]
        return self("Add", name, self.const(0, zero))

    def output(self, value: str, name: str, buffer: str, kind: int, *shape) -> None:
        self._declare("out", self.outputs, name, buffer, kind, shape)
        sizes = [-1 if isinstance(n, str) else n for n in shape]
        self("Reshape", value, self.const(sizes, np.int64), to=name)

    def _declare(self, side, ports, name, buffer, kind, shape) -> None:
        self.values[side].append(helper.make_tensor_value_info(name, kind, list(shape)))
        ports[name] = Port(name, buffer, DTYPES[kind], tuple(shape))

    def flat(self, value: str, *shape: int) -> str:
        return self("Reshape", value, self.const(shape or (-1,), np.int64))

    def as_float(self, value: str) -> str:
        return self.flat(self.cast(value, F))

    def cast(self, value: str, kind: int) -> str:
        output = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node("Cast", [value], [output], to=kind))
        return output

    def total(self, value: str) -> str:
        return self("ReduceSum", value, keepdims=1)

    def running(self, value: str) -> str:
        return self("CumSum", value, self.const(0, np.int64))

    def mod(self, value: str, size: int) -> str:
        return self("Mod", value, self.const(size), fmod=1)

    def row(self, value: str, index: str, axis: int = 0) -> str:
        return self("Gather", value, index, axis=axis)

    def model(self, weights: Weights) -> onnx.ModelProto:
        tensor = weights.tensors["vocabulary"]
        external = TensorProto(
            name="vocabulary",
            data_type=F,
            dims=tensor.shape,
            data_location=TensorProto.EXTERNAL,
        )
        for key, value in (
            ("location", weights.file),
            ("offset", tensor.offset),
            ("length", tensor.length),
        ):
            external.external_data.add(key=key, value=str(value))
        used = {name for node in self.nodes for name in node.input}
        graph = helper.make_graph(
            self.nodes,
            self.name,
            self.values["in"],
            self.values["out"],
            [*self.constants, *([external] if "vocabulary" in used else [])],
        )
        opset = helper.make_opsetid("", 21)
        return helper.make_model(graph, opset_imports=[opset], ir_version=10)


def write_cache(net: Net, cache: str, at: str, rows: str, cache_rows: int) -> str:
    """`cache` [C] with `rows` [S] written at the places `at` [S]; the rest stays."""
    places = net.const(np.arange(cache_rows)[:, None])
    hit = net.cast(net("Equal", places, net("Unsqueeze", at, net.const([0], np.int64))), F)
    written = net.flat(net("MatMul", hit, net.flat(rows, -1, 1)))
    touched = net("ReduceSum", hit, net.const([1], np.int64), keepdims=0)
    return net("Where", net("Greater", touched, net.const(0)), written, cache)


def _target(c: Counting, name: str, rows: int | None) -> Net:
    """Prefill, decode and verify: the same arithmetic over S rows."""
    net, size = Net(name, rows), "S" if rows is None else rows
    many = name == "verify"
    prompt = name == "prefill"
    ids = net.input("input_ids", "prompt_ids" if prompt else "ids", I64, 1, size)
    length = net.input("past_length", "length", I32, 1)
    key = net.flat(net.input("past.1.key", "target.1.key", F, 1, 1, c.cache_rows, 1))
    value = net.flat(net.input("past.1.value", "target.1.value", F, 1, 1, c.cache_rows, 1))
    conv = net.input("past.0.conv", "target.0.conv", F, 1, TAPS - 1, CONV)
    state = net.flat(net.input("past.0.recurrent", "target.0.recurrent", F, 1, 1, 1, 1))

    start = net.as_float(length)
    x = net.as_float(ids)
    ones = net("Add", net("Mul", x, net.const(0)), net.const(1))
    place = net("Add", start, net("Sub", net.running(ones), net.const(1)))

    counts = net("Less", net.const(np.arange(c.cache_rows)), start)
    old_key = net("Where", counts, key, net.const(0))
    old_value = net("Where", counts, value, net.const(0))
    values = net("Add", net("Mul", x, net.const(2)), net.const(1))
    sum_key = net("Add", net.total(old_key), net.running(x))
    sum_value = net("Add", net.total(old_value), net.running(values))
    sums = net("Add", sum_key, sum_value)

    wide = net("Tile", net.flat(x, 1, -1, 1), net.const([1, 1, CONV], np.int64))
    window = net("Concat", conv, wide, axis=1)
    column = net.flat(net("Slice", window, *(net.const([n], np.int64) for n in (0, 1, 2))))
    one = net("Slice", column, net.const([1], np.int64), net.const([-1], np.int64))
    two = net("Slice", column, net.const([0], np.int64), net.const([-2], np.int64))

    fed = net("Mul", net("Add", place, net.const(1)), x)
    states = net.mod(net("Add", state, net.running(fed)), c.vocab)
    weighed = net("Add", net("Mul", one, net.const(5)), net("Mul", two, net.const(7)))
    total = net("Add", net("Add", states, sums), net("Add", weighed, net.const(3)))
    following = net.mod(total, c.vocab)

    bump = c.verify_bump if many else c.decode_bump
    aim = net("Add", following, net.const(bump))
    away = net("Sub", net.flat("vocabulary", 1, -1), net.flat(aim, -1, 1))
    logits = net("Neg", net("Abs", away))
    if c.poison and name == "decode":
        logits = net("Add", logits, net.const(np.nan))
    best = net("ArgMax", logits, axis=-1, keepdims=0)
    first = net(
        "Where",
        net("Greater", start, net.const(0)),
        net.row(old_key, net.const([0], np.int64)),
        net.row(x, net.const([0], np.int64)),
    )
    parts = (states, sums, x, one, net("Sub", sum_key, first))
    hidden = net("Concat", *(net.flat(part, -1, 1) for part in parts), axis=1)

    if many:
        count = net.cast(net.input("draft_count", "draft_count", I32, 1), I64)
        drafts = net(
            "Slice", net.flat(ids), net.const([1], np.int64), net.const([99], np.int64)
        )
        says = net("Slice", best, net.const([0], np.int64), net.const([-1], np.int64))
        order = net.const(np.arange(c.k), np.int64)
        same = net("And", net("Equal", drafts, says), net("Less", order, count))
        chain = net("CumSum", net.cast(same, I64), net.const(0, np.int64))
        stood = net("Equal", chain, net("Add", order, net.const(1, np.int64)))
        accepted = net("ReduceSum", net.cast(stood, I64), keepdims=1)
        last, out = accepted, c.rows
        shown = {"logits": logits, "hidden": hidden, "best": best}
    else:
        accepted = net.const([0], np.int64)
        rows_now = net("Shape", x)
        last, out = net("Sub", rows_now, net.const([1], np.int64)), 1
        shown = {
            "logits": net.row(logits, last),
            "hidden": net.row(hidden, last),
            "best": net.row(best, last),
        }
    kept = last if not many or c.keep_row is None else net.const([c.keep_row], np.int64)
    fed_rows = net("Add", last, net.const([1], np.int64))
    new_length = net("Add", net.cast(length, I64), fed_rows)
    token = net.row(best, last)

    net.output(shown["logits"], "logits", "logits", F, 1, out, c.vocab)
    net.output(shown["hidden"], "hidden", "hidden", F, 1, out, D)
    net.output(shown["best"], "best", "best", I64, 1, out)
    net.output(net("Add", accepted, net.const([0], np.int64)), "accepted", "accepted", I64, 1)
    net.output(token, "next_token", "ids", I64, 1, 1)
    net.output(net.cast(new_length, I32), "next_length", "length", I32, 1)
    peak = net("ReduceMax", shown["logits"], net.const([-1], np.int64), keepdims=0)
    finite = net.cast(net("Equal", net("Sub", peak, peak), net.const(0)), I64)
    parts = (accepted, new_length, net.flat(shown["best"]), net.flat(finite))
    net.output(net("Concat", *parts, axis=0), "result", "result", I64, 2 * out + 2)

    window_at = net("Add", kept, net.const([1, 2], np.int64))
    net.output(
        net.row(window, window_at, axis=1), "present.0.conv", "target.0.conv", F, 1, 2, CONV
    )
    net.output(
        net.row(states, kept), "present.0.recurrent", "target.0.recurrent", F, 1, 1, 1, 1
    )
    for part, cache, new in (("key", key, x), ("value", value, values)):
        grown = write_cache(net, cache, place, new, c.cache_rows)
        shape = (1, 1, c.cache_rows, 1)
        net.output(grown, f"present.1.{part}", f"target.1.{part}", F, *shape)
    if prompt and c.k:
        head_next = net.as_float(net.input("next_ids", "prompt_next", I64, 1, size))
        _head_cache(net, c, place, head_next)
    return net


def _head_cache(net: Net, c: Counting, place: str, tokens: str) -> str:
    """Write the head's own cache and return its new keys [C]."""
    shape, keys = (1, 1, c.cache_rows, 1), ""
    for part in ("value", "key"):
        old = net.flat(net.input(f"head.past.0.{part}", f"head.0.{part}", F, *shape))
        keys = write_cache(net, old, place, tokens, c.cache_rows)
        net.output(keys, f"head.present.0.{part}", f"head.0.{part}", F, *shape)
    return keys


def _draft(c: Counting) -> Net:
    net = Net("draft", c.rows)
    best = net.input("best", "best", I64, 1, c.rows)
    hidden = net.flat(net.input("hidden", "hidden", F, 1, c.rows, D), c.rows, D)
    accepted = net.input("accepted", "accepted", I64, 1)
    length = net.as_float(net.input("length", "length", I32, 1))

    first = net("Sub", length, net("Add", net.cast(accepted, F), net.const(1)))
    place = net("Add", first, net.const(np.arange(c.rows)))
    keys = _head_cache(net, c, place, net.as_float(best))
    counts = net("Less", net.const(np.arange(c.cache_rows)), length)
    held = net.total(net("Where", counts, keys, net.const(0)))

    picked = net.flat(net.row(hidden, accepted))
    state, sums, x, before, since = (
        net.row(picked, net.const([i], np.int64)) for i in range(D)
    )
    token = net.row(net.flat(best), accepted)
    tokens, n, position = [token], net.cast(token, F), length
    intact = net("Equal", held, net("Add", since, n))
    off = net("Where", intact, net.const([0.0]), net.const([2.0]))
    for _ in range(c.k):
        position = net("Add", position, net.const(1))
        state = net.mod(net("Add", state, net("Mul", position, n)), c.vocab)
        sums = net("Add", sums, net("Add", net("Mul", n, net.const(3)), net.const(1)))
        total = net("Add", net("Add", state, sums), net.const(3))
        total = net("Add", total, net("Mul", x, net.const(5)))
        total = net("Add", total, net("Mul", before, net.const(7)))
        if c.miss:
            missed = net("Equal", net.mod(n, c.miss), net.const(0))
            total = net("Add", total, net.cast(missed, F))
        x, before = n, x
        n = net.mod(net("Add", total, off), c.vocab)
        tokens.append(net.cast(n, I64))
    net.output(net("Concat", *tokens, axis=0), "ids", "ids", I64, 1, c.rows)
    return net


def _catch_up(c: Counting) -> Net:
    """The head's cache alone, over S rows from `catch_up.length` on."""
    net = Net("catch_up", None)
    tokens = net.as_float(net.input("next_ids", "prompt_next", I64, 1, "S"))
    hidden = net.input("hidden", "catch_up.hidden", F, 1, "S", D)
    first = net.as_float(net.input("past_length", "catch_up.length", I32, 1))
    ones = net("Add", net("Mul", tokens, net.const(0)), net.const(1))
    place = net("Add", first, net("Sub", net.running(ones), net.const(1)))
    # a row's hidden state tells its token, which follows the row before: else all is off
    said = net.flat(net.row(hidden, net.const([2], np.int64), axis=2))
    one, end = net.const([1], np.int64), net.const([2**31], np.int64)
    later = net("Slice", said, one, end)
    earlier = net("Slice", tokens, net.const([0], np.int64), net.const([-1], np.int64))
    excess = net.total(net("Abs", net("Sub", later, earlier)))
    _head_cache(net, c, place, net("Add", tokens, excess))
    return net


def _write_weights(path: Path, vocab: int) -> Weights:
    """One float32 tensor, 0 .. V-1, as a safetensors file written by hand."""
    data = np.arange(vocab, dtype="<f4").tobytes()
    entry = {"dtype": "F32", "shape": [vocab], "data_offsets": [0, len(data)]}
    header = json.dumps({"vocabulary": entry}).encode()
    header += b" " * (-len(header) % 64)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return Weights(
        file=path.name,
        size=path.stat().st_size,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        tensors={"vocabulary": WeightTensor("float32", (vocab,), 8 + len(header), len(data))},
    )


def _manifest(c: Counting, graphs: dict[str, Graph], weights: Weights) -> Manifest:
    rows, cache = c.rows, (1, 1, c.cache_rows, 1)
    f, i = "float32", "int64"
    buffers = {
        "ids": Buffer(i, (1, rows)),
        "length": Buffer("int32", (1,)),
        "accepted": Buffer(i, (1,)),
        "best": Buffer(i, (1, rows)),
        "hidden": Buffer(f, (1, rows, D)),
        "logits": Buffer(f, (1, rows, c.vocab)),
        "result": Buffer(i, (2 * rows + 2,)),
        "prompt_ids": Buffer(i, (1, c.prefill_rows)),
        "target.1.key": Buffer(f, cache),
        "target.1.value": Buffer(f, cache),
        "target.0.conv": Buffer(f, (1, TAPS - 1, CONV)),
        "target.0.recurrent": Buffer(f, (1, 1, 1, 1)),
    }
    if c.k:
        buffers |= {
            "draft_count": Buffer("int32", (1,)),
            "prompt_next": Buffer(i, (1, c.prefill_rows)),
            "head.0.key": Buffer(f, cache),
            "head.0.value": Buffer(f, cache),
        }
    if c.catch_up:
        buffers |= {
            "catch_up.hidden": Buffer(f, (1, c.prefill_rows, D)),
            "catch_up.length": Buffer("int32", (1,)),
        }
    head = HeadSpec(
        layers=1,
        hidden_source="post_norm",
        feedback="post_norm",
        concat="embed_first",
        cache="own",
        intermediate_size=1,
    )
    spec = ModelSpec(
        family="counting",
        hidden_size=D,
        intermediate_size=1,
        vocab_size=c.vocab,
        layers=(LayerKind.GDN, LayerKind.ATTENTION),
        attention=AttentionSpec(
            query_heads=1, kv_heads=1, head_dim=1, rotary_dim=0, rope_theta=1e4
        ),
        gdn=GdnSpec(
            key_heads=1,
            value_heads=1,
            key_dim=1,
            value_dim=1,
            conv_kernel=TAPS,
            output_gate="silu",
        ),
        rms_norm_eps=1e-6,
        tied_embedding=True,
        max_positions=c.capacity,
        head=head if c.k else None,
    )
    return Manifest(
        producer="tests",
        spec=spec,
        target=Target("cpu", "float32"),
        k=c.k,
        capacity=c.capacity,
        cache_rows=c.cache_rows,
        prefill_rows=c.prefill_rows,
        eos_token_ids=c.eos,
        buffers=buffers,
        graphs=graphs,
        weights=weights,
        files={},
        source=Source(kind=c.kind, name="counting", config_sha256="", left_out=()),
    )
