"""An artifact's weights, buffers and slots on a GPU.

Why the provider's options are what they are:

- **One stream** (`user_compute_stream`) for all sessions and copies: draft, verify and the
  read of the result are ordered by it, and nobody waits in between.
- **No synchronisation at the end of a run**; reading the result waits once a step.
- **Flash attention, no cuDNN.** With cuDNN installed ONNX Runtime would pick its attention
  kernels for some rows on some cards, and without it others: tokens could depend on what
  else is installed. `enable_cudnn=0` keeps it out, `sdpa_kernel=1` pins Flash among the
  rest; the one-row XQA kernel is not affected.
- **No TF32**: a float32 product (the recurrent state) is a float32 product.
- **The arena grows by what is asked**, not to the next power of two.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from artifacts import Graph, Manifest
from artifacts.manifest import OPTIONAL_GRAPHS
from runtime.cuda_buffers import CudaBuffers
from runtime.cuda_driver import INSTALL, CudaDriver
from runtime.cuda_prefill import OpenCudaSlot
from runtime.cuda_slots import CudaSlot
from runtime.cuda_weights import CudaWeights
from runtime.device_memory import DeviceMemory
from runtime.environment import SETTINGS, apply_settings
from runtime.errors import LoadError
from runtime.kernels.choice import KernelChoice, choose_kernels
from runtime.late_slot import LateSlot
from runtime.session import Placement, Session, SessionOptions, require_provider
from runtime.slots import Slot

__all__ = ["MIN_CAPACITY", "load_cuda"]

logger = logging.getLogger(__name__)

CAPTURED = ("decode", "verify", "draft", "decode_sampled", "verify_sampled")
"""Graphs of fixed shapes, one slot each; a prefill has rows to choose."""
MIN_CAPACITY = 3
"""A capture runs a graph three times from one committed row on."""
PROVIDER_OPTIONS = {
    "arena_extend_strategy": "kSameAsRequested",
    "enable_cudnn": "0",
    "sdpa_kernel": "1",
    "use_tf32": "0",
}
RUN = {"disable_synchronize_execution_providers": "1", "gpu_graph_id": "1"}
"""The id is always set: a run without one is 30 microseconds slower."""
EAGER = {"gpu_graph_id": "-1"}
ON_HOST = frozenset(
    {"Add", "Cast", "Concat", "Div", "Equal", "Expand", "Gather", "Identity", "Less", "Max"}
    | {"Min", "Mul", "Range", "Reshape", "Shape", "Size", "Slice", "Squeeze", "Sub"}
    | {"Unsqueeze", "Where"}
)
"""Operators that may be left to the CPU: there ONNX Runtime puts arithmetic on shapes."""

Progress = Callable[[str], None]


def load_cuda(
    folder: Path,
    manifest: Manifest,
    options: SessionOptions,
    closing: ExitStack,
    progress: Progress,
) -> tuple[CudaBuffers, dict[str, Slot], DeviceMemory, KernelChoice]:
    """Upload, load and capture everything; decode, verify and draft come back captured.

    Where this project's kernels are not to be had, an artifact for them runs its fallback.

    Args:
        folder: Of the artifact; its files are checked.
        manifest: Its manifest, checked.
        options: For every session.
        closing: Gets what must be closed, in the right order.
        progress: Told what is being done.

    Raises:
        LoadError: Manifest, graphs and weights do not go together.
        DeviceError: The device, its libraries or its memory are missing.
        KernelError: The artifact needs this project's kernels, which cannot be built here,
            and has nothing to fall back to.
    """
    if manifest.capacity < MIN_CAPACITY:
        raise LoadError(
            f"this artifact's capacity is {manifest.capacity} tokens; on CUDA it must be "
            f"{MIN_CAPACITY} or more. Build it with a larger --capacity"
        )
    require_provider("cuda")
    apply_settings(SETTINGS)
    driver = CudaDriver()
    closing.callback(driver.close)
    choice = choose_kernels(manifest, driver.capability(), progress)
    manifest = choice.running(manifest)
    libraries = () if choice.library is None else (choice.library,)
    weights = _weights(folder, manifest, choice, driver, progress)
    closing.callback(weights.close)
    written = {port.buffer for graph in manifest.graphs.values() for port in graph.outputs}
    buffers = CudaBuffers(
        manifest.buffers, driver, host_only=manifest.buffers.keys() - written
    )
    closing.callback(buffers.close)
    driver.synchronize()
    free, total = driver.memory()
    slots: dict[str, Slot] = {}
    closing.callback(_close_slots, slots)
    for name, graph in manifest.graphs.items():
        opened = partial(
            _open, folder / graph.file, options, driver, weights.values, libraries
        )
        make = partial(_slot, name, graph, opened, buffers, driver)
        if name in OPTIONAL_GRAPHS:
            slots[name] = LateSlot(name, partial(_late, make, buffers))
        else:
            progress(name)
            slots[name] = make()
    _capture(slots, buffers, progress)
    memory = DeviceMemory(
        device=driver.name(),
        total=total,
        weights=weights.total,
        buffers=buffers.total,
        sessions=max(free - driver.memory()[0], 0),
    )
    logger.info("device memory: %s", memory)
    return buffers, slots, memory, choice


def _weights(
    folder: Path,
    manifest: Manifest,
    choice: KernelChoice,
    driver: CudaDriver,
    progress: Progress,
) -> CudaWeights:
    shown = -1

    def tell(done: int, total: int) -> None:
        nonlocal shown
        percent = 100 * done // total
        if percent > shown:
            progress(f"weights, {percent} % of {total / 1e6:,.0f} MB")
            shown = percent

    path, names = folder / manifest.weights.file, None
    if choice.in_use != choice.built_for:
        names = {name for graph in manifest.graphs.values() for name in graph.weights}
    return CudaWeights(path, manifest.weights, driver, tell, names=names)


def _open(
    path: Path,
    options: SessionOptions,
    driver: CudaDriver,
    initializers: Mapping[str, Any],
    libraries: tuple[Path, ...],
    capture: bool,
) -> Session:
    placement = Placement(
        options={
            **PROVIDER_OPTIONS,
            "user_compute_stream": str(driver.stream),
            "enable_cuda_graph": "1" if capture else "0",
        },
        initializers=initializers,
        run=RUN,
        eager=EAGER,
        libraries=libraries,
    )
    session = Session(path, "cuda", options, placement, hint=INSTALL)
    strays = set(session.on_host()) - ON_HOST
    if strays:
        raise LoadError(
            f"ONNX Runtime leaves {', '.join(sorted(strays))} of {path.name} to the CPU, for "
            "want of a CUDA kernel. Build the artifact again, for this release of it"
        )
    return session


def _slot(
    name: str,
    graph: Graph,
    opened: Callable[[bool], Session],
    buffers: CudaBuffers,
    driver: CudaDriver,
) -> Slot:
    if name in CAPTURED:
        return CudaSlot(name, graph, opened, buffers, driver)
    return OpenCudaSlot(name, graph, opened(False), buffers, driver)


def _late(make: Callable[[], Slot], buffers: CudaBuffers) -> Slot:
    """A slot made when it is first needed; one that is captured clears the buffers."""
    slot = make()
    _capture({slot.name: slot}, buffers, lambda _: None)
    return slot


def _capture(slots: Mapping[str, Slot], buffers: CudaBuffers, progress: Progress) -> None:
    """Capture all slots on a state with one committed row, then clear it."""
    if not any(isinstance(slot, CudaSlot) for slot in slots.values()):
        return
    buffers.reset()
    buffers.write("length", np.array([1], np.int32))
    for name, slot in slots.items():
        if isinstance(slot, CudaSlot):
            progress(f"{name}: capture")
            slot.capture()
    buffers.reset()


def _close_slots(slots: dict[str, Slot]) -> None:
    for slot in slots.values():
        slot.close()
