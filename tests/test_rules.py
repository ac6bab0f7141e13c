"""Each rule is green on the sample artifact and red on the fault planted for it."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from artifact_samples import (
    CACHE,
    WEIGHTS,
    K,
    M,
    edit_graph,
    edit_manifest,
    node_named,
    write_sample,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from artifacts import Finding, Manifest, Severity, graph_file, rules
from artifacts.buffers import contract_buffers, states
from artifacts.graph_file import read_graph, stored_tensors
from artifacts.rules import RULES, check_artifact

Plant = Callable[[Path], object]


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sample")
    write_sample(folder)
    return folder


@pytest.fixture
def artifact(sample: Path, tmp_path: Path) -> Iterator[Path]:
    yield shutil.copytree(sample, tmp_path / "artifact")


def codes(findings: list[Finding]) -> set[str]:
    return {finding.code for finding in findings}


def edited(path: str, value: Any) -> Plant:
    """A plant that sets one value of the manifest; ``a/b/0`` is its path."""

    def change(values: Any) -> None:
        *way, last = (int(p) if p.isdigit() else p for p in path.split("/"))
        for step in way:
            values = values[step]
        values[last] = value

    return lambda folder: edit_manifest(folder, change)


def dropped(path: str) -> Plant:
    def change(values: Any) -> None:
        *way, last = path.split("/")
        for step in way:
            values = values[step]
        del values[last]

    return lambda folder: edit_manifest(folder, change)


def in_graph(name: str, change: Callable[[onnx.GraphProto], object]) -> Plant:
    return lambda folder: edit_graph(folder, name, change)


def external(key: str, value: str) -> Callable[[onnx.GraphProto], None]:
    def change(graph: onnx.GraphProto) -> None:
        (entry,) = (e for e in graph.initializer[-1].external_data if e.key == key)
        entry.value = value

    return change


def rewritten_header(change: Callable[[dict[str, Any]], object]) -> Plant:
    """A plant that edits the header of the weight file, its length kept."""

    def plant(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        values = json.loads(data[8 : 8 + length])
        change(values)
        text = json.dumps(values).encode().ljust(length)
        (folder / WEIGHTS).write_bytes(data[:8] + text + data[8 + length :])

    return plant


def announced(length: int) -> Plant:
    def plant(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", length) + data[8:])

    return plant


def replaced_by(make: Callable[[Path], object], name: str) -> Plant:
    def plant(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return plant


def linked(name: str) -> Plant:
    def plant(folder: Path) -> None:
        (folder / name).rename(folder.parent / "elsewhere")
        (folder / name).symlink_to(folder.parent / "elsewhere")

    return plant


def resized(name: str, size: int) -> Plant:
    return lambda folder: os.truncate(folder / name, size)


def late_reader(graph: onnx.GraphProto) -> None:
    graph.node.append(helper.make_node("Neg", ["past.0.conv"], ["late"], name="late"))


def late_reader_of_a_view(graph: onnx.GraphProto) -> None:
    node = helper.make_node("Identity", ["past.0.conv"], ["view"], name="view")
    graph.node.insert(0, node)
    node_named(graph, "update target.0.conv").input[1] = "view"
    graph.node.append(helper.make_node("Neg", ["view"], ["late"], name="late"))


def late_reader_in_a_subgraph(graph: onnx.GraphProto) -> None:
    output = helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)
    inner = helper.make_graph(
        [helper.make_node("Neg", ["past.0.conv"], ["inner"])], "inner", [], [output]
    )
    graph.initializer.append(helper.make_tensor("yes", TensorProto.BOOL, [], [True]))
    graph.node.append(
        helper.make_node(
            "If", ["yes"], ["late"], then_branch=inner, else_branch=inner, name="if"
        )
    )


def length_that_waits_for_nothing(graph: onnx.GraphProto) -> None:
    graph.node.append(helper.make_node("Neg", ["past_length"], ["positions"], name="rotary"))


def guess_that_skips_the_cache(graph: onnx.GraphProto) -> None:
    """The last attention reads the caches as the first found them."""
    node = node_named(graph, "attention_2")
    node.input[3], node.input[4] = "head.past.0.key", "head.past.0.value"


def inline_twin(graph: onnx.GraphProto) -> None:
    tensor = graph.initializer[-1]
    tensor.ClearField("external_data")
    tensor.data_location = TensorProto.DEFAULT
    size = 4 * tensor.dims[0] * tensor.dims[1]
    tensor.raw_data = bytes(size)


def large_constant(graph: onnx.GraphProto) -> None:
    graph.initializer.append(
        helper.make_tensor("table", TensorProto.UINT8, [2**20], bytes(2**20), raw=True)
    )


def external_attribute(graph: onnx.GraphProto) -> None:
    value = TensorProto(data_type=TensorProto.FLOAT, dims=[1])
    value.data_location = TensorProto.EXTERNAL
    value.external_data.add(key="location", value=WEIGHTS)
    graph.node.insert(0, helper.make_node("Constant", [], ["c"], value=value, name="constant"))


def append_bytes(folder: Path) -> None:
    with (folder / WEIGHTS).open("ab") as file:
        file.write(bytes(100))


def hole_in_the_weights(folder: Path) -> None:
    """A tensor that manifest, header and graphs forgot alike: its bytes stay."""
    edit_manifest(folder, lambda values: values["weights"]["tensors"].pop("mix"))
    rewritten_header(lambda header: header.pop("mix"))(folder)


def set_dtype(graph: onnx.GraphProto) -> None:
    graph.initializer[-1].data_type = TensorProto.INT32


def half_weight(graph: onnx.GraphProto) -> None:
    graph.initializer[-1].data_type = TensorProto.FLOAT16


def set_output_rows(graph: onnx.GraphProto) -> None:
    (value,) = (v for v in graph.output if v.name == "present.1.key")
    value.type.tensor_type.shape.dim[2].dim_value += 1


def rename_open_size(graph: onnx.GraphProto) -> None:
    graph.input[0].type.tensor_type.shape.dim[1].dim_param = "T"


FALLBACK = {"file": "decode.stock.onnx", "sha256": "0" * 64, "weights": []}


def derived(name, shape, source, part="all"):
    entry = {"dtype": "uint8", "shape": shape, "source": source, "part": part}
    return {name: entry}


TENSORS = "weights/tensors"
CASES: list[tuple[str, Plant, str]] = [
    ("manifest.unreadable", lambda f: (f / "manifest.json").unlink(), "is no artifact"),
    ("manifest.unreadable", lambda f: (f / "manifest.json").write_text("{"), "is not JSON"),
    ("manifest.unreadable", edited("schema", 2), "schema is 2; it must be 1"),
    ("manifest.unreadable", edited("graphs/draft/file", "../x"), "the name of a file"),
    ("manifest.unreadable", replaced_by(os.mkfifo, "manifest.json"), "holds no manifest"),
    (
        "manifest.sizes",
        edited("buffers/ids/shape", [10**300] * 9),
        "ids has 9 axes; at most 8",
    ),
    ("manifest.sizes", edited("buffers/ids/shape", [10**4000]), "has an axis longer than"),
    ("manifest.sizes", edited(f"{TENSORS}/mix/shape", [2**40, 2**40]), "is over 112589"),
    ("manifest.sizes", edited("spec/layers", ["gdn"] * 5000), "5000; at most 4096"),
    (
        "manifest.sizes",
        edited("graphs/draft/inputs/0/shape", ["S", 2**60]),
        "draft:best has an",
    ),
    ("manifest.spec", edited("cache_rows", 12), "capacity 10 and a verify of 3 rows need 13"),
    ("manifest.spec", edited("spec/gdn", None), "layers of kind gdn and says nothing"),
    ("manifest.spec", edited("spec/head", None), "k is 2 and the spec has no head"),
    (
        "manifest.spec",
        edited("buffers/target.0.recurrent/dtype", "float16"),
        r"is float16\[1, 2, 4, 4\]; the spec makes it float32\[1, 2, 4, 4\]",
    ),
    ("manifest.spec", edited("buffers/head.0.key/shape", [1, 1, 9, 4]), "makes it float32"),
    ("manifest.spec", dropped("buffers/draft_count"), "buffer draft_count is missing"),
    (
        "manifest.spec",
        lambda f: edit_manifest(f, lambda v: v["graphs"]["decode"]["inputs"].pop()),
        "decode has no input bound to target.1.value",
    ),
    ("files.missing", lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json is named in"),
    ("files.missing", lambda f: (f / WEIGHTS).unlink(), "weights.safetensors is named in"),
    ("files.missing", lambda f: (f / "draft.onnx").unlink(), "draft.onnx is named in"),
    ("files.irregular", replaced_by(os.mkfifo, "draft.onnx"), "draft.onnx is a named pipe"),
    ("files.irregular", replaced_by(os.mkfifo, WEIGHTS), f"{WEIGHTS} is a named pipe"),
    ("files.irregular", replaced_by(os.mkdir, "tokenizer.json"), "tokenizer.json is a folder"),
    ("files.link", linked(WEIGHTS), "is a symbolic link"),
    ("files.link", linked("decode.onnx"), "is a symbolic link"),
    ("files.link", linked("manifest.json"), "is a symbolic link"),
    ("files.link", lambda f: os.link(f / WEIGHTS, f.parent / "w"), "is one of 2 hard links"),
    ("files.escapes", edited("files", {"../secret": "0"}), "names '../secret'"),
    ("files.escapes", edited("files", {"/etc/passwd": "0"}), "names '/etc/passwd'"),
    ("files.escapes", edited("files", {"nul\0": "0", "\ud800": "0"}), r"names 'nul\\x00'"),
    ("files.escapes", in_graph("verify", external("location", "../w")), r"refers to '\.\./w'"),
    ("files.escapes", in_graph("verify", external("location", "/etc/w")), "'/etc/w'"),
    ("files.escapes", in_graph("verify", external("location", "a\\w")), r"'a\\\\w'"),
    ("files.truncated", resized(WEIGHTS, 5000), r"has 5000 bytes; manifest\.json says 5376"),
    ("files.truncated", resized(WEIGHTS, 5000), r"ends at byte 5\d\d\d; the file has 5000"),
    ("files.truncated", edited(f"{TENSORS}/mix/offset", 2**52), "ends at byte 45035996273707"),
    ("files.truncated", append_bytes, r"has 5476 bytes; manifest\.json says 5376"),
    (
        "files.digest",
        lambda f: (f / "tokenizer.json").write_text("[]"),
        "has the sha256 4f53cda",
    ),
    ("files.digest", edited("weights/sha256", "zz" * 5000), "has the sha256"),
    ("files.orphaned", lambda f: (f / "old.bin").write_text(""), r"old\.bin is in the folder"),
    (
        "files.orphaned",
        lambda f: (f / "\x1b[2J").write_text(""),
        r"\\x1b\[2J is in the folder",
    ),
    (
        "files.orphaned",
        append_bytes,
        "100 of 5476 bytes belong to no tensor, first 5376 to 5476",
    ),
    ("files.orphaned", hole_in_the_weights, "256 of 5376 bytes belong to no tensor"),
    ("weights.header", rewritten_header(lambda h: h.pop("mix")), "not in the header"),
    (
        "weights.header",
        rewritten_header(lambda h: h.update(extra=h["mix"])),
        "extra is in the header of the file and not in",
    ),
    (
        "weights.header",
        rewritten_header(lambda h: h["mix"].update(dtype="I32")),
        r"mix is int32\[8, 8\] at 5120\+256 in the file's header, float32\[8, 8\]",
    ),
    ("weights.header", announced(2**63), "announces a header of 9223372036854775808 bytes"),
    ("weights.header", announced(10), "is not JSON"),
    ("weights.header", resized(WEIGHTS, 3), "has 3 bytes; a weight file begins with 8"),
    ("weights.header", edited(f"{TENSORS}/mix/length", 128), "128 bytes; its shape needs 256"),
    ("weights.header", edited(f"{TENSORS}/mix/length", 0), "0 bytes; its shape needs 256"),
    (
        "weights.header",
        rewritten_header(lambda h: h["mix"].update(data_offsets=[9, 3])),
        "begin <= end",
    ),
    ("weights.overlap", edited(f"{TENSORS}/mix/offset", 5000), "mix begins at byte 5000"),
    ("graphs.unreadable", lambda f: (f / "draft.onnx").write_bytes(b"\xff" * 9), "is no ONNX"),
    ("graphs.unreadable", lambda f: (f / "draft.onnx").write_bytes(b""), "holds no graph"),
    (
        "graphs.unreadable",
        lambda f: (f / "draft.onnx").write_bytes(
            (f / "draft.onnx").read_bytes().replace(WEIGHTS.encode(), b"\xff" * len(WEIGHTS))
        ),
        "holds a name that is not UTF-8 text",
    ),
    (
        "graphs.types",
        in_graph("verify", half_weight),
        "onnx's checker refuses graph verify: .*B has inconsistent type tensor.float16",
    ),
    ("graphs.types", in_graph("decode", set_dtype), "onnx's checker refuses graph decode"),
    (
        "graphs.types",
        in_graph("decode", lambda g: node_named(g, "count").input.__setitem__(0, "nothing")),
        "topologically sorted",
    ),
    (
        "graphs.ports",
        in_graph("decode", set_output_rows),
        r"in the graph and float32\[1, 1, 13",
    ),
    ("graphs.ports", in_graph("prefill", rename_open_size), r"int64\[1, T\] in the graph"),
    (
        "graphs.ports",
        in_graph("draft", lambda g: g.input.pop()),
        "has an input head.past.0.value, the graph has none",
    ),
    (
        "graphs.ports",
        lambda f: edit_manifest(f, lambda v: v["graphs"]["draft"]["outputs"].pop()),
        r"the graph has an output ids, manifest\.json has none",
    ),
    (
        "graphs.ports",
        lambda f: edit_manifest(
            f,
            lambda v: v["graphs"]["draft"]["inputs"].append(v["graphs"]["draft"]["inputs"][0]),
        ),
        "has 2 inputs called best",
    ),
    ("graphs.ports", edited("graphs/draft/inputs/0/buffer", "besst"), "'besst', no buffer of"),
    ("graphs.rows", edited("graphs/verify/rows", 4), "graph verify has rows = 4, not 3"),
    ("graphs.rows", edited("graphs/decode/rows", None), "graph decode has rows = None, not 1"),
    ("graphs.rows", edited("graphs/prefill/rows", 5), "graph prefill has rows = 5, not None"),
    ("graphs.rows", dropped("graphs/draft"), "graph draft is missing; k is 2"),
    ("graphs.rows", edited("k", 0), "graph verify is one too many"),
    (
        "graphs.rows",
        edited("graphs/verify/inputs/0/shape", [1, 2]),
        r"3 rows make it \[1, 3\]",
    ),
    ("graphs.rows", edited("graphs/verify/inputs/0/shape", [1, "S"]), "has the open size 'S'"),
    (
        "graphs.weights",
        in_graph("decode", external("offset", "0")),
        r"lies at 0\+\d+; manifest",
    ),
    ("graphs.weights", in_graph("decode", external("offset", "-1")), r"lies at None\+"),
    (
        "graphs.weights",
        in_graph("decode", external("length", "9" * 5000)),
        r"lies at \d+\+None",
    ),
    ("graphs.weights", in_graph("decode", external("location", "other")), "lies in 'other'"),
    ("graphs.weights", in_graph("decode", set_dtype), "has ONNX type 6 and dims"),
    ("graphs.weights", dropped(f"{TENSORS}/mix"), "knows no tensor so called"),
    (
        "graphs.weights",
        edited("weights/derived", derived("mix", [8, 1, 16], "mix")),
        r"mix lies at \d+\+256; it is unpacked at load, so it must be at \d+\+128, behind",
    ),
    (
        "weights.derived",
        edited("weights/derived", derived("w.q4", [8, 1, 16], "w.w4")),
        "w.q4 is to be unpacked from 'w.w4', and there is no such weight",
    ),
    (
        "weights.derived",
        edited("weights/derived", derived("w.q4", [300, 5, 16], "mix", part="gates")),
        r"w.q4 is \[300, 5, 16\], gates of uint8\[3, 36864\]; 'mix' is float32\[8, 8\]",
    ),
    (
        "weights.derived",
        edited("weights/derived", derived("w.q4", [8], "mix")),
        r"w.q4 is uint8\[8\]; it must be \[N, K / 32, 16\]",
    ),
    (
        "weights.derived",
        edited("weights/derived", derived("mix", [8, 1, 16], "embed")),
        "mix is both in weights.safetensors and to be unpacked",
    ),
    (
        "weights.derived",
        edited("graphs/decode/fallback", FALLBACK),
        "draft has no fallback; decode has one",
    ),
    (
        "graphs.ports",
        edited("graphs/decode/fallback", FALLBACK | {"file": "verify.onnx"}),
        r"decode.stock|input input_ids is",
    ),
    (
        "files.missing",
        edited("graphs/decode/fallback", FALLBACK),
        "decode.stock.onnx is named in manifest.json and is not there",
    ),
    ("graphs.weights", in_graph("decode", inline_twin), "has its bytes in the graph, while"),
    ("graphs.weights", in_graph("decode", large_constant), "bytes in the graph; at most"),
    ("graphs.weights", in_graph("decode", external_attribute), "only initializers may"),
    (
        "graphs.aliases",
        edited("graphs/verify/outputs/0/shape", [1, M + 1, 8]),
        r"hidden is up to \[1, 4, 8\] from element 0 on, more than its buffer hidden",
    ),
    (
        "graphs.aliases",
        edited("prefill_rows", 6),
        "input_ids is up to .1, 6. from element 0 on",
    ),
    (
        "graphs.aliases",
        edited("buffers/ids/dtype", "int32"),
        "input_ids is int64, its buffer ids is int32",
    ),
    (
        "graphs.aliases",
        edited("graphs/decode/outputs/7/shape", [1, 3, 8]),
        r"present.0.conv is \[1, 3, 8\] and lies over past.0.conv, \[1, 3, 16\]; rows of both",
    ),
    (
        "graphs.aliases",
        in_graph("verify", late_reader),
        r"late\(Neg\) reads past.0.conv, and nothing makes it run before update target.0.conv"
        r"\(Add\) writes present.0.conv over it in target.0.conv",
    ),
    ("graphs.aliases", in_graph("verify", late_reader_of_a_view), r"late\(Neg\) reads past"),
    ("graphs.aliases", in_graph("verify", late_reader_in_a_subgraph), r"if\(If\) reads past"),
    (
        "graphs.aliases",
        in_graph("decode", length_that_waits_for_nothing),
        r"rotary\(Neg\) reads past_length, and nothing makes it run before count\(Add\)",
    ),
    (
        "graphs.aliases",
        in_graph("draft", guess_that_skips_the_cache),
        "are both written to head.0.key, and nothing makes",
    ),
]


@pytest.mark.parametrize(("code", "plant", "message"), CASES)
def test_a_planted_fault_is_found(
    artifact: Path, code: str, plant: Plant, message: str
) -> None:
    plant(artifact)
    findings = check_artifact(artifact)
    told = [finding.message for finding in findings if finding.code == code]
    assert any(re.search(message, text) for text in told), findings
    for finding in findings:
        assert finding.remedy == RULES[finding.code].remedy


def test_every_rule_has_a_planted_fault() -> None:
    assert {code for code, _, _ in CASES} == set(RULES)


def test_the_sample_has_no_findings(sample: Path) -> None:
    assert check_artifact(sample) == []
    assert check_artifact(sample, digests=False) == []


def test_a_sample_without_head_has_no_findings(artifact: Path) -> None:
    def without_head(values: dict[str, Any]) -> None:
        values["k"], values["spec"]["head"] = 0, None
        for name in ("verify", "draft"):
            del values["graphs"][name]
            (artifact / f"{name}.onnx").unlink()
        ports = values["graphs"]["prefill"]
        for kind in ("inputs", "outputs"):
            ports[kind] = [p for p in ports[kind] if not _of_head(p["name"])]
        for name in ("draft_count", "prompt_next", "head.0.key", "head.0.value"):
            del values["buffers"][name]
        for name in ("ids", "best", "hidden", "logits"):
            values["buffers"][name]["shape"][1] = 1
        values["buffers"]["result"]["shape"] = [4]
        for name in ("key", "value"):
            values["buffers"][f"target.1.{name}"]["shape"] = CACHE

    def without_head_ports(graph: onnx.GraphProto) -> None:
        for ports in (graph.input, graph.output):
            for value in [v for v in ports if _of_head(v.name)]:
                ports.remove(value)
        for node in [n for n in graph.node if n.name.startswith("update head")]:
            graph.node.remove(node)

    edit_manifest(artifact, without_head)
    edit_graph(artifact, "prefill", without_head_ports)
    assert check_artifact(artifact) == []


def _of_head(name: str) -> bool:
    return name.startswith("head.") or name == "next_ids"


@pytest.mark.parametrize(
    "plant",
    [
        lambda f: (f / "tokenizer.json").unlink(),
        lambda f: (f / WEIGHTS).unlink(),
        lambda f: (f / "draft.onnx").unlink(),
        replaced_by(os.mkfifo, "draft.onnx"),
        linked(WEIGHTS),
        lambda f: (f / "tokenizer.json").write_text("[]"),
        rewritten_header(lambda h: h.pop("mix")),
        in_graph("verify", late_reader),
        edited("cache_rows", 12),
        lambda f: (f / "old.bin").write_text(""),
        edited("graphs/verify/rows", 4),
        in_graph("prefill", rename_open_size),
    ],
)
def test_one_fault_is_told_by_few_rules(artifact: Path, plant: Plant) -> None:
    plant(artifact)
    assert 1 <= len(codes(check_artifact(artifact))) <= 2


def test_digests_are_left_out_on_request(artifact: Path) -> None:
    (artifact / "tokenizer.json").write_text("[]")
    assert codes(check_artifact(artifact)) == {"files.digest"}
    assert check_artifact(artifact, digests=False) == []


def test_progress_ends_at_the_bytes_of_all_files(sample: Path) -> None:
    seen: list[tuple[int, int]] = []
    check_artifact(sample, on_progress=lambda done, total: seen.append((done, total)))
    sizes = [p.stat().st_size for p in sample.iterdir() if p.name != "manifest.json"]
    assert seen[-1] == (sum(sizes), sum(sizes))
    assert seen == sorted(seen)


def test_a_hard_link_is_a_warning_and_a_symbolic_one_an_error(artifact: Path) -> None:
    os.link(artifact / WEIGHTS, artifact.parent / "twin")
    assert [f.severity for f in check_artifact(artifact)] == [Severity.WARNING]
    linked("draft.onnx")(artifact)
    assert [f.severity for f in check_artifact(artifact)] == [Severity.ERROR, Severity.WARNING]


@pytest.mark.parametrize("kind", ["nowhere", "file", "link to itself", "nul"])
def test_a_folder_that_is_none_is_one_finding(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / ("nul\0" if kind == "nul" else "folder")
    if kind == "file":
        folder.write_text("")
    elif kind == "link to itself":
        folder.symlink_to(folder)
    (finding,) = check_artifact(folder)
    assert finding.code == "manifest.unreadable"
    assert finding.severity is Severity.ERROR


def test_a_flood_of_faults_is_told_in_short(artifact: Path) -> None:
    tensor = {"dtype": "int8", "shape": [1], "offset": 4096, "length": 2}
    edit_manifest(
        artifact,
        lambda values: values["weights"]["tensors"].update(
            {f"{'long' * 1000}{i}": tensor for i in range(200)}
        ),
    )
    findings = [f for f in check_artifact(artifact) if f.code == "weights.header"]
    assert len(findings) == rules.MOST_FAULTS + 1
    assert findings[-1].message == "380 more places where this does not hold"
    assert max(len(f.message) for f in findings) <= rules.MOST_CHARACTERS


def test_a_graph_over_the_limit_is_not_read(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_file, "MAX_GRAPH_BYTES", 100)
    told = [f for f in check_artifact(artifact) if f.code == "graphs.unreadable"]
    assert len(told) == 4
    assert "has over 100 bytes" in told[0].message


def test_graphs_are_checked_without_their_weights(artifact: Path) -> None:
    (artifact / WEIGHTS).unlink()
    assert codes(check_artifact(artifact)) == {"files.missing"}


def test_in_place_updates_by_one_attention_after_another_are_right(sample: Path) -> None:
    draft = Manifest.read(sample).graphs["draft"]
    written = [port.name for port in draft.outputs if port.buffer == "head.0.key"]
    assert len(written) == K + 1
    assert check_artifact(sample) == []


def test_a_copy_that_views_its_input_may_be_read_afterwards(artifact: Path) -> None:
    """`present` as a plain copy of `past`: a reader of `present` reads what is there."""

    def change(graph: onnx.GraphProto) -> None:
        node = node_named(graph, "update target.0.conv")
        node.op_type = "Identity"
        del node.input[1:]
        graph.node.append(helper.make_node("Neg", ["present.0.conv"], ["after"], name="after"))

    edit_graph(artifact, "verify", change)
    assert check_artifact(artifact) == []


def test_tensors_of_subgraphs_and_attributes_are_found(artifact: Path) -> None:
    edit_graph(artifact, "decode", external_attribute)
    edit_graph(artifact, "decode", late_reader_in_a_subgraph)
    found = {t.name: t for t in stored_tensors(read_graph(artifact / "decode.onnx"))}
    assert found["constant(Constant).value"].external == graph_file.External(WEIGHTS, 0, None)
    assert found["embed"].is_initializer and not found["yes"].external


@pytest.mark.parametrize("provider", ["cpu", "cuda"])
def test_buffers_of_the_contract_are_those_of_the_sample(
    tmp_path: Path, provider: str
) -> None:
    manifest = write_sample(tmp_path, provider)
    assert contract_buffers(manifest) == manifest.buffers
    assert {state.buffer for state in states(manifest).values()} == {
        name for name in manifest.buffers if name.startswith(("target.", "head."))
    }


@pytest.fixture
def on_cuda(tmp_path: Path) -> Path:
    write_sample(tmp_path, "cuda")
    return tmp_path


def test_states_of_all_layers_may_lie_in_one_buffer(on_cuda: Path) -> None:
    assert check_artifact(on_cuda) == []


def test_a_state_at_another_slot_is_found(on_cuda: Path) -> None:
    edited("graphs/decode/inputs/2/offset", 32)(on_cuda)
    (finding,) = check_artifact(on_cuda)
    assert finding.code == "manifest.spec"
    assert finding.message == (
        "decode has no input bound to target.0.conv, elements 96 to 144 of target.conv"
    )


def test_a_port_that_begins_too_late_in_its_buffer_is_found(on_cuda: Path) -> None:
    edited("graphs/decode/outputs/7/offset", 97)(on_cuda)
    told = [f.message for f in check_artifact(on_cuda) if f.code == "graphs.aliases"]
    assert told == [
        "present.0.conv is up to [1, 3, 16] from element 97 on, more than its buffer "
        "target.conv of [3, 3, 16]"
    ]


def test_a_view_that_is_read_before_it_is_written_is_found(on_cuda: Path) -> None:
    def pick_without_waiting(graph: onnx.GraphProto) -> None:
        node_named(graph, "commit conv").input[1] = "accepted"

    edit_graph(on_cuda, "verify", pick_without_waiting)
    told = [f.message for f in check_artifact(on_cuda) if f.code == "graphs.aliases"]
    assert (
        "commit conv(Gather) reads rows.conv, a view of rows.conv, and nothing makes it run "
        "after scan conv(Add) writes rows.0.conv there"
    ) in told


def test_a_commit_over_windows_still_read_is_found(on_cuda: Path) -> None:
    def read_late(graph: onnx.GraphProto) -> None:
        graph.node.append(helper.make_node("Neg", ["past.0.conv"], ["late"], name="late"))

    edit_graph(on_cuda, "verify", read_late)
    (finding,) = check_artifact(on_cuda)
    assert finding.message.startswith("late(Neg) reads past.0.conv, and nothing makes it run")


def test_later_guesses_may_read_the_first_ones_cache_once_they_wait(artifact: Path) -> None:
    """Attention appends: in the same memory it finds what the attention before it wrote."""

    def change(graph: onnx.GraphProto) -> None:
        for i in (1, 2):
            node = node_named(graph, f"attention_{i}")
            node.input[0] = f"attended_{i - 1}"
            node.input[3], node.input[4] = "head.past.0.key", "head.past.0.value"

    edit_graph(artifact, "draft", change)
    assert check_artifact(artifact) == []


def test_a_reader_of_the_shape_alone_may_come_late(artifact: Path) -> None:
    def change(graph: onnx.GraphProto) -> None:
        graph.node.append(helper.make_node("Shape", ["past.0.conv"], ["sizes"], name="sizes"))

    edit_graph(artifact, "verify", change)
    assert check_artifact(artifact) == []


def test_the_artifacts_room_itself_loads_no_onnx() -> None:
    code = "import sys, artifacts, artifacts.buffers; sys.exit('onnx' in sys.modules)"
    root = Path(rules.__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


def test_rules_explain_themselves() -> None:
    for code, rule in RULES.items():
        assert rule.code == code
        assert rule.title and rule.explanation and rule.remedy
        assert rule.explanation.endswith(".")


RELAXED = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@given(data=st.data())
@RELAXED
def test_no_bytes_of_a_manifest_make_the_check_raise(
    sample: Path, data: st.DataObject
) -> None:
    _corrupt(sample / "manifest.json", data)


@given(data=st.data())
@RELAXED
def test_no_bytes_of_a_graph_make_the_check_raise(sample: Path, data: st.DataObject) -> None:
    _corrupt(sample / "verify.onnx", data)


@given(data=st.data())
@RELAXED
def test_no_bytes_of_a_header_make_the_check_raise(sample: Path, data: st.DataObject) -> None:
    _corrupt(sample / WEIGHTS, data, upto=400)


def _corrupt(path: Path, data: st.DataObject, upto: int | None = None) -> None:
    """Overwrite or cut a few bytes, check, and put the file back."""
    whole = path.read_bytes()
    changed = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, (upto or len(whole)) - 1))
        width = data.draw(st.integers(0, 9))
        changed[at : at + width] = data.draw(st.binary(max_size=9))
    try:
        path.write_bytes(changed)
        findings = check_artifact(path.parent)
    finally:
        path.write_bytes(whole)
    assert all(isinstance(finding, Finding) for finding in findings)
    assert findings or path.name == "manifest.json" or changed == whole


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from([2**53, 10**400, "../x", "\ud800", "S", "float32", "ids", 0, -1]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)  # fmt: skip


@given(data=st.data(), value=JSON)
@settings(RELAXED, max_examples=150)
def test_no_value_in_a_manifest_makes_the_check_raise(
    sample: Path, data: st.DataObject, value: Any
) -> None:
    path = sample / "manifest.json"
    whole = path.read_text()
    values = place = json.loads(whole)
    while True:
        keys = list(place) if isinstance(place, dict) else range(len(place))
        key = data.draw(st.sampled_from(list(keys)))
        if (
            not isinstance(place[key], dict | list)
            or not place[key]
            or data.draw(st.booleans())
        ):
            break
        place = place[key]
    place[key] = value
    try:
        path.write_text(json.dumps(values))
        findings = check_artifact(sample, digests=False)
    finally:
        path.write_text(whole)
    assert all(isinstance(finding, Finding) for finding in findings)
    json.dumps([finding.to_json() for finding in findings]).encode()
