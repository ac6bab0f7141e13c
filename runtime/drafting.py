"""Who drafts for a sequence: what a caller asked for, made of what the artifact has."""

from __future__ import annotations

import math
from functools import cached_property

from runtime.clock import measure_costs
from runtime.cost import Costs, DraftPolicy
from runtime.load import Loaded
from runtime.propose import (
    HeadProposer,
    JoinedProposer,
    NgramProposer,
    NoProposer,
    Proposer,
)
from runtime.request import AUTO, Drafts

__all__ = ["Drafting"]

ALWAYS = Costs(decode=math.inf, verify=1.0, draft=0.0)
"""Costs for which a step without drafts never pays: a fixed number was asked for."""


class Drafting:
    """Makes the proposer of each sequence; what a policy learnt serves the next one."""

    def __init__(self, loaded: Loaded, given: Proposer | None = None) -> None:
        """Draft with `given` whatever is asked, where there is one."""
        self._loaded = loaded
        self._given = given
        self._policies: dict[bool, DraftPolicy] = {}

    @cached_property
    def default(self) -> Proposer:
        """The head with all its guesses, or nothing."""
        if self._given is not None:
            return self._given
        return self._head if self._loaded.manifest.k else NoProposer()

    @cached_property
    def _head(self) -> HeadProposer:
        return HeadProposer(self._loaded)

    def take_in(self) -> None:
        """Let the head take in what it has missed of the last sequence, which may go on."""
        if self._loaded.manifest.k:
            self._head.take_in()

    def measures(self, k: Drafts) -> bool:
        """Whether `proposer` will measure costs, whereby every state is lost."""
        asked = k == AUTO and self._given is None and self._loaded.manifest.k > 0
        return asked and True not in self._policies

    def proposer(self, k: Drafts, *, lookup: bool) -> Proposer:
        """The proposer for what was asked; measures costs the first time that they matter.

        Must be called before the prefill: measuring loses the sequence.
        """
        if self._given is not None or not self._loaded.manifest.k:
            return self.default
        if k == 0:
            return NoProposer()
        if k != AUTO and not lookup:
            return self._head
        found = NgramProposer(self._loaded.buffers) if lookup else None
        return JoinedProposer(self.policy(adapt=k == AUTO), self._head, found)

    def policy(self, *, adapt: bool) -> DraftPolicy:
        """What is known of costs and acceptance so far."""
        if adapt not in self._policies:
            costs = measure_costs(self._loaded) if adapt else ALWAYS
            self._policies[adapt] = DraftPolicy(costs, self._loaded.manifest.k)
        return self._policies[adapt]
