"""Does an artifact run, and rightly? Checks that need its graphs to run.

run.load        it loads
run.kernels     which kernels run
run.finite      one step of each graph gives finite numbers
run.step        one step of each graph runs and says what can be
run.prefill     a prompt in chunks equals the prompt in one piece
run.rows        verify equals decode, at every accepted count, with poisoned padding
run.lossless    tokens with drafts are those of plain decoding
run.acceptance  the head's drafts are ever accepted
run.catch_up    the head's cache misses nothing after steps without drafts
run.sampling    a seed gives the same tokens with drafts; one choice is greedy decoding
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from artifacts import Finding, ParseError, Severity
from runtime.check_lossless import compare_with_greedy
from runtime.check_optional import PLAIN_STEPS, check_catch_up, check_sampling
from runtime.check_rows import check_rows
from runtime.committed import cache_rows, states_of
from runtime.decode import Decoder
from runtime.errors import FiniteError, RunError
from runtime.load import Loaded, load
from runtime.measure import TOLERANCE, spread
from runtime.tokenizer import Tokenizer

__all__ = ["check_run"]

TEXTS = (
    "The quick brown fox jumps over the lazy dog, and then",
    "def factorial(n):\n    if n <",
    "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self, path):\n",
)
"""Prompts: prose and code, short enough for any capacity that is of use."""
COUNT = 48
"""Tokens that are generated for each prompt."""
SHOWN = 3
"""Near ties of a prompt that are listed one by one."""
MIN_TRIES = 24
"""Below so many drafts, none accepted may be chance."""
CHUNK = 3
"""An odd chunk, so that a prompt's chunks begin at many remainders."""

Progress = Callable[[str], None]


def check_run(
    folder: Path,
    *,
    threads: int = 0,
    prepack: bool | None = None,
    progress: Progress | None = None,
) -> list[Finding]:
    """Run an artifact's graphs and report what is wrong, worst first.

    `threads` and `prepack` are those of `load`.

    Never raises for what is wrong with the artifact: that is a finding.
    """
    tell = progress or (lambda _: None)
    try:
        tell("loading")
        loaded = load(folder, threads=threads, prepack=prepack)
        tokenizer = Tokenizer.of(folder, loaded.manifest)
    except (ParseError, RunError) as e:
        return [_error("run.load", folder.name, str(e), "do what the message says")]
    try:
        prompts = _prompts(loaded, tokenizer)
        findings = list(_run_all(loaded, prompts, tell))
    finally:
        loaded.close()
    order = list(Severity)
    return sorted(findings, key=lambda finding: order.index(finding.severity))


def _run_all(loaded: Loaded, prompts: list[list[int]], tell: Progress) -> Iterator[Finding]:
    decoder = Decoder(loaded)
    m, place = loaded.manifest, loaded.folder.name
    yield _note("run.kernels", place, f"kernels in use: {loaded.kernels}")
    if m.capacity < m.rows + 2:
        yield _error(
            "run.step",
            place,
            f"a capacity of {m.capacity} leaves no room for a step of {m.rows} rows",
            "build the artifact with a larger capacity",
        )
        return
    try:
        tell("one step of each graph")
        yield from _check_finite(decoder, prompts[0])
        tell("prefill in chunks")
        yield from _check_prefill(decoder, prompts[-1])
        if m.k:
            tell("verify against decode")
            yield from check_rows(decoder, prompts[0][: m.capacity - m.rows - 1])
            yield from _check_lossless(decoder, prompts, tell)
        yield from _check_optional(decoder, prompts[0], tell)
    except FiniteError as e:
        yield _error("run.finite", place, str(e), "check the weights and rebuild")
    except RunError as e:
        yield _error("run.step", place, str(e), "build the artifact again")


def _prompts(loaded: Loaded, tokenizer: Tokenizer | None) -> list[list[int]]:
    m = loaded.manifest
    most, vocab = max(1, m.capacity // 2), m.spec.vocab_size
    if tokenizer is not None:
        found = [tokenizer.encode(text)[:most] for text in TEXTS]
        if all(found) and max(map(max, found)) < vocab:
            return found
    sizes = (5, 12, 20)
    return [[(i * 7919 + 13 * n) % vocab for i in range(min(n, most))] for n in sizes]


def _check_finite(decoder: Decoder, prompt: list[int]) -> Iterator[Finding]:
    """Look at every number that a graph put out, not at the logits alone."""
    m = decoder.manifest
    decoder.prefill(prompt)
    yield from _not_finite(decoder, "prefill")
    decoder.step(0)
    yield from _not_finite(decoder, "decode")
    if m.k:
        decoder.prefill(prompt)
        decoder.step()
        yield from _not_finite(decoder, "draft")
        yield from _not_finite(decoder, "verify")


def _not_finite(decoder: Decoder, graph: str) -> Iterator[Finding]:
    buffers, described = decoder.loaded.buffers, decoder.manifest.graphs[graph]
    for port in described.outputs:
        if any(isinstance(size, str) for size in port.shape):
            continue  # only prompt buffers are open, and those are inputs
        shape = tuple(size for size in port.shape if isinstance(size, int))
        values = buffers.read(port.buffer, shape, port.offset)
        if not np.isfinite(values).all():
            yield _error(
                "run.finite",
                f"{described.file}:{port.name}",
                f"the output {port.name!r} of the {graph} graph holds NaN or infinity",
                "check the weights and rebuild",
            )


def _check_prefill(decoder: Decoder, prompt: list[int]) -> Iterator[Finding]:
    """Compare logits and all states after chunks with those after one piece."""
    m = decoder.manifest
    limit, sizes = TOLERANCE[m.target.dtype], (m.prefill_rows, min(CHUNK, m.prefill_rows), 1)
    seen = []
    for chunk in sizes:
        Decoder(decoder.loaded, chunk=chunk).prefill(prompt)
        logits = decoder.loaded.buffers.read("logits", (m.spec.vocab_size,))
        caches = cache_rows(decoder.loaded, 0, len(prompt))
        seen.append({"logits": logits} | states_of(decoder.loaded) | caches)
    for chunk, values in zip(sizes[1:], seen[1:], strict=True):
        for name, value in values.items():
            apart = spread(value, seen[0][name])
            if apart > limit:
                yield _error(
                    "run.prefill",
                    m.graphs["prefill"].file,
                    f"{name!r} after a prompt of {len(prompt)} tokens in chunks of {chunk} is "
                    f"{apart:.2g} from that in chunks of {sizes[0]} (allowed {limit:g})",
                    "the prefill graph loses state between chunks; build the artifact again",
                )


def _check_optional(decoder: Decoder, prompt: list[int], tell: Progress) -> Iterator[Finding]:
    m = decoder.manifest
    room = m.capacity - len(prompt) - 1
    if "catch_up" in m.graphs and room > PLAIN_STEPS + m.rows:
        tell("the head after steps without drafts")
        yield from check_catch_up(decoder, prompt)
    if m.samples:
        tell("sampling")
        yield from check_sampling(decoder, prompt, min(COUNT, room))


def _check_lossless(
    decoder: Decoder, prompts: list[list[int]], tell: Progress
) -> Iterator[Finding]:
    m, file = decoder.manifest, decoder.manifest.graphs["verify"].file
    results = []
    for number, prompt in enumerate(prompts, 1):
        tell(f"drafting against plain decoding, prompt {number} of {len(prompts)}")
        count = min(COUNT, m.capacity - len(prompt) - 1)
        results.append(compare_with_greedy(decoder, prompt, count))
    for number, result in enumerate(results, 1):
        if result.real is not None:
            yield _error(
                "run.lossless",
                file,
                f"drafting changes the output of prompt {number}: {result.real}",
                "verify does not compute what decode does: see run.rows, and build again",
            )
        for tie in result.ties[:SHOWN]:
            yield _note("run.lossless", file, f"near tie in prompt {number}: {tie}")
        if len(result.ties) > SHOWN:
            more = len(result.ties) - SHOWN
            yield _note("run.lossless", file, f"{more} more near ties in prompt {number}")
    tokens = sum(result.tokens for result in results)
    if not any(result.ties or result.real for result in results):
        yield _note("run.lossless", file, f"all {tokens} tokens are those of plain decoding")
    tried = sum(result.tried for result in results)
    accepted = sum(result.accepted for result in results)
    message = f"{accepted} drafts accepted in {tried} verifies"
    is_trained = m.source.kind != "synthetic"
    if is_trained and tried >= MIN_TRIES and not accepted:
        yield Finding(
            "run.acceptance",
            Severity.WARNING,
            m.graphs["draft"].file,
            message,
            "the head guesses nothing right: compare its inputs, their order and its cache "
            "with the source",
        )
    else:
        yield _note("run.acceptance", m.graphs["draft"].file, message)


def _note(code: str, place: str, message: str) -> Finding:
    return Finding(code, Severity.NOTE, place, message, "nothing to do")


def _error(code: str, place: str, message: str, remedy: str) -> Finding:
    return Finding(code, Severity.ERROR, place, message, remedy)
