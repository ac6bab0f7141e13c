"""A wheel holds the four rooms and nothing else, and nobody else owns them."""

import importlib.metadata
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = {"artifacts", "export", "passes", "runtime"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_the_four_rooms_and_the_demo_checkpoint(wheel):
    names = wheel.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == ROOMS
    assert "export/demo/tiny-hybrid-mtp/model.safetensors" in names
    for room in ROOMS:
        assert f"{room}/py.typed" in names
    assert not [name for name in names if "tests" in name or "__pycache__" in name]


def test_the_wheel_has_both_commands(wheel):
    (entry,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    scripts = wheel.read(entry).decode()
    assert "mtp-export = export.cli:main" in scripts
    assert "mtp-run = runtime.cli:main" in scripts


def test_no_other_distribution_owns_a_room():
    owners = importlib.metadata.packages_distributions()
    for room in ROOMS:
        assert set(owners.get(room, [])) <= {"onnx-mtp"}, f"{room} belongs to {owners[room]}"


def test_every_dependency_has_a_lower_bound():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    assert [name for name in wanted if ">=" not in name] == []
