"""An artifact for own kernels in the dry run, with them and without.

    cuda_fallback.py ARTIFACT FACTS.json

XDG_CACHE_HOME holds the library of kernels.
"""

import ctypes
import hashlib
import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import dryrun

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from cuda_puppet import Puppet  # noqa: E402

import runtime.cuda_load as cuda_load  # noqa: E402
import runtime.kernels.build as kernel_build  # noqa: E402
from runtime.bench import BenchOptions, bench  # noqa: E402
from runtime.cli_bench import render  # noqa: E402
from runtime.cuda_driver import CudaDriver  # noqa: E402
from runtime.cuda_weights import CudaWeights  # noqa: E402
from runtime.errors import RunError  # noqa: E402
from runtime.graph_lines import graph_lines  # noqa: E402
from runtime.load import load  # noqa: E402
from runtime.report import figures, generation_json  # noqa: E402
from runtime.state import Finish  # noqa: E402

warnings: list[str] = []


class Listener(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            warnings.append(record.getMessage())


logging.getLogger("runtime").addHandler(Listener())
folder, facts_path = Path(sys.argv[1]), Path(sys.argv[2])


class Watched(CudaWeights):
    """Weights that can be looked at: "device" memory is memory of this process."""

    def __init__(self, path, weights, *rest, **keywords) -> None:
        super().__init__(path, weights, *rest, **keywords)
        uploaded.clear()
        for name, value in self.values.items():
            data = ctypes.string_at(value.data_ptr(), weights.length(name))
            uploaded[name] = hashlib.sha256(data).hexdigest()


uploaded: dict[str, str] = {}
cuda_load.CudaWeights = Watched


def life(name: str) -> dict[str, object]:
    warnings.clear()
    loaded = load(folder)
    found = {"warnings": list(warnings), "kernels": loaded.kernels.to_json()}
    found["states"] = {n: str(slot.state) for n, slot in loaded.slots.items()}
    found["weights"] = dict(uploaded)
    for graph in ("decode", "verify", "draft"):
        with dryrun.recording(f"{name}: {graph}"):
            loaded.slots[graph].run_eagerly()
        found[f"on host {graph}"] = loaded.slots[graph]._session.on_host()
    puppet = Puppet(loaded)
    puppet.decoder.prefill([1, 2, 3])
    puppet.decoder.step()
    puppet.decoder.step(0)
    found["lines"] = graph_lines(loaded.slots)
    found["figures"] = dict(figures(puppet.decoder, 3, Finish.LENGTH))
    made = generation_json(puppet.decoder, k=3, ids=[], text=None, finish=Finish.LENGTH)
    found["json"] = made["kernels"]
    asked = BenchOptions(ks=(3,), contexts=(8,), acceptance=None, steps=3, warm_up=0, seed=0)
    loaded.buffers.copy_bandwidth = lambda size: 1e9
    report = bench(loaded, asked)
    found["bench"] = report.to_json()["kernels"]
    found["bench bytes"] = report.weight_bytes
    found["bench lines"] = render(report, []).splitlines()[:2]
    loaded.close()
    return found


def refusal() -> str:
    try:
        load(folder).close()
    except RunError as e:
        return f"{type(e).__name__}: {e}"
    return ""


facts: dict[str, object] = {"own": life("own")}
capability = CudaDriver.capability
CudaDriver.capability = lambda self: (8, 0)
facts["another card"] = life("another card")
CudaDriver.capability = capability
with tempfile.TemporaryDirectory() as empty:
    os.environ["XDG_CACHE_HOME"] = empty
    kernel_build.shutil = SimpleNamespace(which=lambda name: None)
    kernel_build.CANDIDATES = ()
    facts["no compiler"] = life("no compiler")
    manifest = json.loads((folder / "manifest.json").read_text())
    for graph in manifest["graphs"].values():
        del graph["fallback"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    facts["nothing to fall back to"] = refusal()
facts_path.write_text(json.dumps(facts))
