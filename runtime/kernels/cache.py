"""The built library: found in the user's cache, or compiled into it once."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from runtime.kernels.build import FLAGS, LIBRARY, SOURCE, build_library

__all__ = ["kernel_library", "library_folder"]


def library_folder() -> Path:
    """Where the library of these sources lies, or will: their digest is part of the name."""
    digest = hashlib.sha256(" ".join((SOURCE, *FLAGS)).encode())
    here = Path(__file__).parent
    for path in sorted((*here.glob("*.cu"), *here.glob("*.cuh"), *here.glob("*.h"))):
        digest.update(path.read_bytes())
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "onnx-mtp" / f"kernels-{digest.hexdigest()[:16]}"


def kernel_library(progress: Callable[[str], None] = lambda _: None) -> Path:
    """Path of the library, compiled now if it has not been yet.

    Raises:
        KernelError: It is not there, and there is no nvcc to compile it.
    """
    folder = library_folder()
    if not (folder / LIBRARY).is_file():
        progress("compiling kernels (once)")
        build_library(folder)
    return folder / LIBRARY
