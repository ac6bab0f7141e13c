"""One-graph bundles in ONNX text, for faults of a few nodes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from artifacts.findings import Finding
from export.bundles.check import check_bundle
from export.repair import repair_bundle

__all__ = ["external", "findings", "load", "mended", "operators", "ran", "write"]

HEADER = '<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]>\n'


def write(folder: Path, text: str) -> Path:
    """A bundle of the graph in `text`, ``__`` in a name for a dot; nothing is checked."""
    folder.mkdir(exist_ok=True)
    model = onnx.parser.parse_model(HEADER + text)
    for value in (*model.graph.input, *model.graph.output):
        value.name = value.name.replace("__", ".")
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [name.replace("__", ".") for name in names]
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return folder


def external(folder: Path, shape: tuple[int, ...], *, bytes_before: int = 0) -> Path:
    """``y = MatMul(x, w) + x0`` with a float32 `w` in a sparse data file."""
    write(
        folder, f"g (float[1,{shape[0]}] x) => (float[1,{shape[1]}] y) {{ y = MatMul(x, w) }}"
    )
    model = onnx.load(folder / "model.onnx")
    tensor = model.graph.initializer.add(name="w", data_type=1, dims=shape)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    size = 4 * shape[0] * shape[1]
    said = {"location": "w.data", "offset": bytes_before, "length": size}
    for key, value in said.items():
        tensor.external_data.add(key=key, value=str(value))
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    with (folder / "w.data").open("wb") as data:
        data.truncate(bytes_before + size)
    return folder


def findings(bundle: Path, provider: str = "cpu", family: str = "types") -> list[Finding]:
    return [f for f in check_bundle(bundle, provider) if f.code.startswith(f"{family}.")]


def mended(bundle: Path, prefer: str | None = None) -> Path:
    """The repaired copy; nothing about types is left to find but missing kernels."""
    output = bundle.with_name(f"{bundle.name}-{prefer or 'mended'}")
    repair_bundle(bundle, output, prefer=prefer)
    assert {f.code for f in findings(output)} <= {"types.kernel"}
    assert repair_bundle(output, output, prefer=prefer) == ()
    return output


def load(bundle: Path, *, optimise: bool = True) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if not optimise:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(bundle / "model.onnx", options, ["CPUExecutionProvider"])


def ran(bundle: Path, **feeds: np.ndarray) -> np.ndarray:
    """The first output on the CPU."""
    return np.asarray(load(bundle).run(None, feeds)[0])


def operators(bundle: Path) -> list[str]:
    model = onnx.load(bundle / "model.onnx", load_external_data=False)
    return [node.op_type for node in model.graph.node]
