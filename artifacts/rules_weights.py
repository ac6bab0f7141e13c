"""Rules about the weight file: manifest, header and graphs say the same of each tensor."""

from __future__ import annotations

from collections.abc import Iterator

from artifacts.fallback import DerivedTensor, derived_fault
from artifacts.findings import Severity
from artifacts.graph_file import ONNX_DTYPES, External, StoredTensor
from artifacts.manifest import MANIFEST, Weights, WeightTensor
from artifacts.parse import ParseError
from artifacts.rule import Case, Fault, Rule
from artifacts.weight_header import tensor_bytes

__all__ = ["WEIGHT_RULES"]

INLINE_BYTES = 2**20
"""Most of a constant inside a graph file: tables such as a rotary cache stay below it."""


def _header(case: Case) -> Iterator[Fault]:
    weights, header = case.manifest.weights, case.header
    for name, tensor in weights.tensors.items():
        if tensor.length != tensor_bytes(tensor.dtype, tensor.shape):
            yield Fault(
                f"{MANIFEST}:{name}",
                f"{name}, {_shown(tensor)}, has {tensor.length} bytes; its shape needs "
                f"{tensor_bytes(tensor.dtype, tensor.shape)}",
            )
    if isinstance(header, ParseError):
        yield Fault(weights.file, str(header))
    elif header is not None:
        yield from _disagreements(weights, header[1], _is_shared(case))


def _is_shared(case: Case) -> bool:
    """Whether several weights may lie in the file as one: random ones of equal shape do."""
    return case.manifest.source.kind == "synthetic"


def _disagreements(
    weights: Weights, header: dict[str, WeightTensor], shared: bool
) -> Iterator[Fault]:
    places = set(header.values())
    for name in [*weights.tensors, *(name for name in header if name not in weights.tensors)]:
        said, found = weights.tensors.get(name), header.get(name)
        place = f"{weights.file}:{name}"
        if found is None and shared and said in places:
            continue
        if found is None:
            yield Fault(place, f"{name} is in {MANIFEST} and not in the header of the file")
        elif said is None:
            yield Fault(place, f"{name} is in the header of the file and not in {MANIFEST}")
        elif said != found:
            yield Fault(
                place, f"{name} is {_shown(found)} in the file's header, {_shown(said)} in "
                f"{MANIFEST}"
            )  # fmt: skip


def _shown(tensor: WeightTensor) -> str:
    sizes = ", ".join(map(str, tensor.shape))
    return f"{tensor.dtype}[{sizes}] at {tensor.offset}+{tensor.length}"


def _overlap(case: Case) -> Iterator[Fault]:
    weights = case.manifest.weights
    spans = sorted(
        (tensor.offset, tensor.offset + tensor.length, name)
        for name, tensor in weights.tensors.items()
        if tensor.length
    )
    start_of_last, end, holder = 0, 0, ""
    for start, stop, name in spans:
        if _is_shared(case) and (start, stop) == (start_of_last, end):
            continue
        if start < end:
            yield Fault(
                f"{weights.file}:{name}",
                f"{name} begins at byte {start}, before {holder} ends at {end}",
            )
        if stop > end:
            start_of_last, end, holder = start, stop, name


def _graph_weights(case: Case) -> Iterator[Fault]:
    for name, _, _ in case.graphs():
        for tensor in case.tensors(name):
            reason = _wrong(tensor, tensor.external, case.manifest.weights)
            if reason:
                yield Fault(f"{name}:{tensor.name}", f"{tensor.name} {reason}")


def _wrong(tensor: StoredTensor, external: External | None, weights: Weights) -> str | None:
    """What is wrong with where a tensor's bytes lie, or None."""
    derived = weights.derived.get(tensor.name)
    if derived is not None and tensor.is_initializer:
        return _wrong_derived(tensor, derived, weights)
    said, proto = weights.tensors.get(tensor.name), tensor.proto
    if external is None:
        if tensor.is_initializer and said is not None:
            return f"has its bytes in the graph, while {weights.file} holds a tensor so called"
        if proto.ByteSize() > INLINE_BYTES:
            return f"has {proto.ByteSize()} bytes in the graph; at most {INLINE_BYTES} may be"
        return None
    if not tensor.is_initializer:
        return "has external data; only initializers may"
    if external.location != weights.file:
        return f"lies in {external.location!r}; all weights are in {weights.file}"
    if said is None:
        return f"refers to {weights.file}, where {MANIFEST} knows no tensor so called"
    if (external.offset, external.length) != (said.offset, said.length):
        return (
            f"lies at {external.offset}+{external.length}; {MANIFEST} says "
            f"{said.offset}+{said.length}"
        )
    if proto.data_type != ONNX_DTYPES[said.dtype] or tuple(proto.dims) != said.shape:
        return (
            f"has ONNX type {proto.data_type} and dims {list(proto.dims)}; {MANIFEST} says "
            f"{said.dtype} (type {ONNX_DTYPES[said.dtype]}) and {list(said.shape)}"
        )
    return None


def _wrong_derived(
    tensor: StoredTensor, derived: DerivedTensor, weights: Weights
) -> str | None:
    """What is wrong with a weight that lies in no file, or None."""
    external = tensor.external
    if external is None or external.location != weights.file:
        place = "the graph" if external is None else repr(external.location)
        return f"lies in {place}; {MANIFEST} says that it is unpacked at load"
    if (external.offset, external.length) != (weights.size, derived.length):
        return (
            f"lies at {external.offset}+{external.length}; it is unpacked at load, so it must "
            f"be at {weights.size}+{derived.length}, behind all that lies in the file"
        )
    dtype, dims = tensor.proto.data_type, tuple(tensor.proto.dims)
    if (dtype, dims) != (ONNX_DTYPES[derived.dtype], derived.shape):
        return (
            f"has ONNX type {dtype} and dims {list(dims)}; {MANIFEST} says {derived.dtype} "
            f"(type {ONNX_DTYPES[derived.dtype]}) and {list(derived.shape)}"
        )
    return None


def _derived(case: Case) -> Iterator[Fault]:
    weights = case.manifest.weights
    for name, tensor in weights.derived.items():
        place = f"{MANIFEST}:{name}"
        if name in weights.tensors:
            yield Fault(place, f"{name} is both in {weights.file} and to be unpacked")
        reason = derived_fault(tensor, weights.tensors.get(tensor.source))
        if reason:
            yield Fault(place, f"{name} {reason}")
    graphs = case.manifest.graphs
    others = {name for name, graph in graphs.items() if graph.fallback}
    for name in (name for name in graphs if others and name not in others):
        yield Fault(f"{MANIFEST}:{name}", f"{name} has no fallback; {min(others)} has one")


WEIGHT_RULES = (
    Rule(
        code="weights.header",
        severity=Severity.ERROR,
        title="the weight file's own header agrees with the manifest",
        explanation=(
            "Readers of safetensors go by the header, runs by the manifest; where the two "
            "differ, one of them reads other numbers than were written."
        ),
        remedy="copy manifest and weight file from the same build, or build again",
        run=_header,
    ),
    Rule(
        code="weights.derived",
        severity=Severity.ERROR,
        title="all graphs have a fallback or none, whose weights can be unpacked",
        explanation=(
            "An artifact for this project's kernels runs in stock operators where they are "
            "not to be had. Its four-bit weights lie in the file once, in the kernels' order, "
            "and are unpacked when they are uploaded: their shapes must go together."
        ),
        remedy="build the artifact again",
        run=_derived,
    ),
    Rule(
        code="weights.overlap",
        severity=Severity.ERROR,
        title="no two weights share bytes",
        explanation="Tensors of different meaning cannot both be right about the same bytes.",
        remedy="build the artifact again",
        run=_overlap,
    ),
    Rule(
        code="graphs.weights",
        severity=Severity.ERROR,
        title="each graph refers to weights as the manifest places them",
        explanation=(
            "Graphs share one weight file, on disk and on the device; a graph with another "
            "offset or type reads other numbers, and weights inside a graph are not shared."
        ),
        remedy="build the artifact again; graphs and weight file come from one build",
        run=_graph_weights,
    ),
)
