"""What of a new prompt the caches hold already.

Rows of a cache are never changed once they count, so a prompt that begins with the tokens
they hold can go on after them. A recurrent state has no rows: it is that of *all* tokens fed
so far and cannot be taken back. So a copy is kept of the states after one or two earlier rows
(`checkpoint`), and a prompt goes on from the longest of these that it extends:

    fed to the caches        a b c d e f          the live state, of 6 tokens
    kept                         c                the states of 3 tokens
    new prompt a b c d e f g     feed g
    new prompt a b c x           restore c, feed x
    new prompt a b c d e f       restore c, feed d e f: a forward must give the next token
    new prompt b                 feed b from the start
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from artifacts import Manifest
from runtime.buffers import CACHES, Buffers, Checkpoint
from runtime.errors import DeviceError
from runtime.slots import Slot

__all__ = ["KeptStates", "pieces"]

logger = logging.getLogger(__name__)

KEPT = 2
"""Checkpoints at most: the one before this turn and the one before the last. Each takes as
much memory as all recurrent states."""


@dataclass(frozen=True, slots=True)
class _Kept:
    tokens: tuple[int, ...]
    states: Checkpoint


class KeptStates:
    """States along the rows that the caches hold; each is of a beginning of the next one."""

    def __init__(
        self, manifest: Manifest, buffers: Buffers, slots: Mapping[str, Slot]
    ) -> None:
        self._buffers = buffers
        self._draft = slots["draft"] if manifest.k else None
        self._names = state_buffers(manifest)
        self._kept: list[_Kept] = []

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens that each of them is of, ascending."""
        return tuple(len(kept.tokens) for kept in self._kept)

    def restart(self) -> int:
        """Make all as before the first prompt; returns 0, the tokens fed."""
        self.close()
        self._buffers.reset()
        self._buffers.holder = self
        return 0

    def close(self) -> None:
        """Give the memory of all copies back."""
        while self._kept:
            self._kept.pop().states.close()

    def rewind(self, ids: Sequence[int], fed: Sequence[int] | None) -> int:
        """Make the buffers hold the longest known beginning of `ids`, never all of it.

        Args:
            ids: A prompt.
            fed: Tokens of the live state, None where it cannot be trusted.

        Returns:
            How many tokens were fed to the state that is there now; 0 after a reset.
        """
        if self._buffers.holder is not self:  # others used them since: nothing is left
            return self.restart()
        if fed and _extends(ids, fed):
            self._follow(ids[len(fed)])
            return len(fed)
        while self._kept and not _extends(ids, self._kept[-1].tokens):
            self._kept.pop().states.close()
        if not self._kept:
            return self.restart()
        kept = self._kept[-1]
        kept.states.restore()
        self._follow(ids[len(kept.tokens)])
        return len(kept.tokens)

    def keep(self, tokens: Sequence[int]) -> None:
        """Copy the states as they are: `tokens` were fed, the last of them by a prefill.

        Without room on the device nothing is kept, and later prompts have more to feed.
        """
        if len(tokens) in self.lengths:
            return
        if len(self._kept) == KEPT:
            self._kept.pop(0).states.close()
        try:
            states = self._buffers.checkpoint(self._names)
        except DeviceError as e:
            logger.info("the state after %d tokens is not kept: %s", len(tokens), e)
            return
        self._kept.append(_Kept(tuple(tokens), states))

    def catch_up(self) -> None:
        """Write the head's rows of the last forward; drafting does it, prefill and decode not.

        The head's row of a token takes in the token after it, so that of the last token fed
        is open until the next one is known.
        """
        if self._draft is not None:
            self._draft.run()

    def _follow(self, token: int) -> None:
        """Let `token` come after those fed, whatever the last forward emitted."""
        accepted = int(self._buffers.read("accepted")[0])
        self._buffers.write("best", np.array([[token]], np.int64), accepted)
        self.catch_up()


def pieces(start: int, end: int, most: int, cut: int | None) -> Iterator[tuple[int, int]]:
    """Chunks of at most `most` rows from `start` to `end`, one of which ends at `cut`."""
    while start < end:
        last = min(start + most, end)
        if cut is not None and start < cut < last:
            last = cut
        yield start, last
        start = last


def state_buffers(manifest: Manifest) -> tuple[str, ...]:
    """Buffers that say, after a prefill, all that the caches' rows do not."""
    states = {
        port.buffer: None
        for port in manifest.graphs["decode"].inputs
        if port.name.startswith("past.") and not port.name.endswith(CACHES)
    }
    return (*states, "hidden", "accepted", "length")


def _extends(ids: Sequence[int], tokens: Sequence[int]) -> bool:
    return len(ids) > len(tokens) and list(ids[: len(tokens)]) == list(tokens)
