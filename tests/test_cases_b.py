"""Public reports of CUDA graphs that are refused or go wrong, foretold without a device."""

import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from third_party import lay_out
from tiny_bundle import findings, write

from export.bundles.check import check_bundle


def told(bundle: Path, provider: str = "cuda") -> list[tuple[str, str]]:
    return [(f.code, f.place) for f in findings(bundle, provider, "capture")]


def test_b01_each_node_that_would_run_on_the_cpu_is_named_with_the_reason(
    tmp_path: Path,
) -> None:
    bundle = write(
        tmp_path / "b",
        """g (float[2,2,2] x) => (float[2] y, float[2] z) {
            a = Relu(x)
            [first] d = Det(a)
            y = Relu(d)
            [second] z = Det(a)
        }""",
    )
    found = findings(bundle, "cuda", "capture")
    assert [(f.code, f.place) for f in found] == [
        ("capture.cpu", "target:first(Det)"),
        ("capture.cpu", "target:second(Det)"),
    ]
    assert "Det of float has a kernel on the CPU alone" in found[0].message
    assert told(bundle, "cpu") == []


IF = """g (bool c, float[2] x) => (float[2] y) {
    [choice] y = If (c) <
        then_branch = t () => (float[2] a) { a = Relu(x) },
        else_branch = e () => (float[2] b) { b = Neg(x) }>
}"""
SCAN = """g (float[2] s, float[3,2] x) => (float[2] y) {
    [recurrence] y, rows = Scan <num_scan_inputs = 1, body = step (
        float[2] past, float[2] row) => (float[2] next, float[2] out) {
        next = Add(past, row)  out = Identity(next)
    }> (s, x)
}"""


@pytest.mark.parametrize(("text", "name"), [(IF, "choice(If)"), (SCAN, "recurrence(Scan)")])
def test_b03_control_flow_is_told(tmp_path: Path, text: str, name: str) -> None:
    bundle = write(tmp_path / "b", text)
    assert ("capture.control_flow", f"target:{name}") in told(bundle)
    assert told(bundle, "cpu") == []


def test_b03_control_flow_in_a_body_that_is_inlined_is_told(tmp_path: Path) -> None:
    bundle = lay_out("artifact-f32-default", tmp_path)
    model = onnx.load(bundle / "model.onnx", load_external_data=False)
    assert "capture.control_flow" not in {code for code, _ in told(bundle)}
    for function in model.functions:  # no kernel has that name, so its body's Scan would run
        function.domain = "somewhere"
    for node in model.graph.node:
        node.domain = "somewhere" if node.domain else ""
    model.opset_import.append(onnx.helper.make_opsetid("somewhere", 1))
    onnx.save(model, bundle / "model.onnx")
    places = [place for code, place in told(bundle) if code == "capture.control_flow"]
    assert places == ["target:somewhere.LinearAttention"]


def test_b07_a_number_that_the_host_reads_is_told(tmp_path: Path) -> None:
    bundle = write(
        tmp_path / "b",
        """g (float[1,4] x, int64[2] wanted) => (float y) {
            fixed = Shape(x)
            a = Expand(x, fixed)
            [grown] b = Expand(a, wanted)
            y = ReduceMax<keepdims = 0>(b)
        }""",
    )
    (found,) = findings(bundle, "cuda", "capture")
    assert (found.code, found.place) == ("capture.host_input", "target:grown(Expand):shape")
    assert "'wanted'" in found.message


def test_b07_sizes_that_a_run_chooses_are_told(tmp_path: Path) -> None:
    bundle = write(
        tmp_path / "b", "g (float[batch,4] x) => (float[batch,4] y) { y = Relu(x) }"
    )
    (found,) = findings(bundle, "cuda", "capture")
    assert (found.code, found.place) == ("capture.dynamic", "target:x")
    assert "x[batch,4]" in found.message


def test_b08_a_state_that_is_read_after_it_is_overwritten_is_told(tmp_path: Path) -> None:
    right = """g (float[1,2] past__0__conv, float[1,2] x) => (float[1,2] present__0__conv) {
        kept = Mul(past__0__conv, x)  present__0__conv = Add(past__0__conv, kept)
    }"""
    wrong = """g (float[1,2] past__0__conv, float[1,2] x)
            => (float[1,2] present__0__conv, float[1,2] y) {
        present__0__conv = Add(past__0__conv, x)  y = Mul(past__0__conv, x)
    }"""
    for name, text, count in (("right", right, 0), ("wrong", wrong, 1)):
        codes = [code for code, _ in told(write(tmp_path / name, text))]
        assert codes.count("capture.alias_order") == count, name


def test_b12_a_bundle_that_cannot_be_captured_is_told_within_seconds(tmp_path: Path) -> None:
    bundle = lay_out("artifact-int4-f32-cpu", tmp_path)
    with (bundle / "model.onnx.data").open("r+b") as data:
        data.truncate(17 * 2**30)  # sparse; as large as the artifact of that report
    start = time.perf_counter()
    found = [f for f in check_bundle(bundle, "cuda") if f.code.startswith("capture.")]
    assert time.perf_counter() - start < 2
    assert [f.place.split(":")[1] for f in found if f.code == "capture.cpu"] == [
        "node_GroupQueryAttention_28(GroupQueryAttention)",
        "node_GroupQueryAttention_10(GroupQueryAttention)",
    ]
    assert all(f.remedy for f in found) and np.all([f.severity == "warning" for f in found])
