"""Rules about the files of a bundle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from artifacts.findings import Severity
from export.bundles.data_files import FileState, Region, region
from export.bundles.rule import Bundle, BundleRule, Fault

__all__ = ["FILE_RULES"]

ORPHANED_SHARE = 0.05
"""Alignment leaves a page here and there; a second save leaves half of the file."""


def _missing(bundle: Bundle) -> Iterator[Fault]:
    for name in bundle.layout.missing:
        yield name, "the metadata names this file and it is not there"
    for file in bundle.description.files:
        if file.state is FileState.MISSING:
            yield (
                file.file,
                f"a graph keeps {file.used} bytes in it, and it is not there",
            )


def _links(bundle: Bundle) -> Iterator[Fault]:
    for file in bundle.description.files:
        if file.state is FileState.LINK:
            yield file.file, "it is a link, behind a link, or no plain file"


def _escapes(bundle: Bundle) -> Iterator[Fault]:
    for file in bundle.description.files:
        if file.state is FileState.OUTSIDE:
            yield file.file, "a graph keeps weights outside of the folder"


def _truncated(bundle: Bundle) -> Iterator[Fault]:
    for file in bundle.description.files:
        if file.state is FileState.TRUNCATED:
            yield (
                file.file,
                f"it has {file.size} bytes, and graphs read up to byte {file.wanted}",
            )


def _orphaned(bundle: Bundle) -> Iterator[Fault]:
    for file in bundle.description.files:
        unread = file.size - file.used
        if file.state is FileState.PRESENT and unread > ORPHANED_SHARE * file.size:
            yield file.file, f"no graph reads {unread} of its {file.size} bytes"


def _overlap(bundle: Bundle) -> Iterator[Fault]:
    places: dict[Region, str] = {}
    for role, index in bundle.graphs.items():
        for tensor in index.graph.initializer:
            place = region(tensor, bundle.layout.graphs[role])
            if place is not None and place.length > 0:
                places.setdefault(place, tensor.name)
    ordered = sorted(places, key=lambda p: (p.file, p.offset, p.length))
    for one, other in pairwise(ordered):
        if one.file == other.file and other.offset < one.offset + one.length:
            yield one.file, f"'{places[one]}' and '{places[other]}' overlap without being one"


FILE_RULES: Sequence[BundleRule] = (
    BundleRule(
        code="files.missing",
        severity=Severity.ERROR,
        title="every file that is named is there",
        explanation="A head or a data file that was left behind stops a run at load.",
        remedy="copy the whole bundle again",
        run=_missing,
    ),
    BundleRule(
        code="files.link",
        severity=Severity.ERROR,
        title="no data file is a link",
        explanation="External data behind a link is refused by ONNX Runtime and by onnx.",
        remedy="put the file itself there",
        run=_links,
    ),
    BundleRule(
        code="files.escapes",
        severity=Severity.ERROR,
        title="weights lie inside of the folder",
        explanation="Such a path reads a file of the machine instead of one of the bundle's.",
        remedy="do not use this bundle before the location is corrected",
        run=_escapes,
    ),
    BundleRule(
        code="files.truncated",
        severity=Severity.ERROR,
        title="data files hold every byte that graphs read",
        explanation="An interrupted copy or download ends early.",
        remedy="copy the data file again",
        run=_truncated,
    ),
    BundleRule(
        code="files.overlap",
        severity=Severity.WARNING,
        title="weights share bytes as a whole or not at all",
        explanation="Two tensors over half of each other's bytes come from a wrong offset.",
        remedy="export again; sharing is right only for the same offset and length",
        run=_overlap,
    ),
    BundleRule(
        code="files.orphaned",
        severity=Severity.WARNING,
        title="data files hold nothing but weights",
        explanation="Saving external data a second time appends to the file it was in.",
        remedy="repair writes the data file anew when it is asked to",
        run=_orphaned,
    ),
)
