"""The text of a generation as it comes."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.state import Finish, Step
from runtime.stop import StopStrings
from runtime.tokenizer import TextStream, Tokenizer

__all__ = ["Answer"]


class Answer:
    """Turns steps into text: whole characters, nothing of a stop token or a stop string.

    A step emits several tokens, and a stop string may be complete after any of them; tokens
    after that one are not part of the answer.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        """Begin an answer; raises `RequestError` for stop strings that cannot be.

        Args:
            tokenizer: Makes text of the tokens.
            stop: Strings at which the answer ends, before the first of them.
        """
        self._stream = TextStream(tokenizer)
        self._stops = StopStrings(stop)
        self.ids: list[int] = []
        """Tokens of the answer, with the one that ended it."""
        self.text = ""
        self.finish: Finish | None = None
        """Why it ended; None while it goes on, and where it was interrupted."""

    def add(self, step: Step) -> str:
        """Take in a step that came; returns the text that can be shown now."""
        shown = ""
        for place, token in enumerate(step.tokens, 1):
            self.ids.append(token)
            ended = step.finish is Finish.STOP and place == len(step.tokens)
            shown += "" if ended else self._stops.add(self._stream.add([token]))
            if self._stops.found is not None:
                self.finish = Finish.STOP
                break
        else:
            self.finish = step.finish
        if self.finish is not None:
            shown += self._rest()
        self.text += shown
        return shown

    def _rest(self) -> str:
        if self._stops.found is not None:
            return ""
        return self._stops.add(self._stream.finish()) + self._stops.finish()
