"""The decoding loop: propose, verify, accept, advance - one target forward a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Tokens
from pathlib import Path
from types import TracebackType
from typing import Self

from runtime.accept import Result
from runtime.cost import DraftPolicy
from runtime.drafting import Drafting
from runtime.errors import RequestError
from runtime.feed import Feeder, FeedOptions
from runtime.forward import Forwards
from runtime.graph_lines import captured_counters
from runtime.load import Loaded, load
from runtime.propose import NOTHING, JoinedProposer, Proposal, Proposer
from runtime.request import Drafts, check_prompt, drafts_of
from runtime.sampling import SamplingOptions
from runtime.state import Sequence, Step
from runtime.stats import Stats

__all__ = ["Decoder"]


class Decoder:
    """Generates tokens from a loaded artifact, one sequence at a time.

    After an error or an interrupt the sequence is lost and `prefill` starts the next one.
    """

    def __init__(
        self,
        loaded: Loaded,
        *,
        proposer: Proposer | None = None,
        chunk: int | None = None,
    ) -> None:
        """Decode with what `load` gave.

        Args:
            loaded: Closed together with the decoder.
            proposer: Source of drafts; the artifact's own head where None.
            chunk: Rows of a prefill chunk; as many as the artifact takes where None.

        Raises:
            RequestError: `chunk` is not within 1 and the artifact's ``prefill_rows``.
        """
        self.loaded = loaded
        self.manifest = loaded.manifest
        self.stats = Stats()
        self.sequence: Sequence | None = None
        self._slots = loaded.slots
        self._forwards = Forwards(loaded)
        self._drafting = Drafting(loaded, proposer)
        self._proposer = self._drafting.default
        self._feeder = Feeder(loaded, self._forwards, chunk)
        self._reuse = False

    @property
    def policy(self) -> DraftPolicy | None:
        """What the last sequence's drafts were chosen by, where they were."""
        proposer = self._proposer
        return proposer.policy if isinstance(proposer, JoinedProposer) else None

    @property
    def sampling(self) -> SamplingOptions | None:
        """How the last sequence's tokens were drawn, with the seed; None for greedily."""
        sampler = self._forwards.sampler
        return None if sampler is None else sampler.options

    @classmethod
    def open(cls, folder: Path, *, threads: int = 0) -> Self:
        """Load the artifact in `folder`; raises what `load` raises."""
        return cls(load(folder, threads=threads))

    def close(self) -> None:
        """Give graphs and memory back."""
        self.sequence = None
        self._feeder.kept.close()
        self.loaded.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def generate(
        self,
        ids: Tokens[int],
        max_new_tokens: int,
        *,
        k: Drafts = None,
        lookup: bool = False,
        stop_ids: Collection[int] | None = None,
        sampling: SamplingOptions | None = None,
        logprobs: int | None = None,
        reuse: bool = False,
        keep_at: int | None = None,
        before_chunk: Callable[[], None] | None = None,
    ) -> Iterator[Step]:
        """Prefill `ids` and step until something ends it.

        Args:
            ids: The prompt, at most ``capacity - 1`` tokens.
            max_new_tokens: Most tokens to emit, 1 or more.
            k: Most drafts a step: 0 for plain decoding, ``"auto"`` for as many as pay, what
                the artifact is built for where None.
            lookup: Draft also what followed the newest tokens earlier in the text.
            stop_ids: Tokens that end it; the artifact's end-of-text tokens where None.
            sampling: How tokens are drawn; greedy where None.
            logprobs: Likeliest tokens whose log probabilities each step gives beside that of
                the emitted one; None for none at all.
            reuse: As for `prefill`.
            keep_at: As for `prefill`.
            before_chunk: As for `prefill`.

        Yields:
            The first token as a step without drafts, then each step. The last one says why it
            ended.

        Raises:
            RequestError: At once, where the artifact cannot do what is asked.
            FiniteError: A forward gave NaN or infinity.
            SlotError: A graph failed.
        """
        check_prompt(self.manifest, ids)
        drafts = drafts_of(self.manifest, k)
        self._forwards.check(sampling, logprobs)
        if max_new_tokens < 1:
            raise RequestError(f"max_new_tokens is {max_new_tokens}; ask for 1 or more")
        stop = self.manifest.eos_token_ids if stop_ids is None else stop_ids
        options = FeedOptions(
            sampling=sampling,
            logprobs=logprobs,
            reuse=reuse,
            keep_at=keep_at,
            before_chunk=before_chunk,
        )

        def steps() -> Iterator[Step]:
            if self._drafting.measures(k):
                self._forget()
            proposer = self._drafting.proposer(k, lookup=lookup)
            step = self._start(ids, max_new_tokens, stop, options, proposer)
            yield step
            while step.finish is None:
                step = self.step(drafts)
                yield step

        return steps()

    def prefill(
        self,
        ids: Tokens[int],
        most: int | None = None,
        *,
        stop_ids: Collection[int] = (),
        sampling: SamplingOptions | None = None,
        logprobs: int | None = None,
        reuse: bool = False,
        keep_at: int | None = None,
        before_chunk: Callable[[], None] | None = None,
    ) -> Step:
        """Start a new sequence: feed a prompt in chunks and emit its first next token.

        Args:
            ids: The prompt, at most ``capacity - 1`` tokens.
            most: Tokens to emit until the sequence ends; None for no limit.
            stop_ids: Tokens that end it.
            sampling: As for `generate`.
            logprobs: As for `generate`.
            reuse: Feed only what follows the longest beginning of `ids` whose state is at
                hand: the state of now, or one that was kept; ``stats.reused`` tells how long
                it was. Also lets the head keep up to the end, so that later prompts may go on
                from this one without a gap in its cache.
            keep_at: Keep the state after so many tokens of `ids` for later prompts.
            before_chunk: Called before each chunk; may raise, which loses the sequence.

        Raises:
            RequestError: The prompt is empty, too long, or has ids outside the vocabulary, or
                the artifact cannot sample.
            FiniteError: A chunk gave NaN or infinity.
            SlotError: The graph failed.
        """
        check_prompt(self.manifest, ids)
        self._forwards.check(sampling, logprobs)
        options = FeedOptions(
            sampling=sampling,
            logprobs=logprobs,
            reuse=reuse,
            keep_at=keep_at,
            before_chunk=before_chunk,
        )
        return self._start(ids, most, stop_ids, options, self._drafting.default)

    def _start(
        self,
        ids: Tokens[int],
        most: int | None,
        stop_ids: Collection[int],
        options: FeedOptions,
        proposer: Proposer,
    ) -> Step:
        if self._forwards.load(options.sampling):
            self._forget()
        fed = None if self.sequence is None else self.sequence.fed
        self.sequence, self._reuse = None, options.reuse
        self.stats = Stats(prompt_tokens=len(ids), graphs=captured_counters(self._slots))
        with self.stats.phase("host"):
            if options.reuse:
                self._drafting.take_in()
            result = self._feeder.feed(ids, fed, options, self.stats)
            self._proposer = proposer
            proposer.begin()
            sequence = Sequence(
                prompt=tuple(int(token) for token in ids),
                capacity=self.manifest.capacity,
                length=result.length,
                stop_ids=frozenset(stop_ids),
                most=most,
            )
            step = self._advance(sequence, result, NOTHING)
            self.stats.tokens = len(step.tokens)
        self.stats.first_token = sum(self.stats.seconds.values())
        return step

    def extend(
        self, ids: Tokens[int], most: int | None = None, *, stop_ids: Collection[int] = ()
    ) -> Step:
        """Feed more tokens after all that the sequence emitted, and emit the next one.

        What was emitted becomes part of the prompt. Only what the caches do not hold is fed:
        the newest token and `ids`, or more where a stop token cut a block that was accepted.

        Args:
            ids: Tokens that follow; none just to go on after the sequence ended.
            most: As for `prefill`.
            stop_ids: As for `prefill`.

        Raises:
            RequestError: There is no sequence, or the artifact cannot take so many tokens.
            FiniteError: A chunk gave NaN or infinity.
            SlotError: The graph failed.
        """
        if self.sequence is None:
            raise RequestError("there is no sequence to extend. Start one with prefill")
        whole = (*self.sequence.prompt, *self.sequence.emitted, *ids)
        return self.prefill(whole, most, stop_ids=stop_ids, reuse=True)

    def _forget(self) -> None:
        """Give up every state at hand: what runs next overwrites them."""
        self.sequence = None
        self._feeder.kept.restart()

    def step(self, k: int | None = None) -> Step:
        """One target forward: verify up to `k` drafts, or decode where there are none.

        Fewer are drafted where the capacity, or the tokens still wanted, leave no use for
        more.

        Raises:
            RequestError: No sequence is under way, it has ended, or `k` cannot be.
            FiniteError: The forward gave NaN or infinity.
            SlotError: A graph failed.
        """
        k = drafts_of(self.manifest, k)
        sequence = self._under_way()
        most = min(k, sequence.useful_drafts)
        self.sequence = None  # until the step is whole: an interrupt must not leave half of it
        with self.stats.phase("host"):
            if self._reuse and k and not most:  # the last one, but the sequence may go on
                self._feeder.kept.catch_up()
            proposal = self._propose(sequence, most) if most > 0 else NOTHING
            self._proposer.before_forward(sequence)
            result = self._forwards.step(proposal.drafts, sequence.length, self.stats)
            self._proposer.observe(proposal, result.accepted)
            step = self._advance(sequence, result, proposal)
            self.stats.count(
                tokens=len(step.tokens),
                drafted=proposal.drafts,
                accepted=result.accepted,
                source=proposal.source,
            )
        return step

    def _propose(self, sequence: Sequence, most: int) -> Proposal:
        with self.stats.phase("draft"):
            proposal = self._proposer.propose(sequence, most)
        if not 0 <= proposal.drafts <= most:
            raise RequestError(
                f"the proposer made {proposal.drafts} drafts; at most {most} were asked"
            )
        return proposal

    def _advance(self, sequence: Sequence, result: Result, proposal: Proposal) -> Step:
        tokens = sequence.advance(result.tokens, result.length)
        logprobs = self._forwards.emitted(tokens)
        self.sequence = sequence
        return Step(
            tokens=tokens,
            drafted=proposal.drafts,
            accepted=result.accepted,
            finish=sequence.finish,
            logprobs=logprobs,
        )

    def _under_way(self) -> Sequence:
        if self.sequence is None:
            raise RequestError("no sequence is under way. Start one with prefill")
        if self.sequence.finish is not None:
            raise RequestError(
                f"the sequence has ended ({self.sequence.finish}). Start one with prefill"
            )
        return self.sequence
