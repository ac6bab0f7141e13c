"""Writing what a repair made: files replaced as a whole, data files without orphaned bytes."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from artifacts import ParseError
from artifacts.graph_file import open_regular
from export.bundles.data_files import FileState, Region, data_files, region
from export.bundles.graph_index import read_graph_file
from export.bundles.layout import BundleLayout, Exporter
from export.errors import BundleError

__all__ = ["DataPlan", "copy_with", "replace_file", "written_anew"]

ALIGNMENT = 4096
"""Most that a tensor's place is rounded up to; one that was less aligned stays so."""
COPY_BYTES = 2**24


@dataclass(frozen=True, slots=True)
class DataPlan:
    """Which bytes of a data file go where."""

    moves: tuple[tuple[Region, int], ...]
    """Places in the old file and offsets in the new one, ascending."""
    dropped: int


def written_anew(layout: BundleLayout, written: dict[str, bytes]) -> dict[str, DataPlan]:
    """Plans for the data files that hold more than weights; `written` gets the new places.

    Raises:
        BundleError: A data file is not what the graphs say.
    """
    models = {file: _model(layout, file, written) for file in layout.graphs.values()}
    places = {
        place
        for file, model in models.items()
        for tensor in model.graph.initializer
        if (place := region(tensor, file)) is not None
    }
    plans = {}
    for found in data_files(layout.folder, places):
        if found.state is not FileState.PRESENT:
            raise BundleError(f"{found.file} is {found.state}; it cannot be written anew")
        plan = _plan([p for p in places if p.file == found.file], found.size)
        if plan.dropped > 0:
            plans[found.file] = plan
    if plans:
        moved = {place: to for plan in plans.values() for place, to in plan.moves}
        for file, model in models.items():
            if _point(model, file, moved):
                written[file] = model.SerializeToString(deterministic=True)
        _point_metadata(layout, moved, written)
    return plans


def _model(layout: BundleLayout, file: str, written: Mapping[str, bytes]) -> onnx.ModelProto:
    if file not in written:
        return read_graph_file(layout.folder / file)
    model = onnx.ModelProto()
    model.ParseFromString(written[file])
    return model


def _plan(places: list[Region], size: int) -> DataPlan:
    moves, end, last = [], 0, (-1, 0)
    for place in sorted(places, key=lambda p: (p.offset, p.length)):
        if place.offset < last[0]:  # it overlaps the one before: both keep their distance
            moves.append((place, last[1] + place.offset))
        else:
            align = min(ALIGNMENT, place.offset & -place.offset or ALIGNMENT)
            to = -(-end // align) * align
            moves.append((place, to))
            last = (place.offset + place.length, to - place.offset)
        end = max(end, moves[-1][1] + place.length)
    return DataPlan(tuple(moves), size - end)


def _point(model: onnx.ModelProto, file: str, moved: Mapping[Region, int]) -> bool:
    changed = False
    for tensor in model.graph.initializer:
        place = region(tensor, file)
        if place is None or place not in moved:
            continue
        entries = {entry.key: entry for entry in tensor.external_data}
        if "offset" not in entries:
            entries["offset"] = tensor.external_data.add(key="offset")
        entries["offset"].value = str(moved[place])
        changed = True
    return changed


def _point_metadata(
    layout: BundleLayout, moved: Mapping[Region, int], written: dict[str, bytes]
) -> None:
    """onnxruntime-genai's metadata repeats the places of what target and head share."""
    if layout.exporter is not Exporter.GENAI or layout.metadata is None:
        return
    text = written.get(layout.metadata) or (layout.folder / layout.metadata).read_bytes()
    starts = {(place.file, str(place.offset)): to for place, to in moved.items()}
    try:
        said: dict[str, Any] = json.loads(text)
        lists = [said["model"].get(part, {}) for part in ("decoder", "mtp")]
        entries = [e for part in lists for e in part.get("shared_initializers", [])]
        found = [(e, starts.get((e["data_file"], str(e["offset"])))) for e in entries]
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        raise BundleError(
            f"{layout.metadata} does not list shared initializers as it must: {e!r}"
        ) from e
    for entry, to in found:
        if to is not None:
            entry["offset"] = str(to) if isinstance(entry["offset"], str) else to
    if any(to is not None for _, to in found):
        written[layout.metadata] = json.dumps(said, indent=4).encode()


def replace_file(path: Path, content: bytes) -> None:
    """Put `content` in the place of a file, as a whole."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(name).chmod(path.stat().st_mode & 0o777)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def copy_with(
    folder: Path, output: Path, written: Mapping[str, bytes], plans: Mapping[str, DataPlan]
) -> None:
    """Copy the bundle beside `output` and rename it there when it is whole."""
    paths = [(path, path.relative_to(folder)) for path in sorted(folder.rglob("*"))]
    for path, _ in paths:
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise BundleError(f"{path} is a link or no plain file; put the file itself there")
    output.parent.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}."))
    try:
        for path, name in paths:
            if path.is_dir():
                (stage / name).mkdir()
            elif name.as_posix() in plans:
                _compact(path, stage / name, plans[name.as_posix()])
            elif name.as_posix() not in written:
                shutil.copyfile(path, stage / name)
        for file, content in written.items():
            (stage / file).write_bytes(content)
        stage.chmod(0o755)
        stage.rename(output)
    except OSError:
        shutil.rmtree(stage, ignore_errors=True)
        raise


def _compact(source: Path, to: Path, plan: DataPlan) -> None:
    try:
        with open_regular(source) as old, to.open("wb") as new:
            for place, offset in plan.moves:
                old.seek(place.offset)
                new.seek(offset)
                left = place.length
                while left > 0:
                    block = old.read(min(left, COPY_BYTES))
                    if not block:
                        raise BundleError(f"{source} ends before the weights that it holds")
                    new.write(block)
                    left -= len(block)
    except ParseError as e:
        raise BundleError(f"{source} cannot be read: {e}") from e
