"""Building the kernels, with a stand-in for nvcc: no CUDA is needed to test it."""

import subprocess
import sys
from pathlib import Path

import pytest

from runtime.errors import KernelError
from runtime.kernels import build

ROOT = Path(__file__).parent.parent


@pytest.fixture
def nvcc(tmp_path, monkeypatch):
    """Puts a script first on the PATH that answers as nvcc would, and keeps its arguments."""

    def install(release="13.0", status=0, message=""):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        script = folder / "nvcc"
        script.write_text(
            "#!/bin/sh\n"
            f'if [ "$1" = --version ]; then echo "tools, release {release}, V"; exit 0; fi\n'
            f'for a in "$@"; do echo "$a" >> "{tmp_path}/arguments"; done\n'
            'while [ "$1" != -o ]; do shift; done; : > "$2"\n'
            f'echo "{message}" >&2; exit {status}\n'
        )
        script.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder), prepend=":")

    return install


def test_without_nvcc_the_message_says_what_is_missing_and_that_it_is_not_needed(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build, "CANDIDATES", ())
    with pytest.raises(KernelError, match=r"nvcc was not found.*stock matrices"):
        build.build_library(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_cuda_is_refused_before_it_compiles(nvcc, tmp_path):
    nvcc(release="12.8")
    with pytest.raises(KernelError, match=r"CUDA 12.*runs on CUDA 13"):
        build.build_library(tmp_path / "out")
    assert not (tmp_path / "arguments").exists()


def test_the_library_is_compiled_for_hopper_from_the_shipped_sources(nvcc, tmp_path):
    nvcc()
    library = build.build_library(tmp_path / "out")
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert library == tmp_path / "out" / build.LIBRARY
    assert library.is_file()
    assert "-gencode=arch=compute_90a,code=sm_90a" in arguments
    # compiled beside its place and renamed: nobody loads half a library
    assert arguments[arguments.index("-o") + 1].startswith(f"{library}.")
    assert Path(arguments[-1]).is_file()


def test_a_refusal_of_the_compiler_is_passed_on(nvcc, tmp_path):
    nvcc(status=2, message="matmul_w4.cuh(7): error")
    with pytest.raises(KernelError, match=r"ended with 2: matmul_w4.cuh\(7\): error"):
        build.build_library(tmp_path / "out")


def test_the_command_ends_with_one_clear_line_where_there_is_no_nvcc(tmp_path):
    code = "from runtime.kernels import build; build.CANDIDATES = (); build.main()"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "out")],
        env={"PATH": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: nvcc was not found") and done.stderr.count("\n") == 1


def test_a_cache_that_cannot_be_written_is_an_error_of_its_own(nvcc, tmp_path):
    nvcc()
    (tmp_path / "file").write_text("")
    with pytest.raises(KernelError, match=r"cannot be written.*XDG_CACHE_HOME"):
        build.build_library(tmp_path / "file" / "out")


def test_a_refusal_leaves_nothing_behind(nvcc, tmp_path):
    nvcc(status=2)
    with pytest.raises(KernelError, match="ended with 2"):
        build.build_library(tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
