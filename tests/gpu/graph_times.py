"""Times of single graphs of artifacts with random weights, captured and replayed on a card.

    python tests/gpu/graph_times.py OUT.json CASE [CASE ..]

A case is ``size:k:weights[:key=value,..]``, such as ``qwen3.5-27b:3:int4`` or, with a session
setting, ``qwen3.5-27b:3:int4:ep.cuda.fpa_intb_gemm=1``; ``most_merged=N`` and ``gates=0``
change the passes, ``contexts=512/8192`` and ``dtype=bfloat16`` what is measured.

Needs no runtime of this project:
sessions, buffers and bindings are made here from the manifest, so it can tell whether a slow
step is the graphs' or the runner's fault.
"""

import json
import platform
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime as ort

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from artifacts import Manifest, Target  # noqa: E402
from export import pipeline  # noqa: E402
from export.build import build  # noqa: E402
from export.options import BuildOptions  # noqa: E402
from export.synthetic import synthetic  # noqa: E402
from passes.drop_identity import DropIdentityPass as NoPass  # noqa: E402
from passes.fuse_gates import FuseGatesPass  # noqa: E402

MOST_MERGED = pipeline.MOST_MERGED

ELEMENTS = {"float32": 1, "uint8": 2, "int32": 6, "int64": 7, "float16": 10, "bfloat16": 16}
WARM_UP, RUNS = 5, 30
SCRATCH = Path("/dev/shm/graph-times")


class Card:
    """Buffers and weights of one artifact on the device."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.buffers = {
            name: ort.OrtValue.ortvalue_from_shape_and_type(
                list(buffer.shape), ELEMENTS[buffer.dtype], "cuda", 0
            )
            for name, buffer in manifest.buffers.items()
        }
        for name, buffer in manifest.buffers.items():
            if buffer.dtype not in ("bfloat16",):
                self.buffers[name].update_inplace(np.zeros(buffer.shape, buffer.dtype))
        self.weights, self._kept = {}, []
        data = np.memmap(folder / manifest.weights.file, np.uint8, "r")
        for name, tensor in manifest.weights.tensors.items():
            raw = np.ascontiguousarray(data[tensor.offset : tensor.offset + tensor.length])
            kind = "uint16" if tensor.dtype == "bfloat16" else tensor.dtype
            array = raw.view(kind).reshape(tensor.shape)
            value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(
                array, ELEMENTS[tensor.dtype]
            )
            device = ort.OrtValue.ortvalue_from_shape_and_type(
                list(tensor.shape), ELEMENTS[tensor.dtype], "cuda", 0
            )
            device.update_inplace(value.numpy() if tensor.dtype != "bfloat16" else array)
            self._kept.append(device)
            self.weights[name] = ort.OrtValue.from_dlpack(device)

    def session(self, graph: str, settings: dict[str, str]) -> ort.InferenceSession:
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 3
        for key, value in settings.items():
            options.add_session_config_entry(key, value)
        for name, value in self.weights.items():
            options.add_initializer(name, value)
        capture = "0" if graph == "prefill" else "1"
        provider = {"enable_cuda_graph": capture, "sdpa_kernel": "1"}
        made = ort.InferenceSession(
            str(self.folder / f"{graph}.onnx"),
            options,
            providers=[("CUDAExecutionProvider", provider)],
        )
        if made.get_providers()[0] != "CUDAExecutionProvider":
            raise RuntimeError(f"{graph} fell back to {made.get_providers()}")
        return made

    def binding(self, graph: str, session: ort.InferenceSession, rows: int = 0):
        io, g = session.io_binding(), self.manifest.graphs[graph]
        for bind, ports in ((io.bind_input, g.inputs), (io.bind_output, g.outputs)):
            for port in ports:
                width = np.dtype(port.dtype if port.dtype != "bfloat16" else "u2").itemsize
                address = self.buffers[port.buffer].data_ptr() + port.offset * width
                shape = [rows if isinstance(n, str) else n for n in port.shape]
                bind(port.name, "cuda", 0, ELEMENTS[port.dtype], shape, address)
        return io


def timed(card: Card, graph: str, settings: dict[str, str], context: int) -> dict[str, object]:
    session = card.session(graph, settings)
    io = card.binding(graph, session)
    run = ort.RunOptions()
    run.add_run_config_entry("gpu_graph_id", "1")
    lengths, drafts = np.array([context], np.int32), np.array([card.manifest.k], np.int32)

    def once() -> float:
        card.buffers["length"].update_inplace(lengths)
        if "draft_count" in card.buffers:
            card.buffers["draft_count"].update_inplace(drafts)
        start = time.perf_counter()
        session.run_with_iobinding(io, run)
        return time.perf_counter() - start

    for _ in range(WARM_UP):
        once()
    times = sorted(once() for _ in range(RUNS))
    result = card.buffers["result"].numpy()
    return {
        "median_ms": 1e3 * times[len(times) // 2],
        "min_ms": 1e3 * times[0],
        "max_ms": 1e3 * times[-1],
        "result": [int(value) for value in result],
    }


_cards: dict[object, Card] = {}


def loaded_card(key: tuple, passes: dict[str, str]) -> tuple[Card, float]:
    """The artifact of `key` on the card, built unless it is the one that is there."""
    if key not in _cards:
        _cards.clear()
        size, options, _ = key
        pipeline.MOST_MERGED = int(passes.get("most_merged", MOST_MERGED))
        pipeline.FuseGatesPass = NoPass if passes.get("gates") == "0" else FuseGatesPass
        manifest = build(synthetic(size), SCRATCH, options, force=True, run_check=False)
        built = time.perf_counter()
        _cards[key] = Card(SCRATCH, manifest)
        return _cards[key], built
    return _cards[key], time.perf_counter()


def case(text: str) -> dict[str, object]:
    size, k, weights, *rest = text.split(":", 3)
    settings = dict(pair.split("=") for pair in rest[0].split(",")) if rest else {}
    contexts = [512]
    if "contexts" in settings:
        contexts = [int(c) for c in settings.pop("contexts").split("/")]
    dtype = settings.pop("dtype", "float16")
    options = BuildOptions(
        k=int(k),
        capacity=max(contexts) + 1024,
        prefill_rows=512,
        target=Target("cuda", dtype, weights),
    )
    passes = {key: settings.pop(key) for key in ("most_merged", "gates") if key in settings}
    start = time.perf_counter()
    card, built = loaded_card((size, options, tuple(passes.items())), passes)
    loaded = time.perf_counter()
    answer: dict[str, object] = {
        "case": text,
        "build_s": built - start,
        "upload_s": loaded - built,
        "weight_bytes": sum(t.length for t in card.manifest.weights.tensors.values()),
        "times": {},
    }
    for graph in ("decode", "verify", "draft"):
        if graph in card.manifest.graphs:
            for context in contexts:
                key = f"{graph}@{context}"
                try:
                    answer["times"][key] = timed(card, graph, settings, context)  # type: ignore[index]
                except Exception as e:
                    answer["times"][key] = {"error": f"{type(e).__name__}: {e}"}  # type: ignore[index]
                print(text, key, answer["times"][key], flush=True)  # type: ignore[index]
    return answer


if __name__ == "__main__":
    out = Path(sys.argv[1])
    report = {
        "onnxruntime": ort.__version__,
        "python": platform.python_version(),
        "warm_up": WARM_UP,
        "runs": RUNS,
        "cases": [],
    }
    for text in sys.argv[2:]:
        try:
            report["cases"].append(case(text))
        except Exception as e:
            report["cases"].append({"case": text, "error": f"{type(e).__name__}: {e}"})
            print(text, report["cases"][-1], flush=True)
        out.write_text(json.dumps(report, indent=1) + "\n")
