"""Going back and going on, on ONNX Runtime's CUDA provider without a GPU: what is called."""

from pathlib import Path

import pytest
from cuda_artifacts import build_demo, run_in_dry_run


@pytest.fixture(scope="module")
def turns(tmp_path_factory):
    scratch = tmp_path_factory.mktemp("turns")
    folder = build_demo(scratch / "demo", "float16", 3)
    return run_in_dry_run(Path(__file__).parent / "cuda_turns.py", folder, scratch)


def test_keeping_a_state_is_copies_on_the_device_and_no_waiting(turns):
    recordings, facts = turns
    keep = recordings["keep"]
    assert sorted(keep["copies"]) == sorted(f"D2D {size}" for size in facts["sizes"])
    assert not keep["syncs"]
    assert not keep["launches"]


def test_going_back_restores_the_states_and_replays_the_head_once(turns):
    recordings, facts = turns
    back = recordings["go back"]
    assert facts["reused"] == 5
    assert facts["restored"] == facts["names"]
    assert {f"D2D {size}" for size in facts["sizes"]} <= set(back["copies"])
    assert (back["replays"], back["captures"], back["device_bytes"]) == (1, 0, 0)


def test_going_on_copies_no_state(turns):
    recordings, facts = turns
    on = recordings["go on"]
    assert facts["went on"]
    assert not {f"D2D {size}" for size in facts["sizes"][:3]} & set(on["copies"])
    assert (on["replays"], on["captures"], on["device_bytes"]) == (1, 0, 0)
