"""What an artifact costs on this machine: greedy and MTP decoding, measured in one run.

Every figure is measured or absent (None); nothing is derived from a figure of elsewhere.
"""

from __future__ import annotations

import math
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import onnxruntime

from artifacts.version import PRODUCER
from runtime.decode import Decoder
from runtime.graph_lines import captured_counters
from runtime.load import Loaded
from runtime.propose import ForcedProposer, HeadProposer, Proposer

__all__ = ["BenchOptions", "BenchReport", "MtpFigures", "bench"]

COPY_BYTES = 1 << 28
"""Large enough to lie in no cache, small enough for any machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What to measure."""

    ks: tuple[int, ...]
    """Drafts a step, each measured on its own."""
    contexts: tuple[int, ...]
    """Prompt lengths."""
    acceptance: float | None
    """Chance that a draft is right, by replacing its id; None leaves drafts as they are."""
    steps: int
    """Measured steps of each kind."""
    warm_up: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpFigures:
    """MTP decoding at one context and k."""

    k: int
    step_ms: float
    """Median of whole steps, host included."""
    draft_ms: float
    """Median of the draft graph alone, waited for."""
    verify_ms: float
    host_ms: float
    """Of a step, what neither graph accounts for."""
    tokens_per_step: float
    tokens_per_second: float
    """Tokens of all measured steps over their time."""
    over_greedy: float
    positions: list[list[int]]
    """By draft position: tried, accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextFigures:
    """Everything at one prompt length."""

    context: int
    prefill_ms: float
    greedy_ms: float
    """Median of whole decode steps."""
    greedy_tokens_per_second: float
    decode_graph_ms: float
    mtp: list[MtpFigures] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """The report of one run."""

    model: dict[str, Any]
    options: BenchOptions
    contexts: list[ContextFigures]
    weight_bytes: dict[str, int]
    """That a forward of each graph reads."""
    copy_bytes_per_second: float
    """Of this machine's memory, read and written, measured in this run."""
    bandwidth_share: dict[str, float]
    """Of `copy_bytes_per_second`: what reading the weights in a graph's time comes to."""
    graphs: dict[str, dict[str, int]]
    kernels: dict[str, str]
    """Which run, which the artifact was built for, and why the two differ."""
    memory: dict[str, Any] | None
    load_seconds: float | None
    """From files to captured graphs."""
    versions: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)


def bench(
    loaded: Loaded,
    options: BenchOptions,
    progress: Callable[[str], None] = lambda _: None,
    *,
    load_seconds: float | None = None,
) -> BenchReport:
    """Measure `loaded`; raises what decoding raises."""
    manifest = loaded.manifest
    contexts = []
    for context in options.contexts:
        progress(f"context {context}: greedy")
        contexts.append(_context(loaded, context, options, progress))
    bandwidth = loaded.buffers.copy_bandwidth(COPY_BYTES)
    weights = {
        name: sum(_read_bytes(loaded, tensor) for tensor in graph.weights)
        for name, graph in manifest.graphs.items()
    }
    times = {"decode": contexts[0].decode_graph_ms}
    if contexts[0].mtp:
        times["verify"] = contexts[0].mtp[-1].verify_ms
    return BenchReport(
        model={
            "family": manifest.spec.family,
            "source": manifest.source.kind,
            "layers": len(manifest.spec.layers),
            "k": manifest.k,
            "capacity": manifest.capacity,
            **manifest.target.to_json(),
        },
        options=options,
        contexts=contexts,
        weight_bytes=weights,
        copy_bytes_per_second=bandwidth,
        bandwidth_share={
            name: weights[name] / (1e-3 * ms) / bandwidth for name, ms in times.items()
        },
        graphs={n: c.to_json() for n, c in captured_counters(loaded.slots).items()},
        kernels=loaded.kernels.to_json(),
        memory=None if loaded.memory is None else loaded.memory.to_json(),
        load_seconds=load_seconds,
        versions={
            "producer": PRODUCER,
            "onnxruntime": onnxruntime.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
        },
    )


def _read_bytes(loaded: Loaded, name: str) -> int:
    """Bytes of a weight that a forward reads; of an embedding that is only looked up, none."""
    manifest = loaded.manifest
    looked_up = name == "embed" and not (
        manifest.spec.tied_embedding and manifest.target.weights == "dense"
    )
    return 0 if looked_up else manifest.weights.length(name)


def _context(
    loaded: Loaded, context: int, options: BenchOptions, progress: Callable[[str], None]
) -> ContextFigures:
    vocabulary = loaded.manifest.spec.vocab_size
    prompt = np.random.default_rng(options.seed).integers(0, vocabulary, context).tolist()
    decoder = Decoder(loaded)
    most = max(options.ks, default=0) + 1
    steps = (options.steps + options.warm_up) * most + 1
    room = loaded.manifest.capacity - context - most
    steps = min(steps, room)
    start = time.perf_counter()
    tokens = list(decoder.prefill(prompt).tokens)
    prefill = time.perf_counter() - start
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        tokens += decoder.step(0).tokens
        times.append(time.perf_counter() - start)
    measured = times[options.warm_up : options.warm_up + options.steps]
    greedy = statistics.median(measured)
    decode = _graph_ms(loaded, "decode", decoder, prompt, options)
    mtp = []
    for k in options.ks:
        progress(f"context {context}: k = {k}")
        mtp.append(_mtp(loaded, prompt, tokens, k, greedy, options))
    return ContextFigures(
        context=context,
        prefill_ms=1e3 * prefill,
        greedy_ms=1e3 * greedy,
        greedy_tokens_per_second=len(measured) / math.fsum(measured),
        decode_graph_ms=decode,
        mtp=mtp,
    )


def _mtp(
    loaded: Loaded,
    prompt: Sequence[int],
    tokens: Sequence[int],
    k: int,
    greedy: float,
    options: BenchOptions,
) -> MtpFigures:
    head: Proposer = HeadProposer(loaded)
    if options.acceptance is not None:
        head = ForcedProposer(
            head,
            loaded.buffers,
            tokens,
            acceptance=options.acceptance,
            vocab_size=loaded.manifest.spec.vocab_size,
            seed=options.seed + k,
        )
    decoder = Decoder(loaded, proposer=head)
    decoder.prefill(prompt)
    times, made = [], []
    emitted = 1
    for _ in range(options.warm_up + options.steps):
        if emitted + k + 1 > len(tokens):
            break
        start = time.perf_counter()
        step = decoder.step(k)
        times.append(time.perf_counter() - start)
        made.append(len(step.tokens))
        emitted += made[-1]
    times, made = times[options.warm_up :], made[options.warm_up :]
    positions = [list(position) for position in decoder.stats.positions]
    draft = _graph_ms(loaded, "draft", decoder, prompt, options)
    verify = _graph_ms(loaded, "verify", decoder, prompt, options, k)
    step_ms = 1e3 * statistics.median(times)
    rate = sum(made) / math.fsum(times)
    return MtpFigures(
        k=k,
        step_ms=step_ms,
        draft_ms=draft,
        verify_ms=verify,
        host_ms=step_ms - draft - verify,
        tokens_per_step=sum(made) / len(made),
        tokens_per_second=rate,
        over_greedy=rate * greedy,
        positions=positions,
    )


def _graph_ms(
    loaded: Loaded,
    graph: str,
    decoder: Decoder,
    prompt: Sequence[int],
    options: BenchOptions,
    drafts: int = 0,
) -> float:
    """Median of one graph run alone, and waited for, at the length of the prompt."""
    decoder.prefill(prompt)
    buffers, slot = loaded.buffers, loaded.slots[graph]
    length = np.array([len(prompt)], np.int32)
    if graph == "verify":
        buffers.write("draft_count", np.array([drafts], np.int32))
    times = []
    for _ in range(options.warm_up + min(options.steps, 40)):
        buffers.write("length", length)
        buffers.read("length", (1,))  # waits: the write is no part of the graph
        start = time.perf_counter()
        slot.run()
        buffers.read("length", (1,))
        times.append(time.perf_counter() - start)
    decoder.sequence = None
    return 1e3 * statistics.median(times[options.warm_up :])
