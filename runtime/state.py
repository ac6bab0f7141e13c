"""What a sequence is: its tokens, how many are in the caches, and whether it goes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from runtime.logprobs import TokenLogprob

__all__ = ["Finish", "Sequence", "Step"]


class Finish(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    """A stop token was emitted; it is the last token."""
    LENGTH = "length"
    """As many tokens as were wanted."""
    CAPACITY = "capacity"
    """The caches of the artifact are full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one step emitted."""

    tokens: tuple[int, ...]
    """In order; at least one."""
    drafted: int
    """Drafts that were verified."""
    accepted: int
    """Of these, how many stood; more than were emitted where a stop token cut them."""
    finish: Finish | None
    """Why the generation ended with this step, or None where it goes on."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of each of the tokens, where they were asked for."""


@dataclass(slots=True, kw_only=True)
class Sequence:
    """A prompt and what followed it.

    The newest token is emitted but not yet fed to the target, so `length`, the rows in the
    target's caches, is one less than the number of all tokens.
    """

    prompt: tuple[int, ...]
    capacity: int
    """Rows that count in the caches."""
    length: int
    """Rows committed in the target's caches: tokens fed so far."""
    stop_ids: frozenset[int]
    """Tokens that end it."""
    most: int | None
    """Tokens to emit; None for no limit."""
    emitted: list[int] = field(default_factory=list)
    last: tuple[int, ...] = ()
    """The tokens after the rows that the last forward committed; the last rows of the
    caches."""
    cut: tuple[int, ...] = ()
    """Tokens of the last forward after the one that ended the sequence: never emitted, but the
    caches may hold them."""
    finish: Finish | None = None

    @property
    def fed(self) -> tuple[int, ...]:
        """The tokens that the caches hold, `length` of them."""
        return (*self.prompt, *self.emitted, *self.cut)[: self.length]

    @property
    def useful_drafts(self) -> int:
        """Most drafts a step can use: all rows must fit, all tokens must be wanted."""
        room = self.capacity - self.length - 1
        return room if self.most is None else min(room, self.most - len(self.emitted) - 1)

    def advance(self, tokens: tuple[int, ...], length: int) -> tuple[int, ...]:
        """Take in what a forward emitted; returns what is kept and sets `finish`.

        Args:
            tokens: Emitted by the forward; those after a stop token are dropped.
            length: Rows that are committed now.
        """
        self.length, self.last = length, tokens
        left = None if self.most is None else self.most - len(self.emitted)
        kept = tokens[:left]
        stop = next((i for i, token in enumerate(kept) if token in self.stop_ids), None)
        if stop is not None:
            kept, self.finish = kept[: stop + 1], Finish.STOP
        elif left is not None and len(kept) == left:
            self.finish = Finish.LENGTH
        elif self.length >= self.capacity:
            self.finish = Finish.CAPACITY
        self.emitted.extend(kept)
        self.cut = tokens[len(kept) :]
        return kept
