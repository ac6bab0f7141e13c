"""An artifact folder in, its graphs ready to run out."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from artifacts import Buffer, Manifest
from artifacts.buffers import contract_buffers
from artifacts.manifest import GRAPHS, OPTIONAL_GRAPHS
from runtime.buffers import Buffers, CpuBuffers
from runtime.device_memory import DeviceMemory
from runtime.errors import LoadError
from runtime.kernels.choice import KernelChoice
from runtime.late_slot import LateSlot
from runtime.session import Session, SessionOptions, require_provider
from runtime.slots import GraphSlot, Slot

__all__ = ["Loaded", "check_file", "load", "packed_graphs"]

logger = logging.getLogger(__name__)

MAX_GRAPH_BYTES = 2**31
"""ONNX Runtime reads no larger file (protobuf's limit); weights lie beside it."""

PACKED = ("verify", "draft")
"""Graphs whose kernels are much faster with matrices in their own layout: few rows, run every
step. Measured with 0.73 GB of float32 weights on two cores: verify 42 ms mapped and 27 ms
packed, draft 20 and 18; decode (one row needs no layout) 24 both ways, prefill 148 and 132.
A packed graph keeps its own copy and takes a second a gigabyte longer to load."""
ALL_PACKED_BYTES = 64 * 2**20
"""Up to so many weights, copies cost nothing that matters and all graphs gain."""
PACKED_SHARE = 4
"""The copies take at most one part in so many of the machine's memory."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """An artifact in memory: what it is, its buffers, a slot for each graph."""

    folder: Path
    manifest: Manifest
    buffers: Buffers
    slots: dict[str, Slot]
    memory: DeviceMemory | None
    """Where device memory went; None on the CPU."""
    kernels: KernelChoice
    """Which kernels run; `manifest` is that of the graphs in use."""
    closing: ExitStack
    """Closes slots, then memory, then the device."""

    def close(self) -> None:
        """Give slots and memory back."""
        self.closing.close()


def load(
    folder: Path,
    *,
    threads: int = 0,
    prepack: bool | None = None,
    progress: Callable[[str], None] | None = None,
) -> Loaded:
    """Check the files of an artifact and load its graphs; optional ones at their first run.

    Args:
        folder: Holds ``manifest.json``.
        threads: Threads of a graph; 0 takes as many as there are cores.
        prepack: Whether graphs keep copies of their matrices in their kernels' layout; where
            None, those of `packed_graphs` do. The CPU's alone.
        progress: Called with the name of each graph before it is loaded, and on a device
            with what else is being done.

    Raises:
        ParseError: ``manifest.json`` does not say what it must.
        LoadError: Files, graphs and manifest do not go together, or this machine lacks the
            provider or the memory.
        DeviceError: The device, its libraries or its memory are missing.
    """
    manifest = Manifest.read(folder)
    require_provider(manifest.target.provider)
    check_manifest(manifest)
    weights = _regular(folder / manifest.weights.file)
    size = weights.stat().st_size
    if size != manifest.weights.size:
        raise LoadError(
            f"{weights.name} has {size} bytes, the manifest says {manifest.weights.size}. The "
            "file is cut short or belongs to another build; copy or build the artifact again"
        )
    for graph in manifest.graphs.values():
        for file in {graph.file: graph, graph.in_stock().file: graph.in_stock()}.values():
            check_file(folder / file.file, file.sha256, limit=MAX_GRAPH_BYTES)
    tell = progress or (lambda _: None)
    with ExitStack() as closing:
        memory = None
        buffers: Buffers
        if manifest.target.provider == "cuda":
            from runtime.cuda_load import load_cuda

            options = SessionOptions(threads=threads)
            buffers, slots, memory, kernels = load_cuda(
                folder, manifest, options, closing, tell
            )
        else:
            packed = packed_graphs(size) if prepack is None else GRAPHS if prepack else ()
            buffers, slots = _load_cpu(folder, manifest, threads, packed, closing, tell)
            stock = manifest.target.kernels
            kernels = KernelChoice(in_use=stock, built_for=stock)
        running = kernels.running(manifest)
        return Loaded(folder, running, buffers, slots, memory, kernels, closing.pop_all())


def _load_cpu(
    folder: Path,
    manifest: Manifest,
    threads: int,
    packed: Collection[str],
    closing: ExitStack,
    tell: Callable[[str], None],
) -> tuple[Buffers, dict[str, Slot]]:
    buffers = CpuBuffers(manifest.buffers)
    closing.callback(buffers.close)
    slots: dict[str, Slot] = {}

    def made(name: str) -> Slot:
        graph = manifest.graphs[name]
        path = folder / graph.file
        if name in OPTIONAL_GRAPHS:  # loaded late, so it may have changed since
            check_file(path, graph.sha256, limit=MAX_GRAPH_BYTES)
        # of large weights no third copy is made: verify alone, sampled, stays mapped
        prepack = name in packed or (name in OPTIONAL_GRAPHS and packed == GRAPHS)
        options = SessionOptions(threads=threads, prepack=prepack)
        session = Session(path, manifest.target.provider, options)
        return GraphSlot(name, graph, session, buffers)

    for name in manifest.graphs:
        if name in OPTIONAL_GRAPHS:
            slots[name] = LateSlot(name, partial(made, name))
        else:
            tell(name)
            slots[name] = made(name)
        closing.callback(slots[name].close)
    return buffers, slots


def packed_graphs(weight_bytes: int) -> Collection[str]:
    """Graphs that gain enough from a copy of the weights in their kernels' layout."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    packed = GRAPHS if weight_bytes <= ALL_PACKED_BYTES else PACKED
    fits = len(packed) * weight_bytes * PACKED_SHARE <= memory
    return packed if fits else ()


def check_file(path: Path, sha256: str, *, limit: int) -> None:
    """Compare a file with its digest; raises `LoadError`."""
    size = _regular(path).stat().st_size
    if size > limit:
        raise LoadError(f"{path.name} has {size} bytes; no such file is over {limit}")
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as e:
        raise LoadError(f"{path} cannot be read: {e.strerror or e}") from e
    if found != sha256.lower():
        raise LoadError(
            f"{path.name} has the SHA-256 {found[:16]}..., the manifest says "
            f"{sha256[:16]}... The file was changed after the build; copy or build the "
            "artifact again"
        )


def _regular(path: Path) -> Path:
    if not path.is_file():
        raise LoadError(
            f"{path.name} is {'no regular file' if path.exists() else 'missing'} in "
            f"{path.parent}. Copy or build the artifact again"
        )
    return path


def check_manifest(manifest: Manifest) -> None:
    """Check what the decoding loop relies on; raises `LoadError` that names it.

    Graphs against buffers and ONNX files are the slots' to check.
    """
    m, names = manifest, set(manifest.graphs)
    needed = {"prefill", "decode"} | ({"verify", "draft"} if m.k else set())
    if not needed <= names <= m.graph_rows.keys():
        raise LoadError(
            f"manifest.json: an artifact with k = {m.k} has the graphs "
            f"{', '.join(sorted(needed))}; this one has {', '.join(sorted(names))}"
        )
    if m.k and m.samples != ("verify_sampled" in names):
        raise LoadError(
            "manifest.json: only one of the graphs decode_sampled and verify_sampled is "
            "there. Build the artifact again"
        )
    if m.cache_rows < m.capacity + m.rows:
        raise LoadError(
            f"manifest.json: cache_rows is {m.cache_rows}; a capacity of {m.capacity} tokens "
            f"and {m.rows} rows of a verify need {m.capacity + m.rows}"
        )
    for name, expected in contract_buffers(m).items():
        found = m.buffers.get(name)
        if found != expected:
            raise LoadError(
                f"manifest.json: the buffer {name!r} is {_shown(found)}; it must be "
                f"{_shown(expected)}. Build the artifact again"
            )
    for name, graph in m.graphs.items():
        for port in (*graph.inputs, *graph.outputs):
            if port.buffer not in m.buffers:
                raise LoadError(
                    f"manifest.json: the port {port.name!r} of the {name} graph is bound to "
                    f"{port.buffer!r}, and there is no such buffer. Build the artifact again"
                )
        rows = m.graph_rows[name]
        if graph.rows != rows:
            raise LoadError(
                f"manifest.json: the {name} graph has {graph.rows} rows; it must have "
                f"{rows or 'none fixed'}. Build the artifact again"
            )


def _shown(buffer: Buffer | None) -> str:
    return "missing" if buffer is None else f"{buffer.dtype}{list(buffer.shape)}"
