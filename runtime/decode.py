"""The decoding loop: propose, verify, accept, advance - one target forward a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Tokens
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from runtime.accept import Result, parse_result
from runtime.buffers import Array
from runtime.errors import RequestError
from runtime.graph_lines import captured_counters
from runtime.load import Loaded, load
from runtime.propose import HeadProposer, NoProposer, Proposer
from runtime.request import check_prompt, drafts_of
from runtime.reuse import KeptStates, pieces
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
        m = loaded.manifest
        self.loaded = loaded
        self.manifest = m
        self.stats = Stats()
        self.sequence: Sequence | None = None
        self._buffers = loaded.buffers
        self._slots = loaded.slots
        self._kept = KeptStates(m, loaded.buffers, loaded.slots)
        self._reuse = False
        self._chunk = m.prefill_rows if chunk is None else chunk
        if not 1 <= self._chunk <= m.prefill_rows:
            raise RequestError(
                f"a prefill chunk of {chunk} rows cannot be: this artifact takes 1 to "
                f"{m.prefill_rows}"
            )
        self._proposer = proposer or (
            HeadProposer(loaded.slots["draft"], m.k) if m.k else NoProposer()
        )

    @classmethod
    def open(cls, folder: Path, *, threads: int = 0) -> Self:
        """Load the artifact in `folder`; raises what `load` raises."""
        return cls(load(folder, threads=threads))

    def close(self) -> None:
        """Give graphs and memory back."""
        self.sequence = None
        self._kept.close()
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
        k: int | None = None,
        stop_ids: Collection[int] | None = None,
        reuse: bool = False,
        keep_at: int | None = None,
        before_chunk: Callable[[], None] | None = None,
    ) -> Iterator[Step]:
        """Prefill `ids` and step until something ends it; greedy.

        Args:
            ids: The prompt, at most ``capacity - 1`` tokens.
            max_new_tokens: Most tokens to emit, 1 or more.
            k: Drafts a step, 0 for plain decoding; what the artifact is built for where None.
            stop_ids: Tokens that end it; the artifact's end-of-text tokens where None.
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
        if max_new_tokens < 1:
            raise RequestError(f"max_new_tokens is {max_new_tokens}; ask for 1 or more")
        stop = self.manifest.eos_token_ids if stop_ids is None else stop_ids
        prefill = partial(
            self.prefill,
            ids,
            max_new_tokens,
            stop_ids=stop,
            reuse=reuse,
            keep_at=keep_at,
            before_chunk=before_chunk,
        )
        return self._generate(prefill, drafts)

    def _generate(self, prefill: Callable[[], Step], k: int) -> Iterator[Step]:
        step = prefill()
        yield step
        while step.finish is None:
            step = self.step(k)
            yield step

    def prefill(
        self,
        ids: Tokens[int],
        most: int | None = None,
        *,
        stop_ids: Collection[int] = (),
        reuse: bool = False,
        keep_at: int | None = None,
        before_chunk: Callable[[], None] | None = None,
    ) -> Step:
        """Start a new sequence: feed a prompt in chunks and emit its first next token.

        Args:
            ids: The prompt, at most ``capacity - 1`` tokens.
            most: Tokens to emit until the sequence ends; None for no limit.
            stop_ids: Tokens that end it.
            reuse: Feed only what follows the longest beginning of `ids` whose state is at
                hand: the state of now, or one that was kept; ``stats.reused`` tells how long
                it was. Also lets the head keep up to the end, so that later prompts may go on
                from this one without a gap in its cache.
            keep_at: Keep the state after so many tokens of `ids` for later prompts.
            before_chunk: Called before each chunk; may raise, which loses the sequence.

        Raises:
            RequestError: The prompt is empty, too long, or has ids outside the vocabulary.
            FiniteError: A chunk gave NaN or infinity.
            SlotError: The graph failed.
        """
        check_prompt(self.manifest, ids)
        fed = None if self.sequence is None else self.sequence.fed
        self.sequence, self._reuse = None, reuse
        self.stats = Stats(prompt_tokens=len(ids), graphs=captured_counters(self._slots))
        with self.stats.phase("host"):
            with self.stats.phase("prefill"):
                held = self._kept.rewind(ids, fed) if reuse else self._kept.restart()
            self.stats.reused = held
            prompt = np.array([ids], np.int64)
            following = np.append(prompt[:, 1:], [[0]], axis=1)
            for start, end in pieces(held, len(ids), self._chunk, keep_at):
                if before_chunk is not None:
                    before_chunk()
                part = slice(start, end)
                result = self._prefill_chunk(prompt[:, part], following[:, part], start)
                if end == keep_at:
                    self._kept.keep(ids[:end])
            sequence = Sequence(
                prompt=tuple(int(token) for token in ids),
                capacity=self.manifest.capacity,
                length=result.length,
                stop_ids=frozenset(stop_ids),
                most=most,
            )
            step = self._advance(sequence, result, 0)
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

    def _prefill_chunk(self, ids: Array, following: Array, start: int) -> Result:
        rows = ids.shape[1]
        self._buffers.write("prompt_ids", ids)
        if self.manifest.k:
            self._buffers.write("prompt_next", following)
        with self.stats.phase("prefill"):
            self._slots["prefill"].run(rows)
        self.stats.prefills += 1
        return self._result("prefill", 0, start + rows)

    def step(self, k: int | None = None) -> Step:
        """One target forward: verify up to `k` drafts, or decode where there are none.

        Fewer are drafted where the capacity, or the tokens still wanted, leave no use for
        more. A step with ``k = 0`` leaves the head behind by one row: later drafts are worse,
        never wrong.

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
                self._kept.catch_up()
            drafted = self._propose(sequence, most) if most > 0 else 0
            if drafted:
                self._buffers.write("draft_count", np.array([drafted], np.int32))
            graph = "verify" if drafted else "decode"
            with self.stats.phase(graph):
                self._slots[graph].run()
            result = self._result(graph, drafted, sequence.length + 1)
            step = self._advance(sequence, result, drafted)
            self.stats.count(
                tokens=len(step.tokens), drafted=drafted, accepted=result.accepted
            )
        return step

    def _propose(self, sequence: Sequence, most: int) -> int:
        with self.stats.phase("draft"):
            drafted = self._proposer.propose(sequence, most)
        if not 0 <= drafted <= most:
            raise RequestError(
                f"the proposer made {drafted} drafts; at most {most} were asked"
            )
        return drafted

    def _result(self, graph: str, drafted: int, length: int) -> Result:
        rows = self.manifest.rows if graph == "verify" else 1
        return parse_result(
            self._buffers.read("result", (2 * rows + 2,)),
            graph=graph,
            drafted=drafted,
            length=length,
            vocab_size=self.manifest.spec.vocab_size,
        )

    def _advance(self, sequence: Sequence, result: Result, drafted: int) -> Step:
        tokens = sequence.advance(result.tokens, result.length)
        self.sequence = sequence
        return Step(
            tokens=tokens, drafted=drafted, accepted=result.accepted, finish=sequence.finish
        )

    def _under_way(self) -> Sequence:
        if self.sequence is None:
            raise RequestError("no sequence is under way. Start one with prefill")
        if self.sequence.finish is not None:
            raise RequestError(
                f"the sequence has ended ({self.sequence.finish}). Start one with prefill"
            )
        return self.sequence
