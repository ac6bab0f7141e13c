"""Staging: whatever stops a build, its output is what it was before or what it should be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from export import staging
from export.errors import ExportError
from export.staging import stage

ARTIFACT = {"schema": 1, "producer": "onnx-mtp", "graphs": {}, "weights": {}}
ROOT = Path(staging.__file__).parents[1]


def fill(folder: Path, text: str) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "data").write_text(text)
    (folder / "manifest.json").write_text(json.dumps(ARTIFACT | {"source": text}))


def old_artifact(output: Path) -> None:
    output.mkdir()
    fill(output, "old")


def content(output: Path) -> str:
    assert json.loads((output / "manifest.json").read_text())["source"] in ("old", "new")
    return (output / "sub" / "data").read_text()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_folder_appears_whole_at_a_clean_exit(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with stage(output, force=False) as folder:
        assert folder.parent == tmp_path
        assert folder.name.startswith(".out.")
        assert not output.exists()
        fill(folder, "new")
    assert content(output) == "new"
    assert names(tmp_path) == ["out"]


def test_the_folder_is_as_open_as_one_made_by_hand(tmp_path: Path) -> None:
    with stage(tmp_path / "out", force=False):
        pass
    (tmp_path / "by-hand").mkdir()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "by-hand").stat().st_mode


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with stage(tmp_path / "out", force=False) as folder:
        fill(folder, "new")
    assert content(tmp_path / "out") == "new"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, OSError])
@pytest.mark.parametrize("force", [False, True])
def test_a_build_that_stops_leaves_nothing(
    tmp_path: Path, error: type[BaseException], force: bool
) -> None:
    if force:
        old_artifact(tmp_path / "out")
    with pytest.raises(error), stage(tmp_path / "out", force=force) as folder:
        fill(folder, "new")
        raise error
    assert names(tmp_path) == (["out"] if force else [])
    assert not force or content(tmp_path / "out") == "old"


def test_an_artifact_in_the_way_needs_force(tmp_path: Path) -> None:
    old_artifact(tmp_path / "out")
    with (
        pytest.raises(ExportError, match=r"out holds an artifact already\. Replace it with -"),
        stage(tmp_path / "out", force=False),
    ):
        raise AssertionError
    assert content(tmp_path / "out") == "old"


def test_force_replaces_an_artifact(tmp_path: Path) -> None:
    old_artifact(tmp_path / "out")
    with stage(tmp_path / "out", force=True) as folder:
        assert content(tmp_path / "out") == "old"
        fill(folder, "new")
    assert content(tmp_path / "out") == "new"
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("manifest", [None, "{", "[]", '{"manifest_version": 3, "name": "x"}'])
def test_force_never_replaces_what_is_no_artifact(
    tmp_path: Path, manifest: str | None
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    if manifest is not None:
        (tmp_path / "out" / "manifest.json").write_text(manifest)
    with (
        pytest.raises(ExportError, match="is no artifact, so it is never replaced"),
        stage(tmp_path / "out", force=True),
    ):
        raise AssertionError
    assert (tmp_path / "out" / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize("kind", ["link", "broken link", "file", "fifo"])
@pytest.mark.parametrize("force", [False, True])
def test_links_and_files_in_the_way_are_refused(
    tmp_path: Path, kind: str, force: bool
) -> None:
    output = tmp_path / "out"
    if kind == "file":
        output.write_text("mine")
    elif kind == "fifo":
        os.mkfifo(output)
    else:
        output.symlink_to(tmp_path / "elsewhere")
        if kind == "link":
            old_artifact(tmp_path / "elsewhere")
    before = names(tmp_path)
    with (
        pytest.raises(ExportError, match=r"out is a (symbolic link|file, where)"),
        stage(output, force=force),
    ):
        raise AssertionError
    assert names(tmp_path) == before


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("nowhere/out", "nowhere, where out would go, does not exist"),
        ("file/out", "file(/out)? (is not a folder|cannot be opened)"),
        ("..", "does not name a folder"),
        ("x" * 250, "no folder can be made beside .*File name too long"),
        ("nul\0", "cannot be looked at"),
    ],
)
def test_places_where_nothing_can_go_are_named(
    tmp_path: Path, output: str, message: str
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match=message), stage(tmp_path / output, force=False):
        raise AssertionError
    assert names(tmp_path) == ["file"]


def test_a_parent_that_is_not_writable_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(ExportError, match="is not writable for you"):
        stage(tmp_path / "out", force=False).__enter__()


def test_a_change_of_directory_moves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    with stage(Path("out"), force=False) as folder:
        monkeypatch.chdir(tmp_path)
        fill(folder, "new")
    assert content(tmp_path / "a" / "out") == "new"


@pytest.mark.parametrize("force", [False, True])
def test_an_output_made_by_another_process_meanwhile_wins(tmp_path: Path, force: bool) -> None:
    with pytest.raises(ExportError, match="out"), stage(tmp_path / "out", force=force) as f:
        fill(f, "new")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").write_text("theirs")
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["theirs"]


class Renames:
    """Stands for `Path.rename`: does something just before the n-th one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nth: int, action: Any) -> None:
        self.rename, self.left, self.action = Path.rename, nth, action
        renames = self
        monkeypatch.setattr(Path, "rename", lambda path, target: renames(path, target))

    def __call__(self, path: Path, target: Path) -> Path:
        self.left -= 1
        if self.left == 0:
            self.action()
        return self.rename(path, target)


def test_a_race_lost_at_the_rename_itself_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    Renames(monkeypatch, 1, lambda: old_artifact(output))
    with (
        pytest.raises(ExportError, match="out cannot be put in place: Directory not empty"),
        stage(output, force=False) as folder,
    ):
        fill(folder, "new")
    assert content(output) == "old"
    assert names(tmp_path) == ["out"]


def test_an_old_artifact_whose_place_was_taken_in_the_exchange_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    old_artifact(output)

    def take() -> None:
        output.mkdir()
        (output / "theirs").write_text("theirs")

    Renames(monkeypatch, 2, take)
    with (
        pytest.raises(
            ExportError, match=r"the artifact that stood there is now .*\.out\.old\."
        ),
        stage(output, force=True) as folder,
    ):
        fill(folder, "new")
    (aside,) = tmp_path.glob(".out.old.*")
    assert content(aside) == "old"
    assert names(output) == ["theirs"]


def test_a_folder_swapped_in_before_the_exchange_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    old_artifact(output)
    Renames(monkeypatch, 1, lambda: (output / "manifest.json").unlink())
    with (
        pytest.raises(ExportError, match="is no artifact"),
        stage(output, force=True) as folder,
    ):
        fill(folder, "new")
    assert names(output) == ["sub"]
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_failure_in_the_exchange_puts_the_old_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, nth: int
) -> None:
    output = tmp_path / "out"
    old_artifact(output)

    def fail() -> None:
        raise error

    Renames(monkeypatch, nth, fail)
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else ExportError
    with pytest.raises(expected), stage(output, force=True) as folder:
        fill(folder, "new")
    assert content(output) == "old"
    assert names(tmp_path) == ["out"]


def test_an_interrupt_after_the_exchange_leaves_the_new_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    old_artifact(output)
    rename = Path.rename

    def interrupted(path: Path, target: Path) -> Path:
        rename(path, target)
        if target == output:
            raise KeyboardInterrupt
        return target

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt), stage(output, force=True) as folder:
        fill(folder, "new")
    assert content(output) == "new"
    assert names(tmp_path) == ["out"]


def test_an_old_artifact_that_cannot_be_removed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    output = tmp_path / "out"
    old_artifact(output)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    with stage(output, force=True) as folder:
        fill(folder, "new")
        monkeypatch.setattr("shutil.rmtree", refuse)
    assert content(output) == "new"
    assert "its predecessor stays as" in caplog.text


def test_everything_is_synced_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    synced: list[str] = []
    fsync = os.fsync

    def recorded(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append(path.name if output.exists() else f"early {path.name}")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    with stage(output, force=False) as folder:
        fill(folder, "new")
        os.mkfifo(folder / "pipe")  # opening one would block
    assert set(synced[:-1]) == {
        "early data", "early manifest.json", "early sub", f"early {folder.name}",
    }  # fmt: skip
    assert synced[-1] == tmp_path.name


SUBPROCESS = textwrap.dedent("""
    import json, os, sys
    from pathlib import Path
    from export.staging import stage

    point, left = sys.argv[2], int(sys.argv[3])
    def dying(name, real):
        def call(*arguments, **named):
            global left
            if name == point:
                left -= 1
                if left == 0:
                    os._exit(9)
            return real(*arguments, **named)
        return call
    os.fsync = dying("fsync", os.fsync)
    os.rename = dying("rename", os.rename)
    os.mkdir = dying("mkdir", os.mkdir)
    os.rmdir = dying("rmdir", os.rmdir)
    with stage(Path(sys.argv[1]), force=True) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "data").write_text("new")
        (folder / "manifest.json").write_text(sys.argv[4])
""")
POINTS = [("mkdir", 1), ("mkdir", 2), ("fsync", 1), ("fsync", 4)]
POINTS += [("rename", 1), ("rename", 2), ("rmdir", 1), ("rmdir", 2), ("fsync", 5)]


def test_a_process_killed_at_any_point_leaves_no_half_artifact(tmp_path: Path) -> None:
    """Each process dies at another call; what stands afterwards is old, or new, or aside."""
    seen = {}
    for point, nth in POINTS:
        folder = tmp_path / f"{point}{nth}"
        folder.mkdir()
        old_artifact(folder / "out")
        manifest = json.dumps(ARTIFACT | {"source": "new"})
        command = [sys.executable, "-c", SUBPROCESS, folder / "out", point, str(nth), manifest]
        assert subprocess.run(command, cwd=ROOT, check=False).returncode == 9, (point, nth)
        if (folder / "out").exists():
            seen[point, nth] = content(folder / "out")
        else:
            (aside,) = folder.glob(".out.old.*")
            assert content(aside) == "old"
            seen[point, nth] = "aside"
    assert list(seen.values()) == ["old"] * 5 + ["aside"] + ["new"] * 3
