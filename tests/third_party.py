"""Bundles of other exporters, laid out for a test: real graphs, sparse or random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx

__all__ = ["NAMES", "fill_weights", "lay_out"]

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
                data.write((values * 0.1).astype(DTYPES[tensor.data_type]).tobytes())
