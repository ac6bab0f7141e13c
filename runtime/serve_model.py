"""The artifact behind a server: requests in, jobs for the decoding thread out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from artifacts import Manifest
from runtime.chat_template import ChatTemplate
from runtime.conversation import chat_prompt
from runtime.decode import Decoder
from runtime.errors import LoadError, RequestError
from runtime.request import check_prompt, drafts_of
from runtime.sampling import check_samples
from runtime.serve_body import Ask
from runtime.serve_fields import BodyError
from runtime.serve_worker import Event, Job
from runtime.tokenizer import Tokenizer

__all__ = ["ServedModel"]

COMPLETION_TOKENS = 16
"""Of a completion that does not say how many; a chat goes on to the end."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What requests are checked against; any thread may use it."""

    folder: Path
    name: str
    manifest: Manifest
    tokenizer: Tokenizer
    template: ChatTemplate | None
    created: int
    """Unix time at which it was opened."""
    rendering: threading.Lock
    """A compiled template is used by one thread at a time."""

    @classmethod
    def of(cls, folder: Path, name: str | None = None) -> ServedModel:
        """Read all of an artifact but its graphs; raises `LoadError` or `ParseError`."""
        manifest = Manifest.read(folder)
        tokenizer = Tokenizer.of(folder, manifest)
        if tokenizer is None:
            raise LoadError(
                f"{folder.name} has no tokenizer, so it cannot be served. Build it from a "
                "checkpoint that has one"
            )
        template = ChatTemplate.of(folder, manifest)
        name = name or folder.resolve().name
        return cls(
            folder, name, manifest, tokenizer, template, int(time.time()), threading.Lock()
        )

    def open_decoder(self, threads: int) -> Decoder:
        """Load the graphs, in the thread that will run them."""
        return Decoder.open(self.folder, threads=threads)

    def job(self, ask: Ask, *, timeout: float, tell: Callable[[Event], None]) -> Job:
        """What is to be decoded for a request.

        Args:
            ask: The request.
            timeout: Seconds from now at which to give up.
            tell: For `Job`.

        Raises:
            BodyError: The artifact cannot do it; names the parameter.
        """
        ids, keep_at, parameter = self._prompt(ask)
        try:
            check_prompt(self.manifest, ids)
        except RequestError as e:
            long = len(ids) >= self.manifest.capacity
            code = "context_length_exceeded" if long else None
            raise BodyError(str(e), parameter, code) from e
        try:
            drafts = drafts_of(self.manifest, ask.k)
        except RequestError as e:
            raise BodyError(str(e), "k") from e
        if ask.sampling is not None:
            try:
                check_samples(self.manifest)
            except RequestError as e:
                raise BodyError(str(e), "temperature") from e
        most = COMPLETION_TOKENS if ask.prompt is not None else self.manifest.capacity
        ends = () if ask.ignore_eos else self.manifest.eos_token_ids
        return Job(
            ids=ids,
            keep_at=keep_at,
            max_new_tokens=ask.max_tokens or most,
            stop=ask.stop,
            choices={
                "k": drafts,
                "stop_ids": (*ends, *ask.stop_token_ids),
                "sampling": ask.sampling,
            },
            deadline=time.monotonic() + timeout,
            tell=tell,
        )

    def _prompt(self, ask: Ask) -> tuple[list[int], int, str]:
        """Token ids, where to keep the state, and the parameter that they come from."""
        if ask.prompt is None:
            return self._chat(ask)
        try:
            given = ask.prompt
            ids = self.tokenizer.encode(given) if isinstance(given, str) else list(given)
        except RequestError as e:
            raise BodyError(str(e), "prompt") from e
        return ids, len(ids), "prompt"

    def _chat(self, ask: Ask) -> tuple[list[int], int, str]:
        if self.template is None:
            raise BodyError(
                f"{self.name} has no chat template. Use /v1/completions", "messages"
            )
        try:
            with self.rendering:
                ids, stable = chat_prompt(
                    self.template, self.tokenizer, ask.messages, ask.template_options
                )
        except RequestError as e:
            raise BodyError(str(e), "messages") from e
        return ids, stable, "messages"
