"""What a rule is, and what all rules look at: an artifact, each of its files read once."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import onnx

from artifacts.findings import Severity
from artifacts.graph_file import StoredTensor, open_regular, read_graph, stored_tensors
from artifacts.manifest import GRAPHS, MANIFEST, OPTIONAL_GRAPHS, Graph, Manifest, WeightTensor
from artifacts.parse import ParseError
from artifacts.weight_header import read_header

__all__ = ["Case", "Fault", "Progress", "Rule", "plain_name"]

KNOWN = (*GRAPHS, *OPTIONAL_GRAPHS)
Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One place where a rule does not hold."""

    place: str
    message: str
    severity: Severity | None = None
    """Where this one weighs other than its rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A named check; `Rule.run` yields the places where it fails and never raises."""

    code: str
    severity: Severity
    title: str
    """What must hold, in a few words."""
    explanation: str
    """Why it must."""
    remedy: str
    run: Callable[[Case], Iterator[Fault]]


def plain_name(name: str) -> bool:
    """Whether `name` is a file of the folder itself and cannot lead anywhere else."""
    return (
        name not in ("", ".", "..")
        and not set(name) & set("/\\:\0")
        and not any("\ud800" <= character <= "\udfff" for character in name)
    )


class Case:
    """An artifact under check.

    Args:
        folder: Of the artifact.
        manifest: Read from it.
        digests: Whether to read every byte for its digest.
        on_progress: Called while digests are taken.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, *, digests: bool, on_progress: Progress | None
    ) -> None:
        self.folder, self.manifest = folder, manifest
        self.digests = digests
        self.on_progress = on_progress or (lambda done, total: None)

    @cached_property
    def described(self) -> dict[str, Graph]:
        """Graphs of the manifest, those that others fall back to as ``decode.stock``."""
        graphs = self.manifest.graphs
        others = {f"{n}.stock": g.in_stock() for n, g in graphs.items() if g.fallback}
        return graphs | others

    @cached_property
    def listed(self) -> dict[str, str]:
        """Every file that the manifest names -> its sha256, as far as names are plain."""
        named = {graph.file: graph.sha256 for graph in self.described.values()}
        named |= {self.manifest.weights.file: self.manifest.weights.sha256}
        named |= self.manifest.files
        return {name: digest for name, digest in named.items() if plain_name(name)}

    @cached_property
    def status(self) -> dict[str, os.stat_result]:
        """Of each listed file that is there, and of the manifest; links are not followed."""
        found = {}
        for name in (MANIFEST, *self.listed):
            try:
                found[name] = (self.folder / name).lstat()
            except OSError:
                continue
        return found

    def is_regular(self, name: str) -> bool:
        """Whether a listed file is there and may be read."""
        return name in self.status and stat.S_ISREG(self.status[name].st_mode)

    @cached_property
    def _read_graphs(self) -> dict[str, onnx.ModelProto | ParseError]:
        read: dict[str, onnx.ModelProto | ParseError] = {}
        for name, graph in self.described.items():
            known = name.removesuffix(".stock") in KNOWN
            if known and self.is_regular(graph.file):  # others are refused unread
                try:
                    read[name] = read_graph(self.folder / graph.file)
                except ParseError as e:
                    read[name] = e
        return read

    def unreadable_graphs(self) -> Iterator[tuple[str, ParseError]]:
        """Graphs whose file is there and cannot be read, with the reason."""
        for name, model in self._read_graphs.items():
            if isinstance(model, ParseError):
                yield name, model

    def graphs(self) -> Iterator[tuple[str, Graph, onnx.ModelProto]]:
        """Graphs that could be read: name, what the manifest says, what the file says."""
        for name, model in self._read_graphs.items():
            if not isinstance(model, ParseError):
                yield name, self.described[name], model

    def tensors(self, graph: str) -> list[StoredTensor]:
        """Every tensor with bytes in a graph that could be read."""
        return self._tensors[graph]

    @cached_property
    def _tensors(self) -> dict[str, list[StoredTensor]]:
        return {name: list(stored_tensors(model)) for name, _, model in self.graphs()}

    @cached_property
    def header(self) -> tuple[int, dict[str, WeightTensor]] | ParseError | None:
        """Start of the data and tensors by the weight file's own word; None without file."""
        name = self.manifest.weights.file
        if not self.is_regular(name):
            return None
        try:
            with open_regular(self.folder / name) as file:
                return read_header(file, self.status[name].st_size, name)
        except ParseError as e:
            return e
        except OSError as e:
            return ParseError(f"{name} cannot be read: {e.strerror or e}")
