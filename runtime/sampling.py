"""Sampling: what a caller may ask for, and what the host says to the graphs that sample.

The graphs choose among the 256 likeliest tokens of a row: the token whose scaled logit plus
noise is largest. With Gumbel noise that is a draw from the softmax, and since the noise of a
row depends on the seed and the row's position alone, the token of a position is the same
whether it was drafted or not: a draft stands iff it is the token that is sampled there.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

import numpy as np

from artifacts import SAMPLED_RANKS, Manifest
from runtime.buffers import Array, Buffers
from runtime.errors import RequestError

__all__ = ["Noise", "Sampler", "SamplingOptions", "check_samples"]

MAX_SEED = 2**64 - 1
LIMITS: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_k": (0, SAMPLED_RANKS),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-100, 100),
    "frequency_penalty": (-100, 100),
    "seed": (0, MAX_SEED),
}
"""Least and most of each option; top_p 0 leaves the likeliest token alone."""
WHOLE = ("top_k", "seed")
BLOCK = 32
"""Positions whose noise is made at once: one call costs little more than one position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How tokens are drawn; raises `RequestError` for what cannot be.

    The order is: penalties, temperature, top-k, top-p, min-p. Each of the last three is
    measured on what those before it left.
    """

    temperature: float = 1.0
    """Logits are divided by it; 0 takes the likeliest token."""
    top_k: int = 0
    """Draw from so many likeliest tokens, 256 at most; 0 for all of the 256 likeliest."""
    top_p: float = 1.0
    """Draw from the fewest tokens whose probabilities add up to this."""
    min_p: float = 0.0
    """Leave out tokens less likely than this share of the likeliest."""
    repetition_penalty: float = 1.0
    """Divides positive logits, multiplies negative ones, of tokens that are in the prompt or
    the output."""
    presence_penalty: float = 0.0
    """Taken off the logit of tokens that are in the output."""
    frequency_penalty: float = 0.0
    """Taken off the logit once for each time that the token is in the output."""
    seed: int | None = None
    """The same seed gives the same text; None draws one."""

    def __post_init__(self) -> None:
        for name, (least, most) in LIMITS.items():
            value = getattr(self, name)
            if value is None and name == "seed":
                continue
            whole = name in WHOLE
            kinds = int if whole else (int, float)
            if isinstance(value, bool) or not isinstance(value, kinds):
                raise RequestError(
                    f"{name} is {_shown(value)}; give a {'whole ' if whole else ''}number"
                )
            if not least <= value <= most:  # NaN is in no range
                raise RequestError(f"{name} is {_shown(value)}; it must be {_range(name)}")

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Read options by name; raises `RequestError` for one that is unknown or cannot be."""
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise RequestError(
                    f"there is no sampling option {_shown(name)}, only {', '.join(known)}"
                )
        return cls(**values)

    @property
    def penalises(self) -> bool:
        """Whether earlier tokens matter."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @property
    def is_greedy(self) -> bool:
        """Whether this is plain greedy decoding, for which the greedy graphs serve."""
        return self.temperature == 0 and not self.penalises

    def with_seed(self) -> Self:
        """These options with a seed, a fresh one where none was given."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(63))

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values, the inverse of `parse`."""
        return asdict(self)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _range(name: str) -> str:
    least, most = LIMITS[name]
    if name == "top_k":
        return (
            f"0 (no limit) to {most}, since the graphs draw from the {most} likeliest tokens"
        )
    return f"from {least:g} to {most:g}" if name != "seed" else f"from 0 to {MAX_SEED}"


class Noise:
    """Gumbel noise by seed, position and rank: ``-log(-log(u))`` with u uniform in (0, 1).

    Counter-based (Philox): the noise of a position is found without that of the earlier ones.
    Rank r of position p is draw ``256 * p + r`` of the generator keyed with the seed.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._blocks: dict[int, Array] = {}

    def row(self, position: int, ranks: int) -> Array:
        """``[ranks] float32`` for the token at `position`, the prompt's first being 0."""
        number, row = divmod(position, BLOCK)
        if number not in self._blocks:
            if len(self._blocks) > 1:  # a forward's rows lie in two blocks at most
                self._blocks.clear()
            self._blocks[number] = self._block(number)
        found: Array = self._blocks[number][row, :ranks]
        return found

    def _block(self, number: int) -> Array:
        draws = BLOCK * SAMPLED_RANKS
        start = number * draws // 4  # each step of the counter gives four draws
        raw = np.random.Philox(key=self._seed, counter=start).random_raw(draws)
        uniform = ((raw >> np.uint64(12)) + 0.5) * 2.0**-52  # never 0, never 1
        noise: Array = -np.log(-np.log(uniform))
        return noise.astype(np.float32).reshape(BLOCK, SAMPLED_RANKS)


def check_samples(manifest: Manifest) -> None:
    """Raise `RequestError` where an artifact was built without the graphs that sample."""
    if not manifest.samples:
        raise RequestError(
            "this artifact was built without sampling, so it decodes greedily alone. Build it "
            "again without --no-sampling, or leave the sampling options out"
        )


class Sampler:
    """Writes what the sampling graphs read, for one sequence."""

    def __init__(self, options: SamplingOptions, manifest: Manifest, buffers: Buffers) -> None:
        """Take the options in; raises what `check_samples` raises."""
        check_samples(manifest)
        self.options = options.with_seed()
        assert self.options.seed is not None
        self._noise = Noise(self.options.seed)
        self._draws = options.temperature > 0
        self._ranks = manifest.sampled_ranks
        self._vocab = manifest.spec.vocab_size
        self._buffers = buffers
        self._counts: dict[int, int] = {}

    def begin(self, prompt: Sequence[int]) -> None:
        """Write what stays for the whole sequence."""
        o, write = self.options, self._buffers.write
        numbers = {
            "temperature": o.temperature if self._draws else 1.0,
            # sums of float32 probabilities can reach 1 early; nothing reaches 2
            "top_p": o.top_p if o.top_p < 1 else 2.0,
            "min_p": o.min_p,
            "repetition_penalty": o.repetition_penalty,
            "presence_penalty": o.presence_penalty,
            "frequency_penalty": o.frequency_penalty,
        }
        for name, value in numbers.items():
            write(f"sample.{name}", np.array([value], np.float32))
        top_k = (o.top_k or SAMPLED_RANKS) if self._draws else 1
        write("sample.top_k", np.array([top_k], np.int32))
        if not self._draws:
            shape = self._buffers.declared("sample.noise").shape
            write("sample.noise", np.zeros(shape, np.float32))
        if o.penalises:  # else their factors make both of no matter
            there = np.zeros(self._vocab, np.float32)
            write("sample.counts", there)
            there[list(prompt)] = 1
            write("sample.prompt", there)

    def before_forward(self, length: int, rows: int) -> None:
        """Write the noise of a forward's rows.

        Args:
            length: Rows committed before it: the position of its first row, whose token is
                for the next position.
            rows: Rows of the graph.
        """
        if self._draws:
            noise = [self._noise.row(length + 1 + r, self._ranks) for r in range(rows)]
            self._buffers.write("sample.noise", np.stack(noise)[None])

    def emitted(self, tokens: Sequence[int]) -> None:
        """Count what was emitted, for the penalties."""
        if not self.options.penalises:
            return
        for token in tokens:
            self._counts[token] = self._counts.get(token, 0) + 1
        for token in set(tokens):
            count = np.array([self._counts[token]], np.float32)
            self._buffers.write("sample.counts", count, offset=token)
