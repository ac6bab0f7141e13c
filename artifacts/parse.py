"""Reading JSON that may be anything: each value is checked where it is taken out.

`Fields` wraps one JSON object together with where it stands, so that every error names the
file, the key, what was found and what must stand there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

__all__ = ["Fields", "ParseError", "read_json"]

MAX_JSON_BYTES = 256 * 2**20
"""No file of this family comes near it (a 250,000-token tokenizer has 13 MB)."""
MAX_NUMBER = 1e300
"""Whole numbers in JSON have no limit; floats do."""


class ParseError(ValueError):
    """A file does not say what it must say; the message names the place and the remedy."""


class Fields:
    """One JSON object and its place, such as ``manifest.json: spec.attention``."""

    def __init__(self, values: Any, place: str) -> None:
        if not isinstance(values, dict):
            raise ParseError(f"{place} must be a JSON object, found {_shown(values)}")
        self._values: dict[str, Any] = values
        self.place = place

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def _at(self, key: str) -> str:
        joint = "." if ": " in self.place else ": "
        return f"{self.place}{joint}{key}"

    def _take(self, key: str) -> Any:
        if key not in self._values:
            raise ParseError(f"{self._at(key)} is missing")
        return self._values[key]

    def refuse(self, key: str, must: str) -> ParseError:
        """The error that says what `key` is and what it must be."""
        return ParseError(
            f"{self._at(key)} is {_shown(self._values.get(key))}; it must be {must}"
        )

    def integer(
        self, key: str, *, default: int | None = None, minimum: int = 0, maximum: int = 2**53
    ) -> int:
        """A whole number within limits; `default` stands for a missing key or null."""
        value = self._take(key) if default is None else self._values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.refuse(key, "a whole number")
        if not minimum <= value <= maximum:
            raise self.refuse(key, f"between {minimum} and {maximum}")
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        """A number above zero; `default` stands for a missing key or null."""
        value = self._take(key) if default is None else self._values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.refuse(key, "a number")
        if not 0 < value < MAX_NUMBER:  # also false for NaN
            raise self.refuse(key, f"above zero and below {MAX_NUMBER:g}")
        return float(value)

    def boolean(self, key: str, *, default: bool | None = None) -> bool:
        """True or false; `default` stands for a missing key or null."""
        value = self._take(key) if default is None else self._values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value

    def text(self, key: str, *, default: str | None = None) -> str:
        """A string; `default` stands for a missing key or null."""
        value = self._take(key) if default is None else self._values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.refuse(key, "a string")
        return value

    def one_of(self, key: str, allowed: Sequence[str]) -> str:
        """A string out of a closed set."""
        value = self.text(key)
        if value not in allowed:
            raise self.refuse(key, "one of " + ", ".join(allowed))
        return value

    def texts(self, key: str, *, of: Sequence[str] | None = None) -> tuple[str, ...]:
        """A list of strings, each from `of` where that is given."""
        values = self._take(key)
        if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
            raise self.refuse(key, "a list of strings")
        for value in values:
            if of is not None and value not in of:
                raise self.refuse(key, "a list of " + " | ".join(of))
        return tuple(values)

    def integers(self, key: str, *, minimum: int = 0) -> tuple[int, ...]:
        """A list of whole numbers, none below `minimum`."""
        values = self._take(key)
        if not isinstance(values, list) or not all(
            isinstance(v, int) and not isinstance(v, bool) and v >= minimum for v in values
        ):
            raise self.refuse(key, f"a list of whole numbers, none below {minimum}")
        return tuple(values)

    def sizes(self, key: str) -> tuple[int | str, ...]:
        """A shape: whole numbers, and names for sizes that a run chooses."""
        values = self._take(key)
        if not isinstance(values, list) or not all(
            isinstance(v, str) or (isinstance(v, int) and not isinstance(v, bool) and v >= 0)
            for v in values
        ):
            raise self.refuse(key, "a list of sizes, each a whole number or a name")
        return tuple(values)

    def file_name(self, key: str) -> str:
        """The name of a file in the same folder: no path, nothing that leaves the folder."""
        value = self.text(key)
        if not value or value in (".", "..") or set(value) & set("/\\:\0"):
            raise self.refuse(key, "the name of a file in the same folder, not a path")
        return value

    def object(self, key: str) -> Self:
        """A JSON object under `key`."""
        return type(self)(self._take(key), self._at(key))

    def optional_object(self, key: str) -> Self | None:
        """A JSON object under `key`, or None where it is missing or null."""
        return None if self._values.get(key) is None else self.object(key)

    def objects(self, key: str) -> list[Self]:
        """A list of JSON objects under `key`."""
        values = self._take(key)
        if not isinstance(values, list):
            raise self.refuse(key, "a list of objects")
        return [type(self)(v, f"{self._at(key)}[{i}]") for i, v in enumerate(values)]

    def named_objects(self, key: str) -> dict[str, Self]:
        """An object of objects under `key`, by name."""
        inner = self.object(key)
        return {name: inner.object(name) for name in inner}


def read_json(path: Path) -> Fields:
    """Read the JSON object in a file; raises `ParseError` that names the file.

    Duplicate keys, NaN and files over `MAX_JSON_BYTES` are refused: each is a way to make
    two readers see two different files.
    """
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ParseError(f"{path} has {size} bytes; no such file is over {MAX_JSON_BYTES}")
        text = path.read_text(encoding="utf-8")
        values = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except OSError as e:
        raise ParseError(f"{path} cannot be read: {e.strerror or e}") from e
    except RecursionError as e:
        raise ParseError(f"{path} is nested too deeply to be a file of this kind") from e
    except ValueError as e:
        raise e if isinstance(e, ParseError) else ParseError(f"{path} is not JSON: {e}") from e
    return Fields(values, path.name)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return values


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
