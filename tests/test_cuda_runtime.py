"""The runtime on ONNX Runtime's CUDA provider, without a GPU: what is called, not numbers.

Each artifact lives one life in a process of its own (cuda_scenario.py, cuda_refusals.py); the
tests look at what was recorded.
"""

from __future__ import annotations

import json
from pathlib import Path

import dryrun
import pytest
from cuda_artifacts import add_control_flow, build_demo, run_in_dry_run

HERE = Path(__file__).parent

KERNELS = {
    # (dtype, k): of one decode, one verify, one draft
    ("float16", 3): (149, 167, 79),
    ("float16", 7): (149, 167, 171),
    ("bfloat16", 3): (150, 168, 82),
    ("bfloat16", 7): (150, 168, 178),
}
"""Kernels and cuBLAS products a run launches: what a step costs besides reading weights."""
WEIGHT_BYTES = 14_255_616
"""Of the demo checkpoint in 16 bits, each tensor rounded up to 256 bytes."""
SESSION_BYTES = 2 << 20
"""More than the four sessions take on the device for constants and workspaces."""
CAPTURED = ("decode", "verify", "draft")


class Life:
    """What was recorded of one artifact."""

    def __init__(self, folder: Path, script: str, scratch: Path) -> None:
        self.folder = folder
        self.recordings, self.facts = run_in_dry_run(HERE / script, folder, scratch)
        self.manifest = json.loads((folder / "manifest.json").read_text())
        self.rows = self.manifest["k"] + 1

    def __getitem__(self, recording: str) -> dict:
        return self.recordings[recording]

    def result_copy(self, rows: int) -> str:
        return f"D2H {8 * (2 * rows + 2)} pinned"


@pytest.fixture(scope="module", params=KERNELS, ids=lambda key: f"{key[0]}-k{key[1]}")
def life(request, tmp_path_factory) -> Life:
    dtype, k = request.param
    scratch = tmp_path_factory.mktemp("cuda")
    made = Life(build_demo(scratch / "demo", dtype, k), "cuda_scenario.py", scratch)
    made.kernels = dict(zip(CAPTURED, KERNELS[request.param], strict=True))
    return made


@pytest.fixture(scope="module")
def refused(tmp_path_factory) -> Life:
    scratch = tmp_path_factory.mktemp("refused")
    folder = add_control_flow(build_demo(scratch / "demo", "float16", 3))
    return Life(folder, "cuda_refusals.py", scratch)


# loading


def test_decode_verify_and_draft_are_captured_once_with_nothing_forbidden_inside(life):
    assert life["load"]["captures"] == 3
    assert life["load"]["forbidden"] == []
    late = ("prefill", "catch_up", "decode_sampled", "verify_sampled")
    assert life.facts["states"] == dict.fromkeys(late, "cold") | dict.fromkeys(
        CAPTURED, "captured"
    )


def test_a_capture_leaves_the_buffers_as_they_were(life):
    assert life.facts["after load"] == {"length": True, "ids": True, "best": True}


def test_nothing_of_a_captured_graph_is_left_to_the_cpu(life):
    assert [life.facts[f"on host {name}"] for name in CAPTURED] == [[], [], []]


@pytest.mark.parametrize("name", CAPTURED)
def test_a_graph_launches_as_many_kernels_as_it_did(life, name):
    eager = life[f"eager {name}"]
    assert len(eager["launches"]) == life.kernels[name]
    assert (eager["captures"], eager["replays"], eager["syncs"]) == (0, 0, 0)


def test_a_capture_holds_all_kernels_of_its_graph(life):
    assert len(life["load"]["captured"]) == sum(life.kernels.values())


def test_weights_are_uploaded_once_for_all_four_sessions(life):
    memory = life.facts["memory"]
    buffers = sum(
        _bytes(buffer["dtype"], buffer["shape"])
        for buffer in life.manifest["buffers"].values()
    )
    assert memory["weights"] == WEIGHT_BYTES
    assert memory["buffers"] == buffers
    assert 0 <= memory["sessions"] < SESSION_BYTES
    uploads = [copy for copy in life["load"]["copies"] if copy.startswith("H2D")]
    sent = sum(int(copy.split()[1]) for copy in uploads)
    assert WEIGHT_BYTES - 128 * 256 <= sent < WEIGHT_BYTES + 100_000


def _bytes(dtype: str, shape: list[int]) -> int:
    size = {"float32": 4, "int32": 4, "int64": 8}.get(dtype, 2)
    for length in shape:
        size *= length
    return size


def test_all_that_is_done_is_announced(life):
    announced = life.facts["announced"]
    assert announced[-7:] == [
        "prefill", *CAPTURED, *(f"{name}: capture" for name in CAPTURED)
    ]  # fmt: skip
    assert announced[-8] == "weights, 100 % of 14 MB"
    assert len(announced) < 120


# the decoding loop


def test_a_step_with_drafts_is_two_replays_one_copy_and_one_wait(life):
    step = life["mtp step"]
    assert step["replays"] == 2
    assert step["launches"] == []
    assert step["copies"] == [life.result_copy(life.rows)]
    assert (step["syncs"], step["captures"], step["device_bytes"]) == (1, 0, 0)


def test_a_step_of_plain_decoding_is_one_replay_one_copy_and_one_wait(life):
    step = life["plain step"]
    assert step["replays"] == 1
    assert step["launches"] == []
    assert step["copies"] == [life.result_copy(1)]
    assert (step["syncs"], step["captures"], step["device_bytes"]) == (1, 0, 0)


def test_a_step_without_drafts_keeps_the_last_rows_for_the_head(life):
    step = life["decode step"]
    assert step["replays"] == 1
    assert step["launches"] == []
    assert step["copies"] == ["D2H 1024 pinned", life.result_copy(1)]  # two rows of 256
    assert (step["syncs"], step["captures"], step["device_bytes"]) == (2, 0, 0)


@pytest.mark.parametrize("name", ["first mtp step", "mtp step with fewer drafts"])
def test_the_draft_count_is_sent_only_when_it_changes(life, name):
    assert life[name]["copies"] == ["H2D 4 pinned", life.result_copy(life.rows)]
    assert life[name]["syncs"] == 1


def test_steps_of_both_kinds_in_turn_replay_and_the_head_takes_in_what_it_missed(life):
    steps = life["20 steps"]
    assert steps["replays"] == 7 + 2 * 13
    assert (steps["captures"], steps["forbidden"]) == (0, [])
    assert life.facts["catch-ups"] == 7
    assert len(steps["launches"]) == 7 * 12


def test_the_graphs_that_sample_are_captured_when_they_are_wanted(life):
    first, step, plain = (life[f"sampled {what}"] for what in ("prompt", "step", "decode"))
    assert (first["captures"], first["forbidden"]) == (2, [])
    assert life.facts["sampled states"] == ["captured", "captured"]
    assert life.facts["sampled on host"] == [[], []]
    assert (step["replays"], step["launches"], step["captures"]) == (2, [], 0)
    noise = f"H2D {life.rows * 256 * 4} pinned"
    counts = [copy for copy in step["copies"] if copy not in (noise, "H2D 4 pinned")]
    assert noise in step["copies"]
    assert counts == [life.result_copy(life.rows)]
    assert step["syncs"] == 1
    assert (plain["replays"], plain["launches"]) == (1, [])
    assert plain["copies"] == ["H2D 1024 pinned", life.result_copy(1)]


def test_a_prefill_reads_the_length_anew(life):
    """ONNX Runtime wants it on the host, and copies a bound device value only once."""
    copies = life["prefill"]["copies"]
    assert copies[:3] == ["H2D 40 pinned", "H2D 40 pinned", "D2H 4 pinned"]
    assert copies[-1] == life.result_copy(1)
    again = life["another prompt"]["copies"]
    assert again.count("D2H 4 pinned") == life.facts["chunks"] == 3


def test_a_prompt_of_another_length_leaves_the_captures_alive(life):
    assert life["another prompt"]["captures"] == 0
    assert life["another prompt"]["replays"] == 2 * 19 + 1
    assert life.facts["tokens"] == [7] * 40
    assert all("captures=1 " in line for line in life.facts["lines"])


@pytest.mark.parametrize("graph", ["draft", "verify"])
def test_an_interrupt_inside_a_step_loses_the_sequence_and_no_capture(life, graph):
    assert life.facts[f"lost after {graph}"]
    after = life[f"after an interrupt of {graph}"]
    assert (after["captures"], after["replays"]) == (0, 2)


def test_lines_and_json_count_the_same_replays(life):
    labels = {
        "decode": "cuda_graph",
        "verify": "cuda_graph_verify",
        "draft": "cuda_graph_draft",
        "decode_sampled": "cuda_graph_sampled",
        "verify_sampled": "cuda_graph_verify_sampled",
    }
    lines = dict(line.split(": ", 1) for line in life.facts["lines"])
    assert list(lines) == list(labels.values())
    for label in labels.values():
        counters = life.facts["stats"][label]
        shown = {key: counters[key] for key in counters if key != "runs"}
        assert lines[label] == " ".join(f"{key}={count}" for key, count in shown.items())
        assert (shown["captures"], shown["fallbacks"], shown["invalidations"]) == (1, 0, 0)
        assert shown["replays"] > 0


# buffers


def test_buffers_on_the_device_are_read_and_written_as_declared(life):
    assert life.facts["logits kept"]
    assert life.facts["reset clears logits"]
    assert life.facts["reset keeps caches"]
    assert life.facts["kept"] == 5
    assert "99] from element 0 on does not fit" in life.facts["misfit"]
    assert "holds int64, not int32" in life.facts["mistype"]
    assert life["reset"]["copies"] == []
    assert life["reset"]["syncs"] == 0


# misuse


def test_what_a_capture_cannot_follow_is_refused(life):
    assert "captured on another thread" in life.facts["another thread"]
    assert "is captured and cannot be captured" in life.facts["captured twice"]
    assert f"has {life.rows} rows every run, not 99" in life.facts["another shape"]
    assert "bound to 'length' at" in life.facts["moved"]
    assert life.facts["lines after misuse"] == life.facts["lines"]


def test_a_closed_artifact_runs_nothing(life):
    assert ["closed. Open" in message for message in life.facts["closed"]] == [True, True]


# what cannot be captured


def test_a_graph_that_cannot_be_captured_runs_on_and_says_so_once(refused):
    facts = refused.facts
    (warning,) = facts["warnings"]
    assert warning.startswith("the decode graph cannot be captured")
    assert "control flow nodes" in warning
    assert facts["warnings later"] == facts["warnings"]
    assert facts["states"]["decode"] == "cold"
    assert facts["lines"] == [
        "cuda_graph: captures=0 replays=0 fallbacks=2 invalidations=0",
        "cuda_graph_verify: captures=1 replays=1 fallbacks=0 invalidations=0",
        "cuda_graph_draft: captures=1 replays=1 fallbacks=0 invalidations=0",
    ]
    assert len(refused["decode step"]["launches"]) == KERNELS["float16", 3][0]
    assert refused["mtp step"]["replays"] == 2


def test_a_capture_that_fails_half_way_is_a_refusal_too(refused):
    warnings = refused.facts["warnings of a failed capture"]
    assert warnings[1].endswith("ONNX Runtime says: CUDA failure 900")
    lines = refused.facts["lines of a failed capture"]
    assert lines[1:] == [
        "cuda_graph_verify: captures=0 replays=0 fallbacks=1 invalidations=0",
        "cuda_graph_draft: captures=1 replays=1 fallbacks=0 invalidations=0",
    ]


def test_a_replay_that_fails_ends_its_capture(refused):
    line = refused.facts["lines of a failed replay"][2]
    assert line == "cuda_graph_draft: captures=1 replays=1 fallbacks=1 invalidations=1"


def test_an_option_that_the_provider_does_not_know_is_an_error(refused):
    assert 'Unknown provider option: "no_such_option"' in refused.facts["unknown option"]


def test_operators_left_to_the_cpu_are_an_error(refused):
    assert "leaves Sub of prefill.onnx to the CPU" in refused.facts["strays"]


def test_a_capacity_without_room_for_a_capture_is_an_error(refused):
    assert "must be 10000 or more" in refused.facts["small capacity"]


def test_too_little_memory_is_an_error_that_says_how_little(refused):
    assert (
        "a test takes 1125899906842624 bytes on the device, of which"
        in (refused.facts["too large"])
    )


def test_closing_and_failing_leave_no_memory_behind(refused):
    assert refused.facts["kept nothing"]
    assert refused.facts["bytes left behind"] == 0


def test_no_node_copies_between_host_and_device(tmp_path):
    folder = build_demo(tmp_path / "demo", "float16", 3)
    for name in CAPTURED:
        report = dryrun.inspect(folder / f"{name}.onnx", graph=True)
        assert report["accepted"], report["refusal"]
        assert (report["cpu_nodes"], report["memcpys"], report["host_inputs"]) == ([], [], [])
