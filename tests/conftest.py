"""One thread for NumPy's products: the oracle's are small, and idle threads spin."""

import os

import pytest

from runtime.errors import KernelError
from runtime.kernels.build import find_nvcc
from runtime.kernels.cache import kernel_library

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def kernel_home(tmp_path_factory):
    """A cache folder with the library of kernels in it, compiled once for all tests."""
    try:
        find_nvcc()
    except KernelError as e:
        pytest.skip(str(e))
    home = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(home))
        kernel_library()
    return home
