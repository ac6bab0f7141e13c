"""What rounding costs: the demo checkpoint in four bits against float32, on held-out text.

    python benchmarks/quality.py OUT.json

Text: Python files of the standard library's test packages and of this project, which the
checkpoint was not trained to repeat; every window is read once, from an empty state. For each
variant: perplexity, KL divergence to float32 (nats a token), agreement of the first choice,
and the error of each matrix relative to its size. `gates apart` is the plain lowering, where
matrices of fewer than 128 rows (the decay and beta projections) stay as they are; `merged` is
the CUDA lowering, where they are rounded along with what they are merged with.
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import tokenizers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from export.decoder import build_target  # noqa: E402
from export.demo import CHECKPOINT  # noqa: E402
from export.quantisers import pack_rtn  # noqa: E402
from export.sources import read_source  # noqa: E402
from passes.hoist_casts import HoistCastsPass  # noqa: E402
from passes.merge_projections import MergeProjectionsPass  # noqa: E402
from passes.quantise import QuantisePass  # noqa: E402
from passes.streamed import StreamedTensor  # noqa: E402

WINDOW, WINDOWS, SKIPPED = 256, 48, 32
VARIANTS = {
    "float32": (),
    "int4, gates apart": ("quantise",),
    "int4, merged": ("merge", "quantise"),
}


def model(steps: tuple[str, ...]) -> tuple[ort.InferenceSession, list[dict[str, Any]]]:
    """The canonical target after `steps`, and the error of each rounded matrix."""
    source = read_source(CHECKPOINT)
    target = build_target(source.spec, dtype=ir.DataType.FLOAT, cache_rows=WINDOW + 8)
    for name, value in target.graph.initializers.items():
        if value.const_value is None:
            array = source.weights[name].numpy().astype(np.float32)
            value.const_value = _streamed(array, name)
    errors: list[dict[str, Any]] = []

    def pack(weight: StreamedTensor) -> Any:
        packed = pack_rtn(weight)
        if packed is not None:
            data, scales = packed.data.numpy(), packed.scales.numpy()
            whole = np.stack([data & 15, data >> 4], axis=-1).astype(np.float32) - 8
            rounded = whole.reshape(*scales.shape, 32) * scales[..., None]
            error = rounded.reshape(weight.shape.numpy()) - weight.numpy()
            relative = float(np.linalg.norm(error) / np.linalg.norm(weight.numpy()))
            errors.append({"matrix": weight.name, "relative_error": relative})
        return packed

    if "merge" in steps:
        MergeProjectionsPass(16384)(target)
        HoistCastsPass()(target)
    if "quantise" in steps:
        QuantisePass(pack)(target)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    proto = ir.to_proto(target)
    return ort.InferenceSession(proto.SerializeToString(), options), errors


def _streamed(array: np.ndarray, name: str) -> StreamedTensor:
    return StreamedTensor(
        lambda: iter((array,)), dtype=ir.DataType.FLOAT, shape=array.shape, name=name
    )


def logits(session: ort.InferenceSession, ids: np.ndarray) -> np.ndarray:
    """[S, V] of one window, from an empty state."""
    feeds: dict[str, np.ndarray] = {
        "input_ids": ids[None],
        "past_length": np.zeros(1, np.int32),
    }
    for value in session.get_inputs():
        if value.name.startswith("past."):
            shape = [n if isinstance(n, int) else WINDOW + 8 for n in value.shape]
            feeds[value.name] = np.zeros(shape, np.float32)
    return session.run(["logits"], feeds)[0][0]


def windows() -> list[np.ndarray]:
    """Windows of token ids out of files that come with Python and with this project."""
    tokenizer = tokenizers.Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    stdlib = Path(json.__file__).parent.parent
    files = sorted((ROOT / "passes").glob("*.py")) + sorted(stdlib.glob("*.py"))
    found = []
    for path in files:
        ids = np.array(tokenizer.encode(path.read_text(errors="ignore")).ids)
        if len(ids) >= WINDOW:
            found.append(ids[:WINDOW])
        if len(found) == WINDOWS:
            break
    return found


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Of each row."""
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def main(out: Path) -> None:
    """Measure every variant and write the report."""
    texts = windows()
    report: dict[str, Any] = {
        "windows": len(texts),
        "window": WINDOW,
        "skipped": SKIPPED,
        "versions": {"onnxruntime": ort.__version__, "python": platform.python_version()},
        "variants": {},
    }
    plain: list[np.ndarray] = []
    for name, steps in VARIANTS.items():
        session, errors = model(steps)
        nll, kl, same, count = 0.0, 0.0, 0, 0
        for number, ids in enumerate(texts):
            row = log_softmax(logits(session, ids).astype(np.float64))[SKIPPED:-1]
            if not steps:
                plain.append(row)
            nll -= row[np.arange(len(row)), ids[SKIPPED + 1 :]].sum()
            kl += (np.exp(plain[number]) * (plain[number] - row)).sum()
            same += int((row.argmax(-1) == plain[number].argmax(-1)).sum())
            count += len(row)
        report["variants"][name] = {
            "perplexity": float(np.exp(nll / count)),
            "kl_nats": float(kl / count),
            "first_choice_agrees": same / count,
            "tokens": count,
            "matrices": errors,
        }
        shown = {k: v for k, v in report["variants"][name].items() if k != "matrices"}
        sys.stdout.write(f"{name}: {shown}\n")
    out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
