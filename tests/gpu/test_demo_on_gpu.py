"""A short life of the demo checkpoint on a card; run_demo.py is the long one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from runtime.cuda_driver import CudaDriver
from runtime.errors import DeviceError

sys.path.insert(0, str(Path(__file__).parent))

from demo_life import Life, build_demo

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=[("float16", 3), ("bfloat16", 3)])
def life(request, tmp_path_factory):
    try:
        CudaDriver().close()
    except DeviceError as e:
        pytest.skip(str(e))
    folder = tmp_path_factory.mktemp("gpu") / "demo"
    made = Life(build_demo(folder, "cuda", *request.param))
    yield made
    made.decoder.close()


PARTS = {
    "opened": (),
    "chunks": (),
    "acceptance": (),
    "lossless": (5, 100),
    "rows": (),
    "replay_is_eager": (),
    "endurance": (2000, 30.0),
    "other_thread": (),
    "counters": (),
}


@pytest.mark.parametrize("part", PARTS)
def test_the_demo_checkpoint_on_a_card(life, part):
    found = getattr(life, part)(*PARTS[part])
    assert found["ok"], found
