"""Builds the library with `onnx_mtp::MatMulW4`; nothing else of onnx-mtp needs it.

    python -m runtime.kernels.build OUT

Load it with ``SessionOptions.register_custom_ops_library(OUT / LIBRARY)``.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from runtime.errors import KernelError

__all__ = ["LIBRARY", "build_library", "find_nvcc", "main"]

LIBRARY = "libonnx_mtp_kernels.so"
SOURCE = "library.cu"
CUDA_MAJOR = 13
"""The library shares CUDA's runtime with onnxruntime-gpu 1.31, which is built for this one."""
CANDIDATES = ("/usr/local/cuda/bin/nvcc", f"/usr/local/cuda-{CUDA_MAJOR}/bin/nvcc")
FLAGS = (
    "-std=c++17",
    "-O3",
    "-shared",
    "-cudart=shared",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
    # sm_90a alone: the ring relies on Hopper's bulk copies, and PTX would not widen that
    "-gencode=arch=compute_90a,code=sm_90a",
)


def find_nvcc() -> Path:
    """CUDA's compiler: on the PATH, else where CUDA installs itself.

    Raises:
        KernelError: There is none, or it is not of CUDA 13.
    """
    found = shutil.which("nvcc") or next((c for c in CANDIDATES if Path(c).is_file()), None)
    if found is None:
        raise KernelError(
            "nvcc was not found on the PATH or in /usr/local/cuda: install CUDA "
            f"{CUDA_MAJOR}'s compiler, or use artifacts with stock matrices, which need none"
        )
    said = _run([found, "--version"])
    release = re.search(r"release (\d+)\.", said)
    if release is None or int(release[1]) != CUDA_MAJOR:
        version = f"CUDA {release[1]}" if release else "an unknown CUDA"
        raise KernelError(
            f"{found} is of {version}, onnxruntime-gpu 1.31 runs on CUDA {CUDA_MAJOR}: "
            "put that version's nvcc first on the PATH"
        )
    return Path(found)


def build_library(out: Path) -> Path:
    """Compile the library into folder `out`; returns its path.

    Raises:
        KernelError: No fitting nvcc, or it refused the sources.
    """
    nvcc, sources = find_nvcc(), Path(__file__).parent
    library, part = out / LIBRARY, out / f"{LIBRARY}.{os.getpid()}"
    try:
        out.mkdir(parents=True, exist_ok=True)
        _run([str(nvcc), *FLAGS, f"-I{sources}", "-o", str(part), str(sources / SOURCE)])
        os.replace(part, library)  # whole or not at all, whoever else builds it
    except OSError as e:
        raise KernelError(
            f"{library} cannot be written: {e.strerror or e}. Make room there, or name "
            "another folder in XDG_CACHE_HOME"
        ) from e
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
    return library


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise KernelError(f"{command[0]} cannot be run ({error}): reinstall CUDA") from error
    if done.returncode != 0:
        tail = (done.stderr or done.stdout).strip()[-2000:]
        raise KernelError(f"{command[0]} ended with {done.returncode}: {tail}")
    return done.stdout


def main() -> None:
    """Build into the folder named on the command line."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m runtime.kernels.build OUT")
    try:
        library = build_library(Path(sys.argv[1]))
    except KernelError as error:
        raise SystemExit(f"error: {error}") from error
    sys.stdout.write(f"{library}\n")


if __name__ == "__main__":
    main()
