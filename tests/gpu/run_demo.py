"""The demo checkpoint on a CUDA card, measured and judged; writes OUT/demo.json.

    python tests/gpu/run_demo.py OUT [--seconds 230] [--combinations float16:3,bfloat16:1]

Needs this checkout, onnxruntime-gpu and the export's own packages; ends within --seconds.
Every combination of dtype and k is a process of its own, since a failed kernel takes its
whole process along; each part of it is guarded, so one that fails does not lose the rest.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

COMBINATIONS = (
    "float16:3", "bfloat16:3", "float16:1", "float16:2", "float16:5",
    "bfloat16:1", "bfloat16:2", "bfloat16:5",
)  # fmt: skip
"""The first two are looked at closest."""
ENDURANCE = {"float16:3": 20_000, "bfloat16:3": 20_000}
SHORT_ENDURANCE = 2_000
CPU_RESERVE = 40.0
"""Seconds kept for the CPU artifacts at the end."""
PACKAGES = ("numpy", "onnx", "onnx_ir", "onnxscript", "ml_dtypes", "torch")


class Part:
    """Writes what a part gave into a file that holds all parts, whatever happened."""

    def __init__(self, name: str, results: dict[str, Any], path: Path) -> None:
        self.name, self.results, self.path = name, results, path
        self.values: dict[str, Any] = {"ok": False}

    def __enter__(self) -> Part:
        self.start = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if kind is not None:
            lines = traceback.format_exception(kind, error, trace)
            self.values |= {"ok": False, "error": str(error), "trace": lines[-4:]}
        self.results[self.name] = {**self.values, "took": time.perf_counter() - self.start}
        self.path.write_text(json.dumps(self.results))
        return kind is not None and issubclass(kind, Exception)


def run_combination(combination: str, path: Path) -> None:
    """All parts of one artifact; run as a process of its own."""
    from demo_life import Life, build_demo

    dtype, k = combination.split(":")
    results: dict[str, Any] = {}
    life: Life | None = None
    with tempfile.TemporaryDirectory() as scratch:
        with Part("open", results, path) as part:
            folder = build_demo(Path(scratch) / "demo", "cuda", dtype, int(k))
            life = Life(folder)
            part.values = life.opened()
        if life is None:
            return
        steps = ENDURANCE.get(combination, SHORT_ENDURANCE)
        for name, action in (
            ("chunks", life.chunks),
            ("acceptance", life.acceptance),
            ("lossless", life.lossless),
            ("counters", life.counters),
            ("times", life.times),
            ("rows", life.rows),
            ("replay is eager", life.replay_is_eager),
            ("endurance", lambda: life.endurance(steps, 60.0)),
            ("other thread", life.other_thread),
            ("counters at the end", life.counters),
            ("closed", life.closed),
        ):
            with Part(name, results, path) as part:
                part.values = action()


def run_cpu(k: int, path: Path) -> None:
    """Acceptance of the CPU artifact, to compare with."""
    from demo_life import Life, build_demo

    results: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory() as scratch,
        Part("acceptance", results, path) as part,
    ):
        life = Life(build_demo(Path(scratch) / "demo", "cpu", "float32", k))
        part.values = life.acceptance()


def versions() -> dict[str, str]:
    import onnxruntime

    found = {"python": sys.version.split()[0], "onnxruntime": onnxruntime.__version__}
    found["build"] = onnxruntime.get_build_info()
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        found["card"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    except OSError:
        found["card"] = "nvidia-smi is absent"
    return found


def child(arguments: list[str], path: Path, seconds: float) -> dict[str, Any]:
    """Run this file again; what it had written counts even if it dies."""
    command = [sys.executable, str(Path(__file__).resolve()), *arguments, "--child", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        code, said = done.returncode, done.stderr
    except subprocess.TimeoutExpired as e:
        code, said = -1, f"stopped after {seconds:.0f} s: {(e.stderr or b'')[-1500:]!r}"
    results = json.loads(path.read_text()) if path.is_file() else {}
    results["process"] = {"ok": code == 0, "exit": code, "stderr": said[-3000:]}
    return results


def verdicts(results: dict[str, Any]) -> dict[str, bool]:
    return {name: bool(part["ok"]) for name, part in results.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=230)
    parser.add_argument("--combinations", default=",".join(COMBINATIONS))
    parser.add_argument("--cpu", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is not None:
        if given.cpu:
            run_cpu(given.cpu, given.child)
        else:
            run_combination(given.combinations, given.child)
        return 0
    deadline = time.monotonic() + given.seconds
    given.out.mkdir(parents=True, exist_ok=True)
    combinations = given.combinations.split(",")
    everything: dict[str, Any] = {"versions": versions(), "cuda": {}, "cpu": {}}

    def keep() -> None:
        (given.out / "demo.json").write_text(json.dumps(everything, indent=1))

    with tempfile.TemporaryDirectory() as scratch:
        for combination in combinations:
            left = deadline - CPU_RESERVE - time.monotonic()
            if left < 10:
                everything["cuda"][combination] = {"process": {"ok": False, "exit": "no time"}}
                continue
            path = Path(scratch) / f"{combination.replace(':', '-')}.json"
            arguments = [str(given.out), "--combinations", combination]
            results = child(arguments, path, left)
            everything["cuda"][combination] = results
            keep()
            shown = [name for name, ok in verdicts(results).items() if not ok]
            print(combination, "fine" if not shown else f"NOT: {', '.join(shown)}", flush=True)
        ks = sorted({int(name.split(":")[1]) for name in combinations})

        def on_cpu(k: int) -> dict[str, Any]:
            left = max(deadline - time.monotonic(), 1.0)
            arguments = [str(given.out), "--cpu", str(k)]
            return child(arguments, Path(scratch) / f"cpu-{k}.json", left)

        with ThreadPoolExecutor(len(ks)) as pool:
            everything["cpu"] = dict(zip(map(str, ks), pool.map(on_cpu, ks), strict=True))
    keep()
    fine = all(
        all(verdicts(results).values())
        for results in (*everything["cuda"].values(), *everything["cpu"].values())
    )
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
