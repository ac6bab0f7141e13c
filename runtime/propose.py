"""Where drafts come from: the head, the text so far, the better of both, or nowhere."""

from __future__ import annotations

import abc
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

import numpy as np

from runtime.buffers import Array, Buffers
from runtime.cost import DraftPolicy
from runtime.load import Loaded
from runtime.ngram import NgramIndex
from runtime.state import Sequence

__all__ = [
    "NOTHING",
    "ForcedProposer",
    "HeadProposer",
    "JoinedProposer",
    "NgramProposer",
    "NoProposer",
    "Proposal",
    "Proposer",
]


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts that lie in rows 1 onwards of the buffer ``ids``."""

    drafts: int
    """How many; 0 lets the decode slot run."""
    source: str = ""
    """Whose they are: ``head``, ``lookup`` or a proposer's own name."""


NOTHING = Proposal(0)


class Proposer(abc.ABC):
    """Guesses the next tokens of a sequence."""

    def begin(self) -> None:
        """Forget the last sequence; the buffers hold a new one's first rows soon."""
        return

    @abc.abstractmethod
    def propose(self, sequence: Sequence, most: int) -> Proposal:
        """Put at most `most` (1 or more) drafts into rows 1 onwards of the buffer ``ids``.

        Row 0 holds the newest token and stays.
        """

    def before_forward(self, sequence: Sequence) -> None:
        """Save what is needed of the last forward; the next one overwrites it now."""
        return

    def observe(self, proposal: Proposal, accepted: int) -> None:
        """Learn how many drafts of the step's proposal stood."""
        return


class NoProposer(Proposer):
    """No drafts: plain decoding."""

    def propose(self, sequence: Sequence, most: int) -> Proposal:
        """Nothing."""
        return NOTHING


class HeadProposer(Proposer):
    """The model's own MTP head.

    Its graph first takes in the rows that the last forward committed, so that the head's
    cache follows the target's, and then guesses. Rows of forwards after which it did not
    guess are kept by the host and taken in together, by a graph that only fills the cache,
    before it guesses again.
    """

    def __init__(self, loaded: Loaded) -> None:
        """Use the graphs ``draft`` and, in artifacts that have it, ``catch_up``."""
        self._draft = loaded.slots["draft"]
        self._catch_up = loaded.slots.get("catch_up")
        self._buffers: Buffers = loaded.buffers
        self._k = loaded.manifest.k
        self._width = loaded.manifest.spec.hidden_size
        self._room = loaded.manifest.prefill_rows
        self._missed: list[tuple[Array, tuple[int, ...]]] = []  # hidden, tokens after each row
        self._first_missed = 0
        self._guessed = False

    def begin(self) -> None:
        """Forget the last sequence: a prefill fills the head's cache."""
        self._missed.clear()
        self._guessed = False

    def propose(self, sequence: Sequence, most: int) -> Proposal:
        """Guess with the draft graph, which always makes k guesses."""
        self.take_in()
        self._draft.run()
        self._guessed = True
        return Proposal(min(self._k, most), "head")

    def before_forward(self, sequence: Sequence) -> None:
        """Keep the last forward's rows where the head has not taken them in by a guess."""
        if self._guessed or self._catch_up is None:
            self._guessed = False
            return
        if not self._missed:
            self._first_missed = sequence.length - len(sequence.last)
        rows = (1, len(sequence.last), self._width)
        self._missed.append((self._buffers.read("hidden", rows), sequence.last))

    def take_in(self) -> None:
        """Fill the head's cache with the rows kept, all but those of the last forward."""
        if not self._missed:
            return
        assert self._catch_up is not None  # or nothing is kept
        write = self._buffers.write
        hidden = np.concatenate([rows for rows, _ in self._missed], axis=1)
        tokens = np.array([[token for _, after in self._missed for token in after]], np.int64)
        for start in range(0, tokens.shape[1], self._room):
            part = slice(start, start + self._room)
            write("catch_up.hidden", hidden[:, part])
            write("catch_up.length", np.array([self._first_missed + start], np.int32))
            write("prompt_next", tokens[:, part])
            self._catch_up.run(tokens[:, part].shape[1])
        self._missed.clear()


class ForcedProposer(Proposer):
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

    def begin(self) -> None:
        """Forget the last sequence."""
        self._head.begin()

    def before_forward(self, sequence: Sequence) -> None:
        """Keep what the head needs."""
        self._head.before_forward(sequence)

    def propose(self, sequence: Sequence, most: int) -> Proposal:
        """Let the head guess, then overwrite its guesses."""
        drafted = self._head.propose(sequence, most).drafts
        start = len(sequence.emitted)
        known = np.array(self._tokens[start : start + drafted], np.int64)
        wrong = self._random.random(len(known)) >= self._acceptance
        known[wrong] = (known[wrong] + 1) % self._vocab
        ids = np.array([[sequence.emitted[-1], *known]], np.int64)
        self._buffers.write("ids", ids)
        return Proposal(len(known), "forced")


class NgramProposer(Proposer):
    """What followed the newest tokens when they stood in the text before."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._index = NgramIndex()

    def begin(self) -> None:
        """Forget the last sequence."""
        self._index = NgramIndex()

    def find(self, sequence: Sequence, most: int) -> list[int]:
        """The drafts, up to `most`; none where the newest tokens are new."""
        known = len(self._index) - len(sequence.prompt)
        if known < 0:
            self._index.extend(sequence.prompt)
            known = 0
        self._index.extend(sequence.emitted[known:])
        return self._index.find(most)

    def draft(self, tokens: list[int]) -> Proposal:
        """Write what `find` found, one token or more."""
        self._buffers.write("ids", np.array([tokens], np.int64), offset=1)
        return Proposal(len(tokens), "lookup")

    def propose(self, sequence: Sequence, most: int) -> Proposal:
        """Draft what is found."""
        tokens = self.find(sequence, most)
        return self.draft(tokens) if tokens else NOTHING


class JoinedProposer(Proposer):
    """The head, the text so far, or neither, as a policy chooses step by step."""

    def __init__(
        self, policy: DraftPolicy, head: HeadProposer, lookup: NgramProposer | None
    ) -> None:
        self.policy = policy
        self._head = head
        self._lookup = lookup

    def begin(self) -> None:
        """Forget the last sequence; what the policy learnt stays."""
        self._head.begin()
        if self._lookup is not None:
            self._lookup.begin()

    def propose(self, sequence: Sequence, most: int) -> Proposal:
        """Draft with the source that promises most."""
        found = [] if self._lookup is None else self._lookup.find(sequence, most)
        offers = {"lookup": len(found)} if found else {}
        source = self.policy.choose(offers | {"head": min(self.policy.k, most)})
        if source == "head":
            return self._head.propose(sequence, most)
        if source is None or self._lookup is None:
            return NOTHING
        return self._lookup.draft(found)

    def before_forward(self, sequence: Sequence) -> None:
        """Keep rows that the head has not seen."""
        self._head.before_forward(sequence)

    def observe(self, proposal: Proposal, accepted: int) -> None:
        """Let the policy learn."""
        if proposal.drafts:
            self.policy.observe(proposal.source, proposal.drafts, accepted)
