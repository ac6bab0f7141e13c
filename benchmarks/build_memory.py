"""How much memory a build of a 1.5 GB checkpoint needs.

    python benchmarks/build_memory.py --scratch DIR > benchmarks/results/build_memory.json

Writes a random checkpoint of the published 0.8B sizes (bf16, sharded, with the MTP head),
builds it in processes of their own, with and without the run of the new artifact, and prints
JSON. Resident memory is sampled and split as the kernel splits it: anonymous pages are what
a process needs; file-mapped ones (a checkpoint or weights that are read in place) can be
dropped at any time. A page that is mapped by several graphs of one artifact counts once for
each in resident memory, and once in all in `proportional`. Sizes are in bytes, times in
seconds.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import ml_dtypes
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from artifacts import HeadSpec, read_json  # noqa: E402
from export.config import parse_config  # noqa: E402
from export.family import Fold, Source, sources  # noqa: E402

LIMIT = 10**9
"""Bytes above the interpreter's own that a build may hold."""
SHARD_BYTES = 512 * 2**20
BLOCK_VALUES = 2**22
SAMPLE_SECONDS = 0.005
ROLLUP_EVERY = 100
"""Samples between two looks at the proportional size, for which the kernel walks all pages."""
PREFIX = "model.language_model."
SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "full_attention_interval": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "mtp_num_hidden_layers": 1,
}
CONFIG = {
    "model_type": "qwen3_5",
    "tie_word_embeddings": True,
    "text_config": {
        "model_type": "qwen3_5_text",
        **SIZES,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": True,
    },
}


@dataclass(frozen=True)
class Memory:
    """Resident memory of a process; the parts of a peak need not be of one moment."""

    resident: int
    anonymous: int
    file_mapped: int

    @classmethod
    def of(cls, pid: int | str) -> Memory:
        """Now."""
        fields = _fields(pid)
        mapped = fields["RssFile"] + fields["RssShmem"]
        return cls(fields["VmRSS"], fields["RssAnon"], mapped)

    def highest(self, other: Memory) -> Memory:
        """The larger of each part."""
        pairs = zip(asdict(self).values(), asdict(other).values(), strict=True)
        return Memory(*(max(pair) for pair in pairs))


def _fields(pid: int | str, file: str = "status") -> dict[str, int]:
    lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return {key: 1024 * int(rest.split()[0]) for key, rest in pairs if rest.endswith(" kB")}


def write_checkpoint(folder: Path) -> int:
    """A random checkpoint in shards with an index; gives its bytes."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    spec = parse_config(read_json(folder / "config.json")).spec
    head = HeadSpec(
        layers=1,
        hidden_source="post_norm",
        feedback="post_norm",
        concat="embed_first",
        cache="own",
        intermediate_size=spec.intermediate_size,
    )
    rng, index, total = np.random.default_rng(1), {}, 0
    shards = list(_shards(list(sources(replace(spec, head=head), PREFIX))))
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        with (folder / name).open("wb") as file:
            file.write(_header(shard))
            for source in shard:
                for block in _values(source, rng):
                    file.write(block.tobytes())
        index |= {source.name: name for source in shard}
        total += (folder / name).stat().st_size
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    return total


def _shards(tensors: list[Source]) -> Iterator[list[Source]]:
    shard: list[Source] = []
    for source in tensors:
        if shard and sum(map(_bytes, shard)) + _bytes(source) > SHARD_BYTES:
            yield shard
            shard = []
        shard.append(source)
    yield shard


def _dtype(source: Source) -> np.dtype[Any]:
    """As published: A_log and the norm of the Gated DeltaNet are float32."""
    is_float32 = source.name.endswith(("A_log", "linear_attn.norm.weight"))
    return np.dtype(np.float32) if is_float32 else np.dtype(ml_dtypes.bfloat16)


def _bytes(source: Source) -> int:
    return math.prod(source.shape) * _dtype(source).itemsize


def _header(shard: list[Source]) -> bytes:
    offset, entries = 0, {}
    for source in shard:
        end = offset + _bytes(source)
        entries[source.name] = {
            "dtype": "F32" if _dtype(source).itemsize == 4 else "BF16",
            "shape": list(source.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _values(source: Source, rng: np.random.Generator) -> Iterator[np.ndarray[Any, Any]]:
    """Of a size that keeps activations finite: matrices 0.02, folded vectors near 0."""
    scale = 0.02 if source.pieces[0].fold is Fold.NONE else 0.001
    left = math.prod(source.shape)
    while left:
        count = min(left, BLOCK_VALUES)
        yield (scale * rng.standard_normal(count, np.float32)).astype(_dtype(source))
        left -= count


def measure(checkpoint: Path, output: Path, *, run_check: bool, k: int) -> dict[str, object]:
    """Build in a process of its own, sampling its memory from here."""
    command = [sys.executable, __file__, "child", str(checkpoint), str(output), "--k", str(k)]
    child = subprocess.Popen(
        [*command, *(["--run-check"] if run_check else [])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert child.stdin is not None and child.stdout is not None
    child.stdout.readline()  # it has imported everything and waits
    own = Memory.of(child.pid)
    peaks: dict[str, Memory] = {}
    phase, proportional = ["start"], [0]
    done = threading.Event()
    sampler = threading.Thread(
        target=_sample, args=(child.pid, phase, peaks, proportional, done)
    )
    sampler.start()
    child.stdin.write("go\n")
    child.stdin.flush()
    result: dict[str, Any] = {}
    try:
        for line in child.stdout:
            message = json.loads(line)
            if "phase" in message:
                phase[0] = message["phase"]
            else:
                result = message
                done.set()
                sampler.join()  # it must not outlive the process that it looks at
                child.stdin.write("end\n")
                child.stdin.flush()
    finally:
        done.set()
        sampler.join()
    if child.wait() or not result:
        raise click.ClickException(f"the build ended with {child.returncode}")
    peak = own
    for memory in peaks.values():
        peak = peak.highest(memory)
    above = result["resident_high_water"] - own.resident
    return {
        "run_check": run_check,
        "seconds": result["seconds"],
        "own": asdict(own),
        "peak": asdict(peak),
        "resident_high_water": result["resident_high_water"],
        "proportional_peak": proportional[0],
        "resident_above_own": above,
        "anonymous_above_own": peak.anonymous - own.anonymous,
        "within_limit": above < LIMIT,
        "peak_by_phase": {name: asdict(memory) for name, memory in peaks.items()},
        "artifact_bytes": sum(path.stat().st_size for path in output.iterdir()),
    }


def _sample(
    pid: int,
    phase: list[str],
    peaks: dict[str, Memory],
    proportional: list[int],
    done: threading.Event,
) -> None:
    count = 0
    while not done.wait(SAMPLE_SECONDS):
        now, name = Memory.of(pid), phase[0]
        peaks[name] = now.highest(peaks.get(name, now))
        if count % ROLLUP_EVERY == 0:
            proportional[0] = max(proportional[0], _fields(pid, "smaps_rollup")["Pss"])
        count += 1


@click.group(invoke_without_command=True)
@click.option(
    "--scratch", type=click.Path(exists=True, file_okay=False, path_type=Path), default=None
)
@click.option("--k", default=3, show_default=True)
@click.pass_context
def main(context: click.Context, scratch: Path | None, k: int) -> None:
    """Write the checkpoint, build it twice, print JSON. Needs 8 GB of disk in SCRATCH."""
    if context.invoked_subcommand is not None:
        return
    folder = Path(tempfile.mkdtemp(prefix="build-memory-", dir=scratch))
    try:
        checkpoint = folder / "checkpoint"
        checkpoint.mkdir()
        size = write_checkpoint(checkpoint)
        builds = []
        for run_check in (False, True):
            output = folder / "artifact"
            builds.append(measure(checkpoint, output, run_check=run_check, k=k))
            shutil.rmtree(output)
    finally:
        shutil.rmtree(folder)
    report = {
        "benchmark": "build_memory",
        "versions": versions(),
        "limit_above_own": LIMIT,
        "sizes": SIZES,
        "k": k,
        "checkpoint_bytes": size,
        "builds": builds,
    }
    click.echo(json.dumps(report, indent=1))


def versions() -> dict[str, str | int | None]:
    """Of everything that has a say in the figures."""
    names = ("numpy", "onnx", "onnx-ir", "onnxruntime-gpu", "onnxscript", "safetensors")
    found: dict[str, str | int | None] = {n: importlib.metadata.version(n) for n in names}
    return found | {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
    }


@main.command("child", hidden=True)
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--run-check", is_flag=True)
@click.option("--k", type=int, required=True)
def child(checkpoint: Path, output: Path, run_check: bool, k: int) -> None:
    """The process that is measured."""
    importlib.import_module("artifacts.rules")  # the build imports both when it needs them;
    importlib.import_module("runtime.check")  # here they count as the interpreter's own
    from artifacts import Target
    from export.build import build
    from export.options import BuildOptions
    from export.sources import read_source

    click.echo("ready")
    sys.stdin.readline()
    start = time.monotonic()
    options = BuildOptions(
        k=k, capacity=4096, prefill_rows=512, target=Target("cpu", "float32")
    )
    report = _phases()
    report("read", 0, 0)
    build(read_source(checkpoint), output, options, run_check=run_check, progress=report)
    seconds = time.monotonic() - start
    high = _fields("self")["VmHWM"]
    click.echo(json.dumps({"seconds": round(seconds, 2), "resident_high_water": high}))
    sys.stdin.readline()


def _phases() -> Callable[[str, int, int], None]:
    """Tell the parent when a phase begins; passes are one phase."""
    last = [""]

    def report(what: str, done: int, total: int) -> None:
        phase = "check run" if what.startswith("check run") else what
        phase = "passes" if ": " in phase else phase
        if phase != last[0]:
            last[0] = phase
            click.echo(json.dumps({"phase": phase}))

    return report


if __name__ == "__main__":
    main()
