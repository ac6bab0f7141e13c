"""Stop strings: where text that comes in pieces has to end."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.errors import RequestError

__all__ = ["MAX_STOPS", "MAX_STOP_LENGTH", "StopStrings"]

MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
"""Characters. Each piece of text is compared with every stop, so both are bounded."""


class StopStrings:
    """Lets text through up to the first stop string, and nothing of it or after it.

    First is the one that is complete first; of those complete at the same character, the
    longest. So it does not matter in which pieces the text comes. Text that may be the
    beginning of a stop string is held back until it is known.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Stop at any of `stops`; raises `RequestError` where they cannot be."""
        if len(stops) > MAX_STOPS:
            raise RequestError(f"{len(stops)} stop strings; give at most {MAX_STOPS}")
        for stop in stops:
            if not stop:
                raise RequestError("a stop string is empty. Leave it out")
            if len(stop) > MAX_STOP_LENGTH:
                raise RequestError(
                    f"a stop string has {len(stop)} characters; give at most {MAX_STOP_LENGTH}"
                )
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text."""

    def add(self, piece: str) -> str:
        """The text that can be shown now; nothing once a stop string was found."""
        if self.found is not None:
            return ""
        text = self._held + piece
        matches = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop)) >= 0
        ]
        if matches:
            _, start, self.found = min(matches)
            self._held = ""
            return text[:start]
        held = self._open_end(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """What was held back; no stop string can come of it any more."""
        held, self._held = self._held, ""
        return held

    def _open_end(self, text: str) -> int:
        """Characters at the end of `text` that a stop string may begin with."""
        most = min(max(map(len, self._stops), default=1) - 1, len(text))
        for size in range(most, 0, -1):
            end = text[len(text) - size :]
            if any(stop.startswith(end) for stop in self._stops):
                return size
        return 0
