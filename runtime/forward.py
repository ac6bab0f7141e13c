"""The target's forwards: which graph runs, what it is told before, what is read after."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.accept import Result, parse_result
from runtime.buffers import Array
from runtime.late_slot import LateSlot
from runtime.load import Loaded
from runtime.logprobs import TokenLogprob, check_logprobs, token_logprob
from runtime.sampling import Sampler, SamplingOptions, check_samples
from runtime.stats import Stats

__all__ = ["Forwards"]


class Forwards:
    """Runs prefill, decode and verify, in the form that samples where that is asked."""

    def __init__(self, loaded: Loaded) -> None:
        self._manifest = loaded.manifest
        self._buffers = loaded.buffers
        self._slots = loaded.slots
        self.sampler: Sampler | None = None
        self._top: int | None = None

    def check(self, sampling: SamplingOptions | None, logprobs: int | None) -> None:
        """Raise `RequestError` where the artifact cannot choose tokens like this."""
        check_logprobs(logprobs, self._manifest.spec.vocab_size)
        if sampling is not None and not sampling.is_greedy:
            check_samples(self._manifest)

    def load(self, sampling: SamplingOptions | None) -> bool:
        """Load the graphs that sample, if they will be needed and are not there yet.

        Returns:
            Whether any was loaded. On a device it was captured with it, which clears buffers:
            no state that they held can be trusted.
        """
        if sampling is None or sampling.is_greedy:
            return False
        late = [
            slot
            for name, slot in self._slots.items()
            if name.endswith("_sampled") and isinstance(slot, LateSlot) and not slot.is_loaded
        ]
        for slot in late:
            slot.load()
        return bool(late)

    def begin(
        self, prompt: Sequence[int], sampling: SamplingOptions | None, logprobs: int | None
    ) -> None:
        """Say how the tokens of a new sequence are chosen."""
        self._top, self.sampler = logprobs, None
        if sampling is not None and not sampling.is_greedy:
            self.sampler = Sampler(sampling, self._manifest, self._buffers)
            self.sampler.begin(prompt)

    def prefilled(self, prompt: int) -> int:
        """Tokens of a prompt of so many that `prefill` takes; `first` takes what is left."""
        return prompt if self.sampler is None else prompt - 1

    def prefill(self, ids: Array, following: Array, start: int, stats: Stats) -> Result:
        """Feed a chunk of a prompt.

        Args:
            ids: ``[1, S] int64``.
            following: ``[1, S] int64``: the token after each row.
            start: Rows fed before.
            stats: Charged with the time.
        """
        rows = ids.shape[1]
        self._buffers.write("prompt_ids", ids)
        if self._manifest.k:
            self._buffers.write("prompt_next", following)
        with stats.phase("prefill"):
            self._slots["prefill"].run(rows)
        stats.prefills += 1
        return self._result("prefill", 0, start + rows)

    def first(self, token: int, length: int, stats: Stats) -> Result:
        """Feed a prompt's last token so that the first new one is sampled.

        Prefill chooses greedily, so where tokens are sampled it feeds all but the last.
        """
        self._buffers.write("ids", np.array([[token]], np.int64))
        return self._run("decode", 0, length, stats, phase="prefill")

    def step(self, drafted: int, length: int, stats: Stats) -> Result:
        """One forward over the newest token and `drafted` drafts, after `length` rows."""
        if drafted:
            self._buffers.write("draft_count", np.array([drafted], np.int32))
        graph = "verify" if drafted else "decode"
        return self._run(graph, drafted, length, stats, phase=graph)

    def _run(self, graph: str, drafted: int, length: int, stats: Stats, phase: str) -> Result:
        slot = graph
        if self.sampler is not None:
            slot = f"{graph}_sampled"
            self.sampler.before_forward(length, self._rows(graph))
        with stats.phase(phase):
            self._slots[slot].run()
        return self._result(graph, drafted, length + 1)

    def _rows(self, graph: str) -> int:
        return self._manifest.rows if graph == "verify" else 1

    def _result(self, graph: str, drafted: int, length: int) -> Result:
        return parse_result(
            self._buffers.read("result", (2 * self._rows(graph) + 2,)),
            graph=graph,
            drafted=drafted,
            length=length,
            vocab_size=self._manifest.spec.vocab_size,
        )

    def emitted(self, tokens: Sequence[int]) -> tuple[TokenLogprob, ...]:
        """Note what was kept of the last forward's tokens.

        Returns:
            Their log probabilities; none where none were asked for.
        """
        if self.sampler is not None:
            self.sampler.emitted(tokens)
        if self._top is None:
            return ()
        rows = len(tokens), self._manifest.spec.vocab_size
        logits = self._buffers.read("logits", rows)
        return tuple(
            token_logprob(row, token, self._top)
            for row, token in zip(logits, tokens, strict=True)
        )
