"""An output folder that is there whole or not at all.

A build writes into a fresh hidden folder beside its output, which is renamed into place at
the end. Whatever stops the build, the output is what it was before or what it should be.
Only a process that is killed leaves something behind, beside the output ``name``:

    .name.<random>       a build that never ended; nothing loads it, remove it at will
    .name.old.<random>   the artifact that was there, if it died while exchanging the two

Nothing half-written ever loads: the manifest is the last file a build writes, and a folder
without one is no artifact. Folders left behind are not swept, for another build may be
writing to one that looks as old.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from artifacts import ParseError, read_json
from artifacts.manifest import MANIFEST
from export.errors import ExportError

__all__ = ["stage"]

logger = logging.getLogger(__name__)


@contextmanager
def stage(output: Path, *, force: bool) -> Iterator[Path]:
    """A fresh folder that becomes `output` at a clean exit, and is removed at any other.

    Everything is on disk before the rename. With `force` the artifact that stands at
    `output` is removed after the new one has taken its place, and put back if that fails.

    Args:
        output: The folder to make; its parent must exist.
        force: Replace an artifact. A folder that is no artifact is never replaced.

    Yields:
        The folder to write into.

    Raises:
        ExportError: `output` is taken, is a link or a file, or cannot be written; or
            another process made it meanwhile.
    """
    output = _absolute(output)
    _refuse_taken(output, force=force)
    staging = _make_beside(output)
    try:
        yield staging
        try:
            _sync_tree(staging)
            _publish(staging, output, force=force)
        except OSError as e:
            raise ExportError(
                f"{output} cannot be put in place: {e.strerror or e}. What stood there is "
                "as it was; build again"
            ) from e
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    _sync_rename(output)


def _absolute(output: Path) -> Path:
    """`output` in its real parent, so that a change of directory moves nothing."""
    if output.name in ("", ".."):
        raise ExportError(f"{output} does not name a folder to make; give DIR/NAME")
    try:
        parent = output.parent.resolve(strict=True)
    except FileNotFoundError as e:
        raise ExportError(
            f"{output.parent}, where {output.name} would go, does not exist. Create it first"
        ) from e
    except (OSError, RuntimeError) as e:
        raise ExportError(f"{output.parent} cannot be opened: {e}") from e
    if not parent.is_dir():
        raise ExportError(f"{parent} is not a folder, so {output.name} cannot go there")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ExportError(
            f"{parent} is not writable for you, so {output.name} cannot go there"
        )
    return parent / output.name


def _mode(path: Path) -> int | None:
    """`st_mode` of what stands at `path` itself, None where nothing does."""
    try:
        return path.lstat().st_mode
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as e:
        raise ExportError(f"{path} cannot be looked at: {e}") from e


def _refuse_taken(output: Path, *, force: bool) -> None:
    mode = _mode(output)
    if mode is None:
        return
    if stat.S_ISLNK(mode):
        raise ExportError(f"{output} is a symbolic link. Name the folder itself, or remove it")
    if not stat.S_ISDIR(mode):
        raise ExportError(f"{output} is a file, where a folder must go. Move it away")
    if _is_empty(output):
        return
    if not _is_artifact(output):
        raise ExportError(
            f"{output} is not empty and is no artifact, so it is never replaced. Choose "
            "another name, or remove it yourself"
        )
    if not force:
        raise ExportError(f"{output} holds an artifact already. Replace it with --force")


def _is_empty(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is None
    except OSError as e:
        raise ExportError(f"{folder} cannot be read: {e.strerror or e}") from e


def _is_artifact(folder: Path) -> bool:
    """Whether its manifest is one of ours: browser extensions call theirs the same."""
    mode = _mode(folder / MANIFEST)
    if mode is None or not stat.S_ISREG(mode):
        return False
    try:
        fields = read_json(folder / MANIFEST)
    except ParseError:
        return False
    return all(key in fields for key in ("schema", "producer", "graphs", "weights"))


def _make_beside(output: Path) -> Path:
    for _ in range(100):
        staging = output.with_name(f".{output.name}.{secrets.token_hex(4)}")
        try:
            staging.mkdir()
        except FileExistsError:
            continue
        except OSError as e:
            raise ExportError(
                f"no folder can be made beside {output}: {e.strerror or e}"
            ) from e
        return staging
    raise ExportError(f"no free name beside {output}. Remove the folders .{output.name}.*")


def _publish(staging: Path, output: Path, *, force: bool) -> None:
    """Rename into place; the system refuses where something came to stand meanwhile."""
    _refuse_taken(output, force=force)
    if _mode(output) is None or _is_empty(output):
        staging.rename(output)
    else:
        _exchange(staging, output)


def _exchange(staging: Path, output: Path) -> None:
    aside = output.with_name(f".{output.name}.old.{secrets.token_hex(4)}")
    try:
        output.rename(aside)
        _refuse_taken(aside, force=True)
        staging.rename(output)
    except BaseException:
        if _mode(aside) is not None and _mode(staging) is not None:
            _put_back(aside, output)
        elif _mode(aside) is not None:
            _remove_old(aside, output)
        raise
    _remove_old(aside, output)


def _put_back(aside: Path, output: Path) -> None:
    try:
        aside.rename(output)
    except OSError as e:
        raise ExportError(
            f"{output} was taken by another process during the exchange; the artifact that "
            f"stood there is now {aside}"
        ) from e


def _remove_old(aside: Path, output: Path) -> None:
    try:
        shutil.rmtree(aside)
    except OSError as e:
        logger.warning("%s is in place, but its predecessor stays as %s: %s", output, aside, e)


def _sync_tree(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            if stat.S_ISREG(path.lstat().st_mode):
                _sync(path)
        _sync(Path(parent))


def _sync_rename(output: Path) -> None:
    try:
        _sync(output.parent)
    except OSError as e:
        logger.warning("%s is in place, but a power cut may undo it: %s", output, e)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
