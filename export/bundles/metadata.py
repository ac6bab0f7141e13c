"""Metadata files of other exporters: YAML and JSON, read as what they are: untrusted."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from artifacts import Fields, ParseError, read_json

__all__ = ["read_metadata"]

MAX_YAML_BYTES = 2**20
"""The metadata of a 64-layer model has 60 KB; a YAML reader is slow enough to be stalled."""


class _PlainLoader(yaml.SafeLoader):  # type: ignore[misc, unused-ignore]
    """YAML as JSON would have it: no aliases, no keys twice, string keys, no tags."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse aliases: a few of them, nested, unfold into terabytes."""
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call, unused-ignore]
            raise yaml.constructor.ConstructorError(
                None, None, f"the alias *{event.anchor} is refused; write the value out",
                event.start_mark,
            )  # fmt: skip
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        """A mapping whose keys are strings, each standing once."""
        pairs = [
            (self.construct_object(k, deep=True), self.construct_object(v, deep=True))
            for k, v in node.value
        ]
        keys = [key for key, _ in pairs]
        for i, key in enumerate(keys):
            if not isinstance(key, str) or key in keys[:i]:
                fault = "stands twice" if isinstance(key, str) else "is not a string"
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} {fault}", node.start_mark
                )
        return dict(pairs)


def read_metadata(path: Path) -> Fields:
    """The one object in a ``.yaml`` or ``.json`` file; raises `ParseError` that names it."""
    if path.is_symlink():
        raise ParseError(f"{path} is a link; copy the file itself into the bundle")
    return read_json(path) if path.suffix == ".json" else _read_yaml(path)


def _read_yaml(path: Path) -> Fields:
    try:
        size = path.stat().st_size
        if size > MAX_YAML_BYTES:
            raise ParseError(f"{path} has {size} bytes; no metadata is over {MAX_YAML_BYTES}")
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_PlainLoader)
    except OSError as e:
        raise ParseError(f"{path} cannot be read: {e.strerror or e}") from e
    except RecursionError as e:
        raise ParseError(f"{path} is nested too deeply to be a file of this kind") from e
    except (yaml.YAMLError, ValueError, OverflowError) as e:
        if isinstance(e, ParseError):
            raise
        raise ParseError(f"{path} is not plain YAML: {' '.join(str(e).split())}") from e
    return Fields(values, path.name)
