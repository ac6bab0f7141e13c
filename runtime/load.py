"""An artifact folder in, its graphs ready to run out."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from artifacts import Manifest
from runtime.buffers import Buffers, CpuBuffers
from runtime.errors import LoadError
from runtime.session import Session, SessionOptions
from runtime.slots import GraphSlot, Slot

__all__ = ["Loaded", "check_file", "load"]

logger = logging.getLogger(__name__)

MAX_GRAPH_BYTES = 2**31
"""ONNX Runtime reads no larger file (protobuf's limit); weights lie beside it."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """An artifact in memory: what it is, its buffers, a slot for each graph."""

    folder: Path
    manifest: Manifest
    buffers: Buffers
    slots: dict[str, Slot]

    def close(self) -> None:
        """Give slots and memory back."""
        for slot in self.slots.values():
            slot.close()
        self.buffers.close()


def load(
    folder: Path,
    options: SessionOptions | None = None,
    *,
    progress: Callable[[str], None] | None = None,
) -> Loaded:
    """Check the files of an artifact and load all its graphs.

    Args:
        folder: Holds ``manifest.json``.
        options: For every session; the default where None.
        progress: Called with the name of each graph before it is loaded.

    Raises:
        ParseError: ``manifest.json`` does not say what it must.
        LoadError: Files, graphs and manifest do not go together, or this machine lacks the
            provider or the memory.
    """
    manifest = Manifest.read(folder)
    check_manifest(manifest)
    weights = _regular(folder / manifest.weights.file)
    size = weights.stat().st_size
    if size != manifest.weights.size:
        raise LoadError(
            f"{weights.name} has {size} bytes, the manifest says {manifest.weights.size}. The "
            "file is cut short or belongs to another build; copy or build the artifact again"
        )
    for graph in manifest.graphs.values():
        check_file(folder / graph.file, graph.sha256, limit=MAX_GRAPH_BYTES)
    buffers = CpuBuffers(manifest.buffers)
    slots: dict[str, Slot] = {}
    for name, graph in manifest.graphs.items():
        if progress is not None:
            progress(name)
        path = folder / graph.file
        session = Session(path, manifest.target.provider, options or SessionOptions())
        slots[name] = GraphSlot(name, graph, session, buffers)
    return Loaded(folder, manifest, buffers, slots)


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
    if names != needed:
        raise LoadError(
            f"manifest.json: an artifact with k = {m.k} has the graphs "
            f"{', '.join(sorted(needed))}; this one has {', '.join(sorted(names))}"
        )
    if m.cache_rows < m.capacity + m.rows:
        raise LoadError(
            f"manifest.json: cache_rows is {m.cache_rows}; a capacity of {m.capacity} tokens "
            f"and {m.rows} rows of a verify need {m.capacity + m.rows}"
        )
    for name, expected in needed_buffers(m).items():
        buffer = m.buffers.get(name)
        found = None if buffer is None else (buffer.dtype, buffer.shape)
        if found != expected:
            shown = "missing" if found is None else f"{found[0]}{list(found[1])}"
            raise LoadError(
                f"manifest.json: the buffer {name!r} is {shown}; it must be "
                f"{expected[0]}{list(expected[1])}. Build the artifact again"
            )
    for name, graph in m.graphs.items():
        for port in (*graph.inputs, *graph.outputs):
            if port.buffer not in m.buffers:
                raise LoadError(
                    f"manifest.json: the port {port.name!r} of the {name} graph is bound to "
                    f"{port.buffer!r}, and there is no such buffer. Build the artifact again"
                )
        rows = {"prefill": None, "decode": 1}.get(name, m.rows)
        if graph.rows != rows:
            raise LoadError(
                f"manifest.json: the {name} graph has {graph.rows} rows; it must have "
                f"{rows or 'none fixed'}. Build the artifact again"
            )


def needed_buffers(m: Manifest) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of each buffer that the host reads or writes."""
    kind, rows, spec = m.target.dtype, m.rows, m.spec
    needed: dict[str, tuple[str, tuple[int, ...]]] = {
        "ids": ("int64", (1, rows)),
        "length": ("int32", (1,)),
        "accepted": ("int64", (1,)),
        "best": ("int64", (1, rows)),
        "hidden": (kind, (1, rows, spec.hidden_size)),
        "logits": (kind, (1, rows, spec.vocab_size)),
        "result": ("int64", (2 * rows + 2,)),
        "prompt_ids": ("int64", (1, m.prefill_rows)),
    }
    if m.k:
        needed |= {
            "draft_count": ("int32", (1,)),
            "prompt_next": ("int64", (1, m.prefill_rows)),
        }
    return needed
