"""A conversation of several turns, of which only the new one is prefilled."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from runtime.answer import Answer
from runtime.chat_template import ChatTemplate, Message
from runtime.decode import Decoder
from runtime.tokenizer import Tokenizer

__all__ = ["Conversation", "chat_prompt"]


def chat_prompt(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    options: Mapping[str, Any] | None = None,
) -> tuple[list[int], int]:
    """Token ids of a conversation, and how many of them a later turn will begin with.

    The latter end where the assistant's turn is opened: templates may drop or rewrite what
    comes after (such as a thinking part) once the turn is over, but seldom what is before.

    Raises:
        RequestError: The template refuses the messages.
    """
    text = template.render(messages, options=options)
    closed = template.render(messages, opened=False, options=options)
    ids = tokenizer.encode(text)
    if text.startswith(closed):
        stable = tokenizer.encode(closed)
        if stable and ids[: len(stable)] == stable:
            return ids, len(stable)
    return ids, len(ids)


class Conversation:
    """Asks and answers in turn.

    Each turn's prompt is what the template makes of all messages so far. The decoder goes on
    from its state where that is exactly the state of the prompt's beginning, and else from
    the last one kept, so a turn never continues from tokens that the template does not give.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        system: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin one.

        Args:
            decoder: Generates; may serve others between turns.
            tokenizer: The artifact's.
            template: The artifact's.
            system: Message that stands first.
            options: More variables for the template.
        """
        self._decoder = decoder
        self._tokenizer = tokenizer
        self._template = template
        self._options = dict(options or {})
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[Message] = list(self._system)
        self.answer = Answer(tokenizer)
        """The last turn's."""

    def reset(self) -> None:
        """Forget all turns; the system message stays."""
        self.messages = list(self._system)

    def ask(
        self,
        text: str,
        max_new_tokens: int,
        *,
        stop: Sequence[str] = (),
        **choices: Any,
    ) -> Generator[str]:
        """Take a turn, and yield the answer's text as it comes.

        The turn becomes part of the conversation when the iterator ends, is closed or
        interrupted; but not where nothing was answered yet.

        Args:
            text: What the user says.
            max_new_tokens: Most tokens of the answer.
            stop: Strings that end the answer.
            choices: For `Decoder.generate`, such as ``k``.

        Raises:
            RequestError: The prompt is too long by now, or the template refuses it.
            RunError: A graph failed; the conversation is as before the turn.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        ids, stable = chat_prompt(self._template, self._tokenizer, messages, self._options)
        answer = self.answer = Answer(self._tokenizer, stop)
        steps = self._decoder.generate(
            ids, max_new_tokens, reuse=True, keep_at=stable, **choices
        )
        try:
            for step in steps:
                yield answer.add(step)
                if answer.finish is not None:
                    break
        except (GeneratorExit, KeyboardInterrupt):
            if answer.ids:
                self._take(messages)
            raise
        self._take(messages)

    def _take(self, messages: list[Message]) -> None:
        self.messages = [*messages, {"role": "assistant", "content": self.answer.text}]
