"""CUDA artifacts of the demo checkpoint, made on any machine, and the dry run for them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import dryrun
import numpy as np
import onnx

from artifacts import Target
from export.build import build
from export.demo import CHECKPOINT
from export.options import BuildOptions
from export.sources import read_source

CAPACITY, PREFILL_ROWS = 256, 64


def build_demo(
    folder: Path, dtype: str, k: int, weights: str = "dense", kernels: str = "stock"
) -> Path:
    options = BuildOptions(
        k=k,
        capacity=CAPACITY,
        prefill_rows=PREFILL_ROWS,
        target=Target("cuda", dtype, weights, kernels),
    )
    build(read_source(CHECKPOINT), folder, options, run_check=False)
    return folder


def run_in_dry_run(
    script: Path, artifact: Path, scratch: Path, **env: str
) -> tuple[dict, dict[str, Any]]:
    """Recordings and facts of a script that takes ARTIFACT and FACTS.json."""
    facts = scratch / f"{artifact.name}.json"
    recordings = dryrun.run_script(script, str(artifact), str(facts), env=env)["recordings"]
    return recordings, json.loads(facts.read_text())


def add_control_flow(folder: Path) -> Path:
    """Send the decode graph's logits through an `If`; returns `folder`."""
    path = folder / "decode.onnx"
    model = onnx.load(path, load_external_data=False)
    graph = model.graph
    declared = next(value for value in graph.output if value.name == "logits")
    for node in graph.node:
        node.output[:] = ["plain" if name == "logits" else name for name in node.output]
        node.input[:] = ["plain" if name == "logits" else name for name in node.input]
    branches = []
    for side in ("then", "else"):
        value = onnx.helper.make_tensor_value_info(
            side, declared.type.tensor_type.elem_type, [1, 1, 4096]
        )
        identity = onnx.helper.make_node("Identity", ["plain"], [side])
        branches.append(onnx.helper.make_graph([identity], side, [], [value]))
    always = onnx.numpy_helper.from_array(np.array(True), "always")
    graph.initializer.append(always)
    graph.node.append(
        onnx.helper.make_node(
            "If", ["always"], ["logits"], then_branch=branches[0], else_branch=branches[1]
        )
    )
    onnx.save(model, path)
    manifest = json.loads((folder / "manifest.json").read_text())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest["graphs"]["decode"]["sha256"] = digest
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder
