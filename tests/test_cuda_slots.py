"""What a capture must save. Captures themselves: test_cuda_runtime.py."""

from cuda_artifacts import build_demo

from artifacts import Manifest
from runtime.cuda_slots import written_in_place

HOST = {"accepted", "best", "hidden", "ids", "length", "logits", "result"}


def test_a_capture_saves_what_counts_later_and_nothing_else(tmp_path):
    graphs = Manifest.read(build_demo(tmp_path / "demo", "float16", 3)).graphs
    states = {"target.conv", "target.recurrent"}
    # their caches are written behind `length` alone, and `length` is given back
    assert set(written_in_place(graphs["decode"])) == HOST | states
    # `rows.*` are read as views, after they are written
    assert set(written_in_place(graphs["verify"])) == HOST | states
    # the catch-up writes rows in front of `length`
    assert set(written_in_place(graphs["draft"])) == {"ids", "head.0.key", "head.0.value"}
