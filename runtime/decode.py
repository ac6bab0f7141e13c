"""The decoding loop: propose, verify, accept, advance - one target forward a step."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from collections.abc import Sequence as Tokens
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from runtime.accept import Result, parse_result
from runtime.buffers import Array
from runtime.errors import RequestError
from runtime.load import Loaded, load
from runtime.propose import HeadProposer, NoProposer, Proposer
from runtime.request import check_prompt, drafts_of
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
    ) -> Iterator[Step]:
        """Prefill `ids` and step until something ends it; greedy.

        Args:
            ids: The prompt, at most ``capacity - 1`` tokens.
            max_new_tokens: Most tokens to emit, 1 or more.
            k: Drafts a step, 0 for plain decoding; what the artifact is built for where None.
            stop_ids: Tokens that end it; the artifact's end-of-text tokens where None.

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
        return self._generate(ids, max_new_tokens, drafts, stop)

    def _generate(
        self, ids: Tokens[int], most: int, k: int, stop_ids: Collection[int]
    ) -> Iterator[Step]:
        step = self.prefill(ids, most, stop_ids=stop_ids)
        yield step
        while step.finish is None:
            step = self.step(k)
            yield step

    def prefill(
        self, ids: Tokens[int], most: int | None = None, *, stop_ids: Collection[int] = ()
    ) -> Step:
        """Start a new sequence: feed a prompt in chunks and emit its first next token.

        Args:
            ids: The prompt, at most ``capacity - 1`` tokens.
            most: Tokens to emit until the sequence ends; None for no limit.
            stop_ids: Tokens that end it.

        Raises:
            RequestError: The prompt is empty, too long, or has ids outside the vocabulary.
            FiniteError: A chunk gave NaN or infinity.
            SlotError: The graph failed.
        """
        check_prompt(self.manifest, ids)
        self.sequence, self.stats = None, Stats(prompt_tokens=len(ids))
        with self.stats.phase("host"):
            self._buffers.reset()
            prompt = np.array([ids], np.int64)
            following = np.append(prompt[:, 1:], [[0]], axis=1)
            for start in range(0, len(ids), self._chunk):
                part = slice(start, start + self._chunk)
                result = self._prefill_chunk(prompt[:, part], following[:, part], start)
            sequence = Sequence(
                prompt=tuple(int(token) for token in ids),
                capacity=self.manifest.capacity,
                length=result.length,
                stop_ids=frozenset(stop_ids),
                most=most,
            )
            step = self._advance(sequence, result, 0)
            self.stats.tokens = len(step.tokens)
        return step

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
