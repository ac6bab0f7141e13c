import hashlib
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as state
from third_party import NAMES, Target, copy_weights, fill_weights, lay_out

from export.bundles import BundleError
from export.bundles.check import check_bundle
from export.repair import RepairError, repair_bundle

KNOWN = (
    "Type Error: Type parameter (T) of Optype (Add) bound to different types "
    "(tensor(bfloat16) and tensor(float) in node ()."
)
STEPS = ([1, 5, 9, 2], [7], [3, 4], [8])


def load(graph: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return ort.InferenceSession(graph, options, ["CPUExecutionProvider"])


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def codes(folder: Path, provider: str = "cpu") -> set[str]:
    return {finding.code for finding in check_bundle(folder, provider)}


@pytest.mark.parametrize("graph", ["model.onnx", "mtp/model.onnx"])
def test_the_bfloat16_bundle_fails_as_known_and_repaired_to_fp32_loads(
    tmp_path: Path, graph: str
) -> None:
    bundle = lay_out("artifact-bf16-default", tmp_path)
    with pytest.raises(state.Fail) as refused:
        load(bundle / graph)
    assert KNOWN in str(refused.value)
    repair_bundle(bundle, tmp_path / "out", prefer="fp32")
    session = load(tmp_path / "out" / graph)
    before = onnx.load(bundle / graph, load_external_data=False).graph
    after = onnx.load(tmp_path / "out" / graph, load_external_data=False).graph
    assert list(before.input) == list(after.input)
    assert [o.name for o in before.output] == [o.name for o in session.get_outputs()]
    assert {o.type.tensor_type.elem_type for o in after.output} == {16}


def test_repaired_to_bf16_only_cpu_kernels_are_missing_and_none_on_cuda(
    tmp_path: Path,
) -> None:
    bundle = lay_out("artifact-bf16-default", tmp_path)
    repair_bundle(bundle, tmp_path / "out", prefer="bf16")
    typed = {code for code in codes(tmp_path / "out") if code.startswith("types.")}
    assert typed == {"types.kernel"}
    assert not {c for c in codes(tmp_path / "out", "cuda") if c.startswith("types.")}


def test_repaired_to_fp32_it_computes_what_the_float_export_computes(tmp_path: Path) -> None:
    """Both hold the same weights; states pass through bfloat16 once a step."""
    half, full = (lay_out(f"artifact-{k}-default", tmp_path) for k in ("bf16", "f32"))
    fill_weights(half)
    copy_weights(half / "model.onnx", full / "model.onnx")
    repair_bundle(half, tmp_path / "out", prefer="fp32")
    ours, theirs = Target(tmp_path / "out" / "model.onnx"), Target(full / "model.onnx")
    for tokens in STEPS:
        got, expected = ours.step(tokens), theirs.step(tokens)
        assert got.keys() == expected.keys()
        for name, values in expected.items():
            scale = np.abs(values).max()
            np.testing.assert_allclose(got[name], values, atol=0.02 * scale, err_msg=name)


@pytest.mark.parametrize("prefer", [None, "fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_a_second_run_finds_nothing_to_do_and_leaves_every_byte(
    tmp_path: Path, name: str, prefer: str | None
) -> None:
    bundle = lay_out(name, tmp_path)
    repair_bundle(bundle, tmp_path / "once", prefer=prefer)
    assert repair_bundle(tmp_path / "once", tmp_path / "twice", prefer=prefer) == ()
    assert digests(tmp_path / "once") == digests(tmp_path / "twice")


def test_weights_are_never_rewritten(tmp_path: Path) -> None:
    bundle = lay_out("artifact-bf16-default", tmp_path)
    fill_weights(bundle)
    before = {n: d for n, d in digests(bundle).items() if n.endswith(".data")}
    repair_bundle(bundle, tmp_path / "out", prefer="fp32")
    after = digests(tmp_path / "out")
    assert before.items() <= after.items()


def test_the_head_is_given_the_state_after_the_norm(tmp_path: Path) -> None:
    bundle = lay_out("artifact-f32-default", tmp_path)
    text = (bundle / "inference_metadata.yaml").read_text()
    repair = repair_bundle(bundle, tmp_path / "out")[-1]
    assert "mtp.hidden" in codes(bundle) and "mtp.hidden" not in codes(tmp_path / "out")
    mended = (tmp_path / "out" / "inference_metadata.yaml").read_text()
    assert mended == text.replace("_output: hidden_states.3", "_output: hidden_states")
    assert "+ target_hidden_output: hidden_states".replace("+ ", "+  ") in repair.difference


def test_a_target_without_that_state_gets_it_as_an_output(tmp_path: Path) -> None:
    bundle = lay_out("artifact-f32-default", tmp_path)
    model = onnx.load(bundle / "model.onnx", load_external_data=False)
    (output,) = [o for o in model.graph.output if o.name == "hidden_states"]
    model.graph.output.remove(output)
    (node,) = [n for n in model.graph.node if n.output[0] == "hidden_states"]
    model.graph.node.remove(node)
    onnx.save(model, bundle / "model.onnx")
    assert "mtp.hidden" in codes(bundle)
    repair_bundle(bundle, tmp_path / "out")
    assert "mtp.hidden" not in codes(tmp_path / "out")
    assert "hidden_states" in {o.name for o in load(tmp_path / "out/model.onnx").get_outputs()}


def test_repair_leaves_no_finding_that_it_mends(tmp_path: Path) -> None:
    bundle = lay_out("artifact-f16-cuda", tmp_path)
    gone = codes(bundle) - codes((repair_bundle(bundle, tmp_path / "o"), tmp_path / "o")[1])
    assert gone == {"numerics.epsilon", "mtp.hidden"}


def test_the_difference_shows_the_node_before_and_after(tmp_path: Path) -> None:
    bundle = lay_out("artifact-bf16-default", tmp_path)
    repairs = {repair.file: repair for repair in repair_bundle(bundle, tmp_path / "o")}
    before, after = repairs["mtp/model.onnx"].difference
    assert before.startswith("-") and "is_causal: int = 1" in before
    assert after.startswith("+") and "is_causal" not in after


def test_a_dry_run_writes_nothing_and_in_place_replaces_only_what_changed(
    tmp_path: Path,
) -> None:
    bundle = lay_out("artifact-bf16-default", tmp_path)
    before = digests(bundle)
    planned = repair_bundle(bundle, tmp_path / "out", dry_run=True)
    assert digests(bundle) == before and not (tmp_path / "out").exists()
    assert repair_bundle(bundle, bundle) == planned
    changed = {name for name, digest in digests(bundle).items() if before[name] != digest}
    assert changed == {repair.file for repair in planned}
    assert sorted(before) == sorted(digests(bundle))


def test_an_output_that_exists_and_an_unknown_preference_are_refused(tmp_path: Path) -> None:
    bundle = lay_out("oga-fp32-cpu-w0", tmp_path)
    (tmp_path / "out").mkdir()
    with pytest.raises(RepairError, match="exists"):
        repair_bundle(bundle, tmp_path / "out")
    with pytest.raises(RepairError, match="'fp8' is none of fp16, bf16, fp32"):
        repair_bundle(bundle, tmp_path / "new", prefer="fp8")


def test_a_link_in_the_bundle_is_not_followed(tmp_path: Path) -> None:
    bundle = lay_out("oga-fp32-cpu-w0", tmp_path)
    (bundle / "secret").symlink_to("/etc/hostname")
    with pytest.raises(BundleError, match="is a link"):
        repair_bundle(bundle, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["oga-fp32-cpu-w0"]
