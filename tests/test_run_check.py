"""Artifacts with one fault each: the check must name it, and find nothing in a sound one."""

import hashlib
import json

import pytest
from counting_artifact import Counting
from test_tokenizer import INNER

from artifacts import Manifest, Severity
from runtime.check import check_run


def findings_of(counting: Counting, folder) -> dict[tuple[str, Severity], list[str]]:
    found: dict[tuple[str, Severity], list[str]] = {}
    for finding in check_run(counting.write(folder)):
        assert finding.remedy
        assert finding.place
        found.setdefault((finding.code, finding.severity), []).append(finding.message)
    assert found.pop(KERNELS) == ["kernels in use: stock"]
    return found


NOTE, WARNING, ERROR = Severity.NOTE, Severity.WARNING, Severity.ERROR
KERNELS = ("run.kernels", NOTE)
SOUND = {("run.rows", NOTE), ("run.lossless", NOTE), ("run.acceptance", NOTE)}


@pytest.mark.parametrize(
    "counting", [Counting(), Counting(k=1), Counting(miss=0), Counting(prefill_rows=2)]
)
def test_a_sound_artifact_has_notes_only(tmp_path, counting):
    found = findings_of(counting, tmp_path)
    assert found.keys() == SOUND
    cases = (counting.rows + 1) * counting.rows // 2
    assert f"equals decode in {cases} cases" in found["run.rows", NOTE][0]
    assert "all 139 tokens are those of plain decoding" in found["run.lossless", NOTE][0]


def test_an_artifact_without_a_head_is_sound(tmp_path):
    assert findings_of(Counting(k=0), tmp_path) == {}


@pytest.mark.parametrize("capacity", [6, 7, 8])
def test_a_small_capacity_is_checked_too(tmp_path, capacity):
    assert findings_of(Counting(capacity=capacity), tmp_path).keys() == SOUND


def test_a_capacity_without_room_for_a_step_is_an_error(tmp_path):
    found = findings_of(Counting(capacity=5), tmp_path)
    assert found.keys() == {("run.step", ERROR)}


@pytest.mark.parametrize("row", [0, 1, 2, 3])
def test_a_verify_that_keeps_another_rows_state_is_found(tmp_path, row):
    found = findings_of(Counting(keep_row=row), tmp_path)
    states = [m for m in found["run.rows", ERROR] if "recurrent" in m or "conv" in m]
    assert len(states) == 2
    assert len(found["run.lossless", ERROR]) == 3


def test_a_verify_that_computes_something_else_is_found(tmp_path):
    found = findings_of(Counting(verify_bump=1.0), tmp_path)
    assert any("logits after verify" in message for message in found["run.rows", ERROR])
    assert "token 1 is 300 with drafts and 299" in found["run.lossless", ERROR][0]


def test_near_ties_are_notes_with_their_gap(tmp_path):
    found = findings_of(Counting(decode_bump=0.4999, verify_bump=0.5001), tmp_path)
    assert not any(severity is ERROR for _, severity in found)
    ties = found["run.lossless", NOTE]
    assert "near tie in prompt 1: token 1 is 300 with drafts and 299 without" in ties[0]
    assert "43 more near ties in prompt 1" in ties


def test_a_bump_that_decides_nothing_differently_is_judged_by_the_tolerance(tmp_path):
    assert findings_of(Counting(verify_bump=0.001), tmp_path).keys() == SOUND
    found = findings_of(Counting(verify_bump=0.4), tmp_path)
    assert ("run.rows", ERROR) in found
    assert ("run.lossless", ERROR) not in found


def test_nan_is_found(tmp_path):
    found = findings_of(Counting(poison=True), tmp_path)
    assert found.keys() == {("run.finite", ERROR)}
    assert "the decode graph gave NaN" in found["run.finite", ERROR][0]


def test_a_head_that_is_never_right_is_a_warning(tmp_path):
    found = findings_of(Counting(miss=1), tmp_path)
    assert ("run.acceptance", WARNING) in found
    assert "0 drafts accepted" in found["run.acceptance", WARNING][0]


def test_random_weights_are_not_expected_to_be_right(tmp_path):
    found = findings_of(Counting(miss=1, kind="synthetic"), tmp_path)
    assert found.keys() == SOUND


def test_what_does_not_load_is_one_finding(tmp_path):
    folder = Counting().write(tmp_path)
    (folder / "verify.onnx").write_bytes(b"")
    (finding,) = check_run(folder)
    assert (finding.code, finding.severity) == ("run.load", ERROR)
    (finding,) = check_run(tmp_path / "nowhere")
    assert (finding.code, finding.severity) == ("run.load", ERROR)


def test_a_tokenizer_gives_the_prompts_and_is_checked(tmp_path):
    folder = Counting(capacity=128).write(tmp_path)
    (folder / "tokenizer.json").write_text(INNER.to_str())
    manifest = json.loads((folder / "manifest.json").read_text())
    digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    manifest["files"] = {"tokenizer.json": digest}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert Manifest.read(folder).files
    assert {f.code for f in check_run(folder)} == {code for code, _ in (*SOUND, KERNELS)}
    (folder / "tokenizer.json").write_text("{}")
    assert [f.code for f in check_run(folder)] == ["run.load"]


def test_progress_is_told_and_findings_are_worst_first(tmp_path):
    told: list[str] = []
    folder = Counting(keep_row=0).write(tmp_path)
    findings = check_run(folder, progress=told.append)
    assert told[0] == "loading"
    assert "verify against decode" in told
    order = [list(Severity).index(f.severity) for f in findings]
    assert order == sorted(order)
