"""Rules about the files of an artifact: all there, all its own, none changed."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator

from artifacts.findings import Severity
from artifacts.graph_file import open_regular
from artifacts.manifest import MANIFEST
from artifacts.parse import ParseError
from artifacts.rule import Case, Fault, Rule, plain_name

__all__ = ["FILE_RULES"]

READ_BYTES = 4 * 2**20
"""Read at once for a digest; larger is not faster."""


def _missing(case: Case) -> Iterator[Fault]:
    for name in case.listed:
        if name not in case.status:
            yield Fault(name, f"{name} is named in {MANIFEST} and is not there")


def _irregular(case: Case) -> Iterator[Fault]:
    for name, status in case.status.items():
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISLNK(status.st_mode):
            yield Fault(name, f"{name} is {_kind(status.st_mode)}; it must be a regular file")


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a named pipe"))
    return next((text for test, text in kinds if test(mode)), "a device or socket")


def _link(case: Case) -> Iterator[Fault]:
    for name, status in case.status.items():
        if stat.S_ISLNK(status.st_mode):
            yield Fault(
                name, f"{name} is a symbolic link; ONNX Runtime reads no weights by one"
            )
        elif stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
            yield Fault(
                name,
                f"{name} is one of {status.st_nlink} hard links to the same bytes; ONNX "
                "Runtime reads it, onnx and onnx_ir refuse it, and a change elsewhere is one "
                "here",
                Severity.WARNING,
            )


def _escapes(case: Case) -> Iterator[Fault]:
    for name in case.manifest.files:
        if not plain_name(name):
            yield Fault(MANIFEST, f"files names {name!r}, which is no file of this folder")
    for name, _, _ in case.graphs():
        places = {
            tensor.external.location: tensor.name
            for tensor in case.tensors(name)
            if tensor.external is not None
        }
        for location, tensor in places.items():
            if not all(plain_name(part) for part in location.split("/")):
                yield Fault(
                    f"{name}:{tensor}",
                    f"{tensor} refers to {location!r}, which leaves the folder or is no path "
                    "that every system reads alike",
                )


def _truncated(case: Case) -> Iterator[Fault]:
    weights = case.manifest.weights
    if not case.is_regular(weights.file):
        return
    size = case.status[weights.file].st_size
    if size != weights.size:
        yield Fault(
            weights.file, f"{weights.file} has {size} bytes; {MANIFEST} says {weights.size}"
        )
    for name, tensor in weights.tensors.items():
        if tensor.offset + tensor.length > size:
            yield Fault(
                f"{weights.file}:{name}",
                f"{name} ends at byte {tensor.offset + tensor.length}; the file has {size}",
            )


def _digest(case: Case) -> Iterator[Fault]:
    if not case.digests:
        return
    weights = case.manifest.weights
    names = [name for name in case.listed if case.is_regular(name)]
    if weights.file in names and case.status[weights.file].st_size != weights.size:
        names.remove(weights.file)  # another rule says so, and hashing it may take minutes
    done, total = 0, sum(case.status[name].st_size for name in names)
    for name in names:
        digest = hashlib.sha256()
        try:
            with open_regular(case.folder / name) as file:
                while block := file.read(READ_BYTES):
                    digest.update(block)
                    done += len(block)
                    case.on_progress(done, total)
        except (OSError, ParseError) as e:
            yield Fault(name, f"{name} cannot be read: {e}")
            continue
        if digest.hexdigest() != case.listed[name].lower():
            yield Fault(
                name,
                f"{name} has the sha256 {digest.hexdigest()}; {MANIFEST} says "
                f"{case.listed[name][:64]!r}",
            )


def _orphaned(case: Case) -> Iterator[Fault]:
    try:
        with os.scandir(case.folder) as entries:
            names = sorted(entry.name for entry in entries)
    except OSError as e:
        yield Fault(str(case.folder), f"{case.folder} cannot be listed: {e.strerror or e}")
        return
    for name in names:
        if name != MANIFEST and name not in case.listed:
            yield Fault(name, f"{name} is in the folder and {MANIFEST} does not name it")
    yield from _orphaned_bytes(case)
    yield from _orphaned_tensors(case)


def _orphaned_bytes(case: Case) -> Iterator[Fault]:
    if case.header is None or isinstance(case.header, ParseError):
        return
    weights, (end, _) = case.manifest.weights, case.header
    size = case.status[weights.file].st_size
    gaps = []
    spans = sorted((t.offset, t.offset + t.length) for t in weights.tensors.values())
    for start, stop in (*spans, (size, size)):
        if min(start, size) > end:
            gaps.append((end, min(start, size)))
        end = max(end, stop)
    if gaps:
        lost = sum(stop - start for start, stop in gaps)
        yield Fault(
            weights.file,
            f"{lost} of {size} bytes belong to no tensor, first {gaps[0][0]} to {gaps[0][1]}",
        )


def _orphaned_tensors(case: Case) -> Iterator[Fault]:
    read = [name for name, _, _ in case.graphs()]
    if len(read) < len(case.described):
        return  # a graph that cannot be read may be the one that refers to them
    used = {
        tensor.name
        for graph in read
        for tensor in case.tensors(graph)
        if tensor.external is not None
    }
    for name, tensor in case.manifest.weights.tensors.items():
        if name not in used:
            yield Fault(
                f"{case.manifest.weights.file}:{name}",
                f"no graph refers to {name}, {tensor.length} bytes",
            )


FILE_RULES = (
    Rule(
        code="files.missing",
        severity=Severity.ERROR,
        title="every file that the manifest names is there",
        explanation="A run opens each of them; it stops at the first that is absent.",
        remedy="copy the whole artifact again, or build it again",
        run=_missing,
    ),
    Rule(
        code="files.irregular",
        severity=Severity.ERROR,
        title="every file is a regular file",
        explanation="A pipe or device blocks whoever opens it, and has no digest.",
        remedy="copy the whole artifact again, or build it again",
        run=_irregular,
    ),
    Rule(
        code="files.link",
        severity=Severity.ERROR,
        title="no file is a link",
        explanation=(
            "External data behind a symbolic link is refused by ONNX Runtime, onnx and "
            "onnx_ir; hard-linked data is refused by the latter two (a warning)."
        ),
        remedy="put a copy of the file in the place of the link (cp -L)",
        run=_link,
    ),
    Rule(
        code="files.escapes",
        severity=Severity.ERROR,
        title="nothing refers to a file outside the folder",
        explanation=(
            "A location that is absolute, climbs with '..' or holds a backslash makes a run "
            "read a file of the machine instead of one of the artifact's."
        ),
        remedy="do not run this artifact unless you know where it came from; build it again",
        run=_escapes,
    ),
    Rule(
        code="files.truncated",
        severity=Severity.ERROR,
        title="the weight file has its bytes, no fewer and no more",
        explanation="An interrupted copy or download ends early; a second save appends.",
        remedy="copy the weight file again",
        run=_truncated,
    ),
    Rule(
        code="files.digest",
        severity=Severity.ERROR,
        title="every file has the sha256 that the manifest says",
        explanation="A file that changed since the build is not the one checked then.",
        remedy="copy the file again; if it was edited on purpose, build the artifact again",
        run=_digest,
    ),
    Rule(
        code="files.orphaned",
        severity=Severity.WARNING,
        title="every file and every weight is referred to",
        explanation=(
            "Saving ONNX external data a second time appends to the file, so that half of it "
            "belongs to nobody; other files are left behind by hand."
        ),
        remedy="remove the file, or build the artifact again",
        run=_orphaned,
    ),
)
