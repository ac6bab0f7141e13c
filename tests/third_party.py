"""Bundles of other exporters, laid out for a test: real graphs, sparse or random weights."""

from __future__ import annotations

import ctypes
import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort

__all__ = ["NAMES", "Target", "copy_weights", "fill_weights", "lay_out"]

HOME = Path(__file__).parent / "fixtures" / "third_party"
NAMES = tuple(sorted(path.name for path in HOME.iterdir() if path.is_dir()))
DTYPES = {1: np.float32, 2: np.uint8, 7: np.int64, 10: np.float16, 16: ml_dtypes.bfloat16}


def lay_out(name: str, folder: Path) -> Path:
    """Copy the bundle `name` below `folder`, its data files sparse."""
    target = folder / name
    shutil.copytree(HOME / name, target)
    sizes: dict[str, int] = json.loads((HOME / "data_sizes.json").read_text())
    for file, size in sizes.items():
        if file.startswith(f"{name}/"):
            with (folder / file).open("wb") as data:
                data.truncate(size)
    return target


def fill_weights(bundle: Path) -> None:
    """Random weights, small enough that no layer saturates, the same in every call."""
    for graph in sorted(bundle.rglob("*.onnx")):
        model = onnx.load(graph, load_external_data=False)
        for tensor in model.graph.initializer:
            if tensor.data_location != onnx.TensorProto.EXTERNAL:
                continue
            said = {entry.key: entry.value for entry in tensor.external_data}
            values = np.random.default_rng(len(tensor.name)).standard_normal(
                tuple(tensor.dims)
            )
            with (graph.parent / said["location"]).open("r+b") as data:
                data.seek(int(said["offset"]))
                data.write(
                    (values * 0.1)
                    .astype(ml_dtypes.bfloat16)
                    .astype(DTYPES[tensor.data_type])
                    .tobytes()
                )


def copy_weights(source: Path, target: Path) -> None:
    """Give the graph `target` the numbers of the graph `source`, in its own dtypes."""
    numbers = {
        tensor.name: onnx.numpy_helper.to_array(tensor).astype(np.float32)
        for tensor in onnx.load(source).graph.initializer
    }
    model = onnx.load(target)
    for tensor in model.graph.initializer:
        if tensor.name in numbers and tensor.data_type in (1, 10, 16):
            values = numbers[tensor.name].astype(DTYPES[tensor.data_type])
            tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    onnx.save(model, target)


class Target:
    """A plain dynamic loop over a target graph on the CPU, states carried by name."""

    def __init__(self, graph: Path) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 4
        self._session = ort.InferenceSession(graph, options, ["CPUExecutionProvider"])
        self._length = 0
        self._states: dict[str, ort.OrtValue] = {}
        self._elements = {i.name: _element(i.type) for i in self._session.get_inputs()}
        for port in self._session.get_inputs():
            if port.name.startswith("past"):
                sizes = [1 if d == "batch" else d if isinstance(d, int) else 0
                         for d in port.shape]  # fmt: skip
                zeros = np.zeros(sizes, DTYPES[self._elements[port.name]])
                self._states[port.name] = _to_ort(zeros, self._elements[port.name])

    def step(self, tokens: list[int]) -> dict[str, np.ndarray]:
        """Feed `tokens`; returns every output as float32."""
        rows, self._length = len(tokens), self._length + len(tokens)
        feeds = {
            "input_ids": np.array([tokens]),
            "attention_mask": np.ones((1, self._length), np.int64),
            "position_ids": np.arange(self._length - rows, self._length)[None],
        }
        fed = {n: _to_ort(v, 7) for n, v in feeds.items() if n in self._elements}
        names = [output.name for output in self._session.get_outputs()]
        values = self._session.run_with_ort_values(names, fed | self._states)
        made = dict(zip(names, values, strict=True))
        for past in self._states:
            self._states[past] = made["present." + past.partition(".")[2]]
        return {name: _to_numpy(value) for name, value in made.items()}


def _element(kind: str) -> int:
    return {"tensor(float)": 1, "tensor(float16)": 10, "tensor(bfloat16)": 16}.get(kind, 7)


def _to_ort(values: np.ndarray, element: int) -> ort.OrtValue:
    if element != 16:
        return ort.OrtValue.ortvalue_from_numpy(values)
    raw = np.ascontiguousarray(values).view(np.uint16)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(raw, element)


def _to_numpy(value: ort.OrtValue) -> np.ndarray:
    if value.element_type() != 16:
        return value.numpy().astype(np.float32)
    size = int(np.prod(value.shape()))
    raw = (ctypes.c_uint16 * size).from_address(value.data_ptr())
    return np.array(raw, np.uint16).view(ml_dtypes.bfloat16).reshape(value.shape()).astype(
        np.float32
    )  # fmt: skip
