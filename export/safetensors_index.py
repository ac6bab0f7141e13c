"""Which safetensors file of a folder holds which tensor, and reading rows of one.

Nothing in the folder is trusted. File names come from JSON that anyone may have written, and
lengths from headers: the safetensors library validates each header against the file's size,
and no file outside the folder is opened.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # the import registers bfloat16 with NumPy, which safetensors needs
import numpy as np
from safetensors import SafetensorError, safe_open

from artifacts import read_json
from export.errors import CheckpointError

__all__ = ["DTYPES", "StoredTensor", "file_within", "optional_file", "read_index"]

INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: what its header says of it."""

    name: str
    path: Path
    dtype: str
    """As safetensors spells it; `DTYPES` are those that can be read."""
    shape: tuple[int, ...]

    def read(self, ranges: Sequence[tuple[int, int]]) -> np.ndarray[Any, np.dtype[Any]]:
        """Rows ``start..stop - 1`` of each range, one below the other.

        The file is opened for this read alone: the library maps it, and mapped pages count
        as this process's memory until the file is closed.
        """
        with _opened(self.path) as file:
            stored = file.get_slice(self.name)
            if tuple(stored.get_shape()) != self.shape or stored.get_dtype() != self.dtype:
                raise CheckpointError(
                    f"{self.path} changed during the build: {self.name!r} is another tensor"
                )
            rows = [stored[start:stop] for start, stop in ranges]
        return rows[0] if len(rows) == 1 else np.concatenate(rows)


def read_index(folder: Path) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    """All tensors of a checkpoint folder by name, and the files left out.

    With `INDEX` in the folder the files are those it names, and any other that holds MTP
    tensors alone (some publishers add the head so). Without, they are all safetensors
    files that are not hidden.

    Raises:
        CheckpointError: a file is missing, unsafe, damaged or at odds with the index, or two
            files hold a tensor of one name.
        ParseError: the index is not what an index must be.
    """
    names = sorted(path.name for path in folder.iterdir())
    present = [n for n in names if n.endswith(SUFFIX) and not n.startswith(".")]
    index = optional_file(folder, INDEX)
    placed = _placed(index) if index is not None else {}
    listed = sorted(set(placed.values())) or present
    if not listed:
        raise CheckpointError(f"{folder} holds no {SUFFIX} file; a checkpoint has its weights")
    tensors: dict[str, StoredTensor] = {}
    left_out = []
    for name in [*listed, *(n for n in present if n not in listed)]:
        held = _held(file_within(folder, name))
        if name not in listed and not all(t.name.startswith("mtp.") for t in held):
            left_out.append(name)
            continue
        for tensor in held:
            if tensor.name in tensors:
                first = tensors[tensor.name].path.name
                raise CheckpointError(
                    f"{tensor.name!r} stands in both {first} and {name} of {folder}; "
                    "keep one of the files"
                )
            tensors[tensor.name] = tensor
    for tensor_name, name in placed.items():
        if tensor_name not in tensors or tensors[tensor_name].path.name != name:
            raise CheckpointError(
                f"{index} places {tensor_name!r} in {name}, which does not hold it; "
                "fetch the file and the index of one revision"
            )
    return tensors, tuple(left_out)


def _placed(index: Path) -> dict[str, str]:
    """``weight_map`` of the index: tensor name to file name."""
    weight_map = read_json(index).object("weight_map")
    placed = {name: weight_map.file_name(name) for name in weight_map}
    for tensor_name, name in placed.items():
        if not name.endswith(SUFFIX):
            raise weight_map.refuse(tensor_name, f"the name of a {SUFFIX} file")
    if not placed:
        raise CheckpointError(f"{index} names no tensor; fetch it anew")
    return placed


def _held(path: Path) -> list[StoredTensor]:
    with _opened(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return [
            StoredTensor(name, path, stored.get_dtype(), tuple(stored.get_shape()))
            for name, stored in slices.items()
        ]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="np") as file:
            yield file
    except (SafetensorError, OSError) as e:
        raise CheckpointError(f"{path} cannot be read as safetensors: {e}") from e


def file_within(folder: Path, name: str) -> Path:
    """The path of a regular file of the folder.

    A link may lead to another place in the folder, or, in the cache of the Hugging Face hub
    (``snapshots/<revision>/<file>``), into the ``blobs`` beside ``snapshots``.

    Raises:
        CheckpointError: there is none, it is no regular file, or a link leads elsewhere.
    """
    path = folder / name
    try:
        real, root = path.resolve(strict=True), folder.resolve(strict=True)
        is_file = stat.S_ISREG(real.stat().st_mode)
    except FileNotFoundError as e:
        raise CheckpointError(f"{path} is missing; fetch the whole checkpoint") from e
    except (OSError, RuntimeError, ValueError) as e:  # a loop of links; an impossible name
        raise CheckpointError(f"{path} cannot be opened: {e}") from e
    is_blob = root.parent.name == "snapshots" and real.parent == root.parent.parent / "blobs"
    if not (is_blob or real.is_relative_to(root)):
        raise CheckpointError(
            f"{path} is a link to {real}, outside the folder; put the file itself there"
        )
    if not is_file:
        raise CheckpointError(f"{path} is not a regular file; put the file itself there")
    return path


def optional_file(folder: Path, name: str) -> Path | None:
    """The path of a regular file of the folder, None where nothing has that name."""
    path = folder / name
    return file_within(folder, name) if path.exists() or path.is_symlink() else None
