"""Where drafts come from."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from typing import Protocol

import numpy as np

from runtime.buffers import Buffers
from runtime.slots import Slot
from runtime.state import Sequence

__all__ = ["ForcedProposer", "HeadProposer", "NoProposer", "Proposer"]


class Proposer(Protocol):
    """Guesses the next tokens of a sequence."""

    def propose(self, sequence: Sequence, most: int) -> int:
        """Put at most `most` (1 or more) drafts into rows 1 onwards of the buffer ``ids``.

        Returns how many; 0 lets the decode slot run. Row 0 holds the newest token and stays.
        """


class HeadProposer:
    """The model's own MTP head.

    Its graph first takes in the rows that the last forward committed, so that the head's
    cache follows the target's, and then guesses.
    """

    def __init__(self, draft: Slot, k: int) -> None:
        self._draft = draft
        self._k = k

    def propose(self, sequence: Sequence, most: int) -> int:
        """Guess with the draft graph, which always makes k guesses."""
        self._draft.run()
        return min(self._k, most)


class ForcedProposer:
    """The head's drafts, replaced by tokens that are known to be right or wrong.

    For measurements at a chosen acceptance: the head still runs and the verify still
    decides; only the ids between them are set by hand.
    """

    def __init__(
        self,
        head: Proposer,
        buffers: Buffers,
        tokens: Tokens[int],
        *,
        acceptance: float,
        vocab_size: int,
        seed: int = 0,
    ) -> None:
        """Replace drafts.

        Args:
            head: What is measured.
            buffers: Hold ``ids``.
            tokens: What the target emits after this prompt, recorded before.
            acceptance: Chance of each draft to be the recorded token.
            vocab_size: Of the wrong tokens.
            seed: Of the chances.
        """
        self._head, self._buffers, self._tokens = head, buffers, tokens
        self._acceptance, self._vocab = acceptance, vocab_size
        self._random = np.random.default_rng(seed)

    def propose(self, sequence: Sequence, most: int) -> int:
        """Let the head guess, then overwrite its guesses."""
        drafted = self._head.propose(sequence, most)
        start = len(sequence.emitted)
        known = np.array(self._tokens[start : start + drafted], np.int64)
        wrong = self._random.random(len(known)) >= self._acceptance
        known[wrong] = (known[wrong] + 1) % self._vocab
        ids = np.array([[sequence.emitted[-1], *known]], np.int64)
        self._buffers.write("ids", ids)
        return len(known)


class NoProposer:
    """No drafts: plain decoding."""

    def propose(self, sequence: Sequence, most: int) -> int:
        """Nothing."""
        return 0
