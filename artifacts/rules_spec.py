"""Rules about the manifest itself: sizes that can be, and buffers as the spec demands."""

from __future__ import annotations

import math
from collections.abc import Iterator

from artifacts.buffers import State, contract_buffers, states
from artifacts.findings import Severity
from artifacts.manifest import MANIFEST, Buffer, Manifest, Port
from artifacts.rule import Case, Fault, Rule
from artifacts.spec import LayerKind
from artifacts.weight_header import ITEM_BYTES

__all__ = ["SIZES_RULE", "SPEC_RULES"]

FORWARDS = {
    "target": ("prefill", "decode", "verify", "decode_sampled", "verify_sampled"),
    "head": ("prefill", "draft", "catch_up"),
}
"""Owner of a state -> graphs that read and write it."""
MAX_RANK = 8
"""Axes of a tensor; ONNX Runtime's kernels take no more."""
MAX_LAYERS = 4096
MAX_PORTS = 4 * MAX_LAYERS
"""Of one graph: a layer has two states, each going in and out."""
MAX_BYTES = 2**50
"""Of one tensor: beyond any machine, and far below where products overflow."""


def _sizes(case: Case) -> Iterator[Fault]:
    manifest = case.manifest
    if len(manifest.spec.layers) > MAX_LAYERS:
        yield Fault(
            MANIFEST,
            f"spec.layers has {len(manifest.spec.layers)}; at most {MAX_LAYERS} can be",
        )
    for name, buffer in manifest.buffers.items():
        yield from _size(f"buffer {name}", buffer.dtype, buffer.shape)
    for name, tensor in manifest.weights.tensors.items():
        yield from _size(f"weight {name}", tensor.dtype, tensor.shape)
    for name, derived in manifest.weights.derived.items():
        yield from _size(f"weight {name}", derived.dtype, derived.shape)
    for name, graph in manifest.graphs.items():
        ports = len(graph.inputs) + len(graph.outputs)
        if ports > MAX_PORTS:
            yield Fault(
                MANIFEST, f"graph {name} has {ports} ports; at most {MAX_PORTS} can be"
            )
        for port in (*graph.inputs, *graph.outputs):
            sizes = tuple(size for size in port.shape if isinstance(size, int))
            yield from _size(f"port {name}:{port.name}", port.dtype, sizes)


def _size(thing: str, dtype: str, shape: tuple[int, ...]) -> Iterator[Fault]:
    if len(shape) > MAX_RANK:
        yield Fault(MANIFEST, f"{thing} has {len(shape)} axes; at most {MAX_RANK} can be")
    elif any(size > MAX_BYTES for size in shape):
        yield Fault(MANIFEST, f"{thing} has an axis longer than {MAX_BYTES}")
    elif ITEM_BYTES[dtype] * math.prod(shape) > MAX_BYTES:
        yield Fault(MANIFEST, f"{thing}, {dtype}{list(shape)}, is over {MAX_BYTES} bytes")


def _spec(case: Case) -> Iterator[Fault]:
    manifest, spec = case.manifest, case.manifest.spec
    if manifest.k and spec.head is None:
        yield Fault(MANIFEST, f"k is {manifest.k} and the spec has no head to draft with")
    if spec.gdn is None and spec.layers_of(LayerKind.GDN):
        yield Fault(
            MANIFEST, "the spec has layers of kind gdn and says nothing of their sizes"
        )
    if manifest.cache_rows < manifest.capacity + manifest.rows:
        yield Fault(
            MANIFEST,
            f"cache_rows is {manifest.cache_rows}; capacity {manifest.capacity} and a verify "
            f"of {manifest.rows} rows need {manifest.capacity + manifest.rows}",
        )
    for name, wanted in contract_buffers(manifest).items():
        found = manifest.buffers.get(name)
        if found is None:
            yield Fault(f"{MANIFEST}:{name}", f"buffer {name} is missing; a run needs it")
        elif found != wanted:
            yield Fault(
                f"{MANIFEST}:{name}",
                f"buffer {name} is {_shown(found)}; the spec makes it {_shown(wanted)}",
            )
    yield from _states(manifest)


def _shown(buffer: Buffer) -> str:
    return f"{buffer.dtype}[{', '.join(map(str, buffer.shape))}]"


def _states(manifest: Manifest) -> Iterator[Fault]:
    """Every state enters and leaves each forward that needs it, whole."""
    for name, state in states(manifest).items():
        for graph in FORWARDS[state.owner]:
            if graph not in manifest.graphs:
                continue  # absent, or another rule says so
            ports = manifest.graphs[graph]
            for kind, given in (("input", ports.inputs), ("output", ports.outputs)):
                bound = [port for port in given if port.buffer == state.buffer]
                if not any(_holds(port, state) for port in bound):
                    yield Fault(
                        f"{graph}:{name}",
                        f"{graph} has no {kind} bound to {name}, elements {state.offset} to "
                        f"{state.end} of {state.buffer}",
                    )
                for port in bound:
                    if state.buffer == name and port.shape != state.shape:
                        yield Fault(
                            f"{graph}:{port.name}",
                            f"{port.name} is {list(port.shape)}; it must be all of {name}, "
                            f"{list(state.shape)}",
                        )


def _holds(port: Port, state: State) -> bool:
    start, end = port.span()
    return start <= state.offset and state.end <= end


SIZES_RULE = Rule(
    code="manifest.sizes",
    severity=Severity.ERROR,
    title="every shape in the manifest can be allocated",
    explanation="Sizes beyond any machine are a damaged file; nothing else of it is read.",
    remedy="copy the whole artifact again, or build it again",
    run=_sizes,
)

SPEC_RULES = (
    Rule(
        code="manifest.spec",
        severity=Severity.ERROR,
        title="buffers are those that the model's spec demands",
        explanation=(
            "A run allocates what the manifest says and trusts it: caches of cache_rows rows "
            "with room for a verify's padding, recurrent states in float32 (half precision "
            "there ruins answers), and each state bound whole to every target graph."
        ),
        remedy="build the artifact again",
        run=_spec,
    ),
)
