"""A prompt into the caches: from the state at hand, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from runtime.accept import Result
from runtime.errors import RequestError
from runtime.forward import Forwards
from runtime.load import Loaded
from runtime.reuse import KeptStates, pieces
from runtime.sampling import SamplingOptions
from runtime.stats import Stats

__all__ = ["FeedOptions", "Feeder"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedOptions:
    """How a prompt is fed and how the tokens after it are chosen; see `Decoder.prefill`."""

    sampling: SamplingOptions | None = None
    logprobs: int | None = None
    reuse: bool = False
    keep_at: int | None = None
    before_chunk: Callable[[], None] | None = None


class Feeder:
    """Feeds prompts, and keeps states to go on from."""

    def __init__(self, loaded: Loaded, forwards: Forwards, chunk: int | None) -> None:
        """Feed chunks of at most `chunk` rows; as many as the artifact takes where None.

        Raises:
            RequestError: `chunk` is not within 1 and the artifact's ``prefill_rows``.
        """
        m = loaded.manifest
        self._chunk = m.prefill_rows if chunk is None else chunk
        if not 1 <= self._chunk <= m.prefill_rows:
            raise RequestError(
                f"a prefill chunk of {chunk} rows cannot be: this artifact takes 1 to "
                f"{m.prefill_rows}"
            )
        self._forwards = forwards
        self.kept = KeptStates(m, loaded.buffers, loaded.slots)

    def feed(
        self,
        ids: Sequence[int],
        fed: Sequence[int] | None,
        options: FeedOptions,
        stats: Stats,
    ) -> Result:
        """Make the buffers hold `ids`; returns what the forward over the last of them did.

        Args:
            ids: The prompt, checked.
            fed: Tokens of the live state, None where it cannot be trusted.
            options: The sampling graphs are loaded, if these ask for them.
            stats: Charged with the time.
        """
        with stats.phase("prefill"):
            held = self.kept.rewind(ids, fed) if options.reuse else self.kept.restart()
        stats.reused = held
        self._forwards.begin(ids, options.sampling, options.logprobs)
        prompt = np.array([ids], np.int64)
        following = np.append(prompt[:, 1:], [[0]], axis=1)
        end = self._forwards.prefilled(len(ids))
        for start, stop in pieces(held, end, self._chunk, options.keep_at):
            if options.before_chunk is not None:
                options.before_chunk()
            chunk = prompt[:, start:stop], following[:, start:stop]
            result = self._forwards.prefill(*chunk, start, stats)
            if stop == options.keep_at:
                self.kept.keep(ids[:stop])
        if end < len(ids):
            result = self._forwards.first(int(ids[-1]), end, stats)
        return result
