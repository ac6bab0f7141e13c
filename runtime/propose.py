"""Where drafts come from."""

from __future__ import annotations

from typing import Protocol

from runtime.slots import Slot
from runtime.state import Sequence

__all__ = ["HeadProposer", "NoProposer", "Proposer"]


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


class NoProposer:
    """No drafts: plain decoding."""

    def propose(self, sequence: Sequence, most: int) -> int:
        """Nothing."""
        return 0
