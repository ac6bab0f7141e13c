"""Where the newest tokens stood before: an index over a prompt and what followed it."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["NgramIndex"]

LENGTHS = (6, 4, 3)
"""Tokens of a match, tried in this order. Two match by chance too often to draft from."""


class NgramIndex:
    """The latest earlier place of every n-gram; grows token by token."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._places: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in tokens that follow those known."""
        for token in tokens:
            # what ends at the newest token is noted only now: it must not find itself
            end = len(self._tokens)
            for length in LENGTHS:
                if end >= length:
                    self._places[tuple(self._tokens[end - length :])] = end
            self._tokens.append(token)

    def find(self, most: int) -> list[int]:
        """Up to `most` tokens that followed the longest match of the newest ones, or none.

        A match whose continuation runs into the newest token goes on in its own words, as a
        repetition does.
        """
        known = self._tokens
        for length in LENGTHS:
            if len(known) < length:
                continue
            place = self._places.get(tuple(known[-length:]))
            if place is not None:
                period = len(known) - place
                found = [known[place + i % period] for i in range(most)]
                return found
        return []
