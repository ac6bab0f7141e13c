"""Do the graphs that an artifact may have besides do what their counterparts do?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from artifacts import Finding, Severity
from runtime.buffers import Array
from runtime.check_lossless import explain
from runtime.decode import Decoder
from runtime.measure import TOLERANCE, spread
from runtime.sampling import SamplingOptions

__all__ = ["PLAIN_STEPS", "check_catch_up", "check_sampling"]

PLAIN_STEPS = 5
"""Rows that the head misses before it must take them in."""
REBUILD = "build the artifact again, and report it if it comes again"
SEED = 20_000


def check_sampling(decoder: Decoder, prompt: Sequence[int], count: int) -> Iterator[Finding]:
    """Compare sampled tokens with and without drafts, and a choice of one with greedy."""
    m = decoder.manifest
    graph = "verify_sampled" if m.k else "decode_sampled"
    one = SamplingOptions(top_k=1, seed=SEED)
    greedy = _tokens(decoder, prompt, count, None, None)
    chosen = _tokens(decoder, prompt, count, one, None)
    place = _first_difference(greedy, chosen)
    if place is not None:
        found = explain(decoder, prompt, chosen, place, greedy[place])
        if found.gap > 2 * TOLERANCE[m.target.dtype]:
            yield Finding(
                "run.sampling",
                Severity.ERROR,
                m.graphs[graph].file,
                f"sampling from the likeliest token alone is not greedy decoding: token "
                f"{place} is {chosen[place]}, greedily {greedy[place]}",
                REBUILD,
            )
            return
    drawn = SamplingOptions(top_p=0.95, seed=SEED)
    plain, drafted = (_tokens(decoder, prompt, count, drawn, k) for k in (0, None))
    place = _first_difference(plain, drafted)
    exact = m.target.provider == "cpu"
    if place is None:
        severity, says = Severity.NOTE, f"{count} sampled tokens are the same with drafts"
    else:
        severity = Severity.ERROR if exact else Severity.NOTE
        says = f"with drafts, sampled token {place} of {count} is another for the same seed"
    remedy = REBUILD if severity is Severity.ERROR else "nothing to do"
    yield Finding("run.sampling", severity, m.graphs[graph].file, says, remedy)


def _tokens(
    decoder: Decoder,
    prompt: Sequence[int],
    count: int,
    sampling: SamplingOptions | None,
    k: int | None,
) -> list[int]:
    steps = decoder.generate(prompt, count, k=k, stop_ids=(), sampling=sampling)
    return [token for step in steps for token in step.tokens]


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)


def check_catch_up(decoder: Decoder, prompt: Sequence[int]) -> Iterator[Finding]:
    """Compare the head's cache after plain steps with that after a prompt of all tokens.

    The capacity must hold the prompt, the steps and a verify.
    """
    m = decoder.manifest
    tokens = [*prompt, *decoder.prefill(prompt).tokens]
    for _ in range(PLAIN_STEPS):
        tokens += decoder.step(0).tokens
    decoder.step()
    late = _head_rows(decoder, len(tokens) - 1)
    decoder.prefill(tokens[:-1])
    decoder.step()
    whole = _head_rows(decoder, len(tokens) - 1)
    limit = TOLERANCE[m.target.dtype]
    apart = max(spread(late[name], whole[name]) for name in whole)
    if apart > limit:
        yield Finding(
            "run.catch_up",
            Severity.ERROR,
            m.graphs["catch_up"].file,
            f"the head's cache after {PLAIN_STEPS} steps without drafts is {apart:.2g} from "
            f"that after a prompt of the same tokens (allowed {limit:g})",
            REBUILD,
        )
    else:
        yield Finding(
            "run.catch_up",
            Severity.NOTE,
            m.graphs["catch_up"].file,
            f"the head's cache misses no row after steps without drafts ({apart:.2g} apart)",
            "nothing to do",
        )


def _head_rows(decoder: Decoder, count: int) -> dict[str, Array]:
    read = decoder.loaded.buffers.read
    names = [name for name in decoder.manifest.buffers if name.startswith("head.")]
    return {name: np.array(read(name)[:, :, :count]) for name in names}
