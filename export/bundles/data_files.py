"""Where the bytes of weights lie: regions of data files, none of them opened."""

from __future__ import annotations

import math
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath

import onnx
import onnx_ir as ir

from export.bundles.layout import inside

__all__ = ["DataFile", "FileState", "Region", "data_files", "dtype_name", "region"]
__all__ += ["tensor_bytes"]


class FileState(StrEnum):
    """How a data file stands to what the graphs want of it."""

    PRESENT = "present"
    MISSING = "missing"
    TRUNCATED = "truncated"
    LINK = "link"
    OUTSIDE = "outside"
    """The graph names a file outside of its folder; it is not touched."""


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes of an initializer in a data file, `file` relative to the bundle."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of weights: what the graphs read of it."""

    file: str
    state: FileState
    size: int
    """Bytes on disk; 0 where it was not looked at."""
    wanted: int
    """One past the last byte that a graph reads."""
    used: int
    """Bytes that some graph reads, each counted once."""


def dtype_name(element: int) -> str:
    """``bfloat16`` for 16; an unknown number is shown as it is."""
    names = onnx.TensorProto.DataType
    return names.Name(element).lower() if element in names.values() else f"type {element}"


def region(tensor: onnx.TensorProto, graph_file: str) -> Region | None:
    """Where an external tensor lies; numbers that are none, or negative, give length -1."""
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return None
    said = {entry.key: entry.value for entry in tensor.external_data}
    at = PurePosixPath(graph_file).parent / said.get("location", "")
    try:
        offset = int(said.get("offset") or 0)
        length = int(said.get("length") or tensor_bytes(tensor))
    except ValueError:
        offset, length = 0, -1
    return Region(str(at), offset, length if min(offset, length) >= 0 else -1)


def tensor_bytes(tensor: onnx.TensorProto) -> int:
    """The size that dtype and shape give; 0 for strings and unknown dtypes."""
    element = tensor.data_type
    known = element in onnx.TensorProto.DataType.values()
    if not known or element in (onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING):
        return 0
    elements: int = math.prod(max(0, size) for size in tensor.dims)
    return (elements * ir.DataType(element).bitwidth + 7) // 8


def data_files(folder: Path, regions: Iterable[Region]) -> tuple[DataFile, ...]:
    """The files behind `regions`, their states and how much of each is read."""
    by_file: dict[str, list[Region]] = {}
    for place in regions:
        by_file.setdefault(place.file, []).append(place)
    return tuple(_data_file(folder, file, places) for file, places in sorted(by_file.items()))


def _data_file(folder: Path, file: str, places: list[Region]) -> DataFile:
    wanted = max(place.offset + place.length for place in places)
    used, end = 0, 0
    for place in sorted(places, key=lambda p: p.offset):
        stop = place.offset + place.length
        used, end = used + max(0, stop - max(end, place.offset)), max(end, stop)
    if not inside(file):
        return DataFile(file, FileState.OUTSIDE, 0, wanted, used)
    path = folder / file
    parents = [folder / p for p in PurePosixPath(file).parents if str(p) != "."]
    if path.is_symlink() or any(parent.is_symlink() for parent in parents):
        return DataFile(file, FileState.LINK, 0, wanted, used)
    try:
        status = path.lstat()
    except OSError:
        return DataFile(file, FileState.MISSING, 0, wanted, used)
    if not stat.S_ISREG(status.st_mode):
        return DataFile(file, FileState.LINK, 0, wanted, used)
    bad = wanted > status.st_size or any(place.length < 0 for place in places)
    state = FileState.TRUNCATED if bad else FileState.PRESENT
    return DataFile(file, state, status.st_size, wanted, used)
