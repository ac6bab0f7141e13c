"""Builds of tiny random checkpoints, and what lies in a folder afterwards."""

import dataclasses
import hashlib
from pathlib import Path

from checkpoint_cases import CONFIG, config_values, one_file, random_weights

from artifacts import ParseError, Target
from export.build import build
from export.options import BuildOptions
from export.sources import read_source
from runtime.errors import RunError
from runtime.load import load

__all__ = ["HYBRID", "build_tiny", "digests", "loads", "names", "options", "write_hybrid"]

HYBRID = dataclasses.replace(
    CONFIG, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]
)
"""The smallest model with a layer of either kind."""
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
"""Turns 16 of 32 channels, the fewest that the kernel takes."""


def write_hybrid(folder, config=HYBRID, *, without=(), seed=0, **changes):
    """A checkpoint folder; weights whose names begin with one of `without` are left out."""
    weights = random_weights(config, seed=seed)
    kept = {name: w for name, w in weights.items() if not name.startswith(tuple(without))}
    return one_file(folder, kept, config_values(config, rope_parameters=ROPE, **changes))


def options(k=3, *, target=None, capacity=40, prefill_rows=16, sampling=False):
    return BuildOptions(
        k=k,
        capacity=capacity,
        prefill_rows=prefill_rows,
        target=target or Target("cpu", "float32"),
        sampling=sampling,
    )


def build_tiny(folder, output, k=1, **keywords):
    """Build without a run of the new artifact, which has tests of its own."""
    keywords = {"run_check": False} | keywords
    return build(read_source(folder), output, options(k), **keywords)


def names(folder: Path):
    """What lies in a folder, hidden entries included."""
    return sorted(path.name for path in folder.iterdir())


def digests(folder: Path):
    """Name -> sha256 of every file."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()
    }


def loads(folder: Path):
    """Whether a runner takes the folder for an artifact."""
    try:
        load(folder).close()
    except (ParseError, RunError):
        return False
    return True
