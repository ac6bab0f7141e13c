"""Does verify compute what decode computes, whatever was drafted, accepted or left unused?

One prompt is prefilled. From there, k + 1 decode steps are the reference. Then, from the same
start, verify runs once for every draft count d and every accepted count a <= d: the first a
drafts are right, the next one is wrong, and the padding behind holds *right* tokens, which a
graph that overlooks `draft_count` would accept. Beforehand everything that must not be read
is filled with NaN: cache rows from `length` on and the outputs of earlier forwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from artifacts import Finding, Severity
from runtime.buffers import CACHES, Array
from runtime.committed import cache_rows, poison, states_of
from runtime.decode import Decoder
from runtime.measure import TOLERANCE, gap, spread

__all__ = ["check_rows"]


@dataclass(slots=True)
class Reference:
    """What k + 1 decode steps did, from one start."""

    length: int
    """Rows committed at the start."""
    start: dict[str, Array]
    """Every buffer but the caches, whose first `length` rows no forward changes."""
    tokens: list[int] = field(default_factory=list)
    """The newest token at the start, then what each step emitted."""
    logits: list[Array] = field(default_factory=list)
    """``[V]`` of each step."""
    states: list[dict[str, Array]] = field(default_factory=list)
    """Convolution and recurrent states after each step."""
    caches: dict[str, Array] = field(default_factory=dict)
    """``[1, Hkv, k + 1, hd]``: the rows that the steps wrote."""


def check_rows(decoder: Decoder, prompt: Sequence[int]) -> list[Finding]:
    """Compare verify with decode at every draft count and accepted count.

    Args:
        decoder: Of an artifact with a head; its sequence is lost.
        prompt: Leaves ``k + 1`` rows of the capacity free.

    Returns:
        An error for each quantity that differs (worst case named), else one note that says
        how far apart the two were.
    """
    m = decoder.manifest
    limit = TOLERANCE[m.target.dtype]
    reference = _decode_reference(decoder, prompt)
    worst: dict[str, tuple[float, str]] = {}
    cases = [(d, a) for d in range(m.k + 1) for a in range(d + 1)]
    for drafted, right in cases:
        case = f"{right} of {drafted} drafts right"
        for quantity, distance in _verify_case(decoder, reference, drafted, right):
            if distance > worst.get(quantity, (0.0, ""))[0]:
                worst[quantity] = (distance, case)
    findings = [
        Finding(
            "run.rows",
            Severity.ERROR,
            m.graphs["verify"].file,
            f"{quantity} after verify: {_shown(distance, limit)} ({case}, compared with "
            f"{m.rows} decode steps)",
            "verify reads padding, keeps another row's state, or computes something else than "
            "decode; build the artifact again, and report it if it comes again",
        )
        for quantity, (distance, case) in worst.items()
        if distance > limit
    ]
    if not findings:
        most = max((distance for distance, _ in worst.values()), default=0.0)
        findings.append(
            Finding(
                "run.rows",
                Severity.NOTE,
                m.graphs["verify"].file,
                f"verify equals decode in {len(cases)} cases of drafted and accepted, with "
                f"poisoned padding; largest difference {most:.2g} (allowed {limit:g})",
                "nothing to do",
            )
        )
    return findings


def _shown(distance: float, limit: float) -> str:
    if np.isinf(distance):
        return "wrong"
    return f"off by {distance:.2g} of the largest value, {limit:g} allowed"


def _decode_reference(decoder: Decoder, prompt: Sequence[int]) -> Reference:
    m, buffers = decoder.manifest, decoder.loaded.buffers
    first = decoder.prefill(prompt).tokens[0]
    kept = [name for name in m.buffers if not name.endswith(CACHES)]
    start = {name: buffers.read(name) for name in kept}
    reference = Reference(len(prompt), start, tokens=[first])
    poison(decoder.loaded, reference.length)
    for _ in range(m.rows):
        reference.tokens += decoder.step(0).tokens
        reference.logits.append(buffers.read("logits", (m.spec.vocab_size,)))
        reference.states.append(states_of(decoder.loaded))
    reference.caches = cache_rows(decoder.loaded, reference.length, m.rows)
    return reference


def _verify_case(
    decoder: Decoder, reference: Reference, drafted: int, right: int
) -> Iterator[tuple[str, float]]:
    """Run verify with forced drafts; yields each quantity and how far off it is."""
    m, buffers = decoder.manifest, decoder.loaded.buffers
    for name, values in reference.start.items():
        buffers.write(name, values)
    poison(decoder.loaded, reference.length)
    ids = list(reference.tokens[: m.rows])
    if right < drafted:
        ids[right + 1] = (ids[right + 1] + 1) % m.spec.vocab_size
    buffers.write("ids", np.array([ids], np.int64))
    buffers.write("draft_count", np.array([drafted], np.int32))
    decoder.loaded.slots["verify"].run()

    result = [int(value) for value in buffers.read("result")]
    accepted, length, best = result[0], result[1], result[2 : 2 + m.rows]
    logits = buffers.read("logits")[0]
    expected = _accepted(ids[1 : drafted + 1], best)
    if accepted != expected or (expected != right and not _is_tie(reference, best, decoder)):
        yield "the accepted count", float("inf")
        return
    whole = accepted + 1
    for quantity, got, want in (
        ("the length in 'result'", length, reference.length + whole),
        ("the buffer 'length'", int(buffers.read("length")[0]), reference.length + whole),
        ("the buffer 'accepted'", int(buffers.read("accepted")[0]), accepted),
        ("the next token in 'ids'", int(buffers.read("ids")[0, 0]), best[accepted]),
        ("the buffer 'best'", buffers.read("best")[0, :whole].tolist(), best[:whole]),
        ("the best token", logits[:whole].argmax(axis=1).tolist(), best[:whole]),
        ("the finite flags", result[2 + m.rows :][:whole], [1] * whole),
    ):
        yield quantity, 0.0 if got == want else float("inf")
    stood = min(whole, right + 1)
    yield "logits", spread(logits[:stood], np.stack(reference.logits[:stood]))
    if whole != stood:
        return
    for name, values in states_of(decoder.loaded).items():
        yield f"state {name!r}", spread(values, reference.states[accepted][name])
    for name, rows in cache_rows(decoder.loaded, reference.length, whole).items():
        yield f"cache {name!r}", spread(rows, reference.caches[name][:, :, :whole])


def _accepted(drafts: Sequence[int], best: Sequence[int]) -> int:
    count = 0
    while count < len(drafts) and drafts[count] == best[count]:
        count += 1
    return count


def _is_tie(reference: Reference, best: Sequence[int], decoder: Decoder) -> bool:
    """Whether the first token that verify sees otherwise than decode is a near tie."""
    limit = 2 * TOLERANCE[decoder.manifest.target.dtype]
    for row, token in enumerate(best):
        if token != reference.tokens[row + 1]:
            return gap(reference.logits[row], token) <= limit
    return True
