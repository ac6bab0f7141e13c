"""The demo checkpoint in four bits on a card, with stock kernels and with this project's.

    python tests/gpu/run_own_kernels.py OUT

For each dtype and kind of kernels: `mtp-run check`, tokens of 20 prompts with and without
drafts, acceptance by position. Writes OUT/own-kernels.json.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]

from artifacts import Target  # noqa: E402
from export.build import build  # noqa: E402
from export.demo import CHECKPOINT  # noqa: E402
from export.options import BuildOptions  # noqa: E402
from export.sources import read_source  # noqa: E402
from runtime.check import check_run  # noqa: E402
from runtime.decode import Decoder  # noqa: E402

CASES = json.loads((HERE.parent / "data" / "oracle_acceptance.json").read_text())["cases"]
NEW_TOKENS = 200
K = 3


def decode(folder: Path) -> dict[str, Any]:
    positions = [[0, 0] for _ in range(K)]
    tokens: dict[str, list[list[int]]] = {"greedy": [], "mtp": []}
    seconds = {"greedy": 0.0, "mtp": 0.0}
    with Decoder.open(folder) as decoder:
        for case in CASES:
            for name, k in (("greedy", 0), ("mtp", K)):
                start = time.perf_counter()
                steps = decoder.generate(case["ids"], NEW_TOKENS, k=k, stop_ids=())
                tokens[name].append([token for step in steps for token in step.tokens])
                seconds[name] += time.perf_counter() - start
            for total, (tried, stood) in zip(positions, decoder.stats.positions, strict=True):
                total[0] += tried
                total[1] += stood
    same = sum(a == b for a, b in zip(tokens["greedy"], tokens["mtp"], strict=True))
    return {"tokens": tokens, "same": same, "positions": positions, "seconds": seconds}


def main(out: Path) -> None:
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for dtype in ("float16", "bfloat16"):
            for kernels in ("stock", "own"):
                name, folder = f"{dtype} {kernels}", Path(scratch) / f"{dtype}-{kernels}"
                target = Target("cuda", dtype, "int4", kernels)
                options = BuildOptions(k=K, capacity=1024, prefill_rows=128, target=target)
                try:
                    build(read_source(CHECKPOINT), folder, options, run_check=False)
                    report[name] = decode(folder)
                    report[name]["check"] = [f.to_json() for f in check_run(folder)]
                except Exception as e:
                    report[name] = {"error": f"{type(e).__name__}: {e}"}
                shown = {k: v for k, v in report[name].items() if k != "tokens"}
                print(name, json.dumps(shown)[:1500], flush=True)
    for dtype in ("float16", "bfloat16"):
        pair = [report[f"{dtype} {kind}"].get("tokens") for kind in ("stock", "own")]
        if all(pair):
            same = sum(
                a == b for a, b in zip(pair[0]["greedy"], pair[1]["greedy"], strict=True)
            )
            report[f"{dtype} prompts alike"] = same
            print(dtype, "greedy tokens alike with both kernels:", same, "of", len(CASES))
    for values in report.values():
        if isinstance(values, dict):
            values.pop("tokens", None)
    (out / "own-kernels.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
