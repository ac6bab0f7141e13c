"""What a machine without CUDA is told. All else of CUDA: test_cuda_runtime.py."""

import ctypes
import os

import pytest
from counting_artifact import Counting
from test_load import edit

from runtime import cuda_dlpack, cuda_driver
from runtime.cuda_driver import CudaDriver
from runtime.environment import apply_settings
from runtime.errors import DeviceError, LoadError
from runtime.load import load


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Said to be for CUDA; its states lie as on the CPU, which is looked at before."""
    made = Counting().write(tmp_path)
    edit(made, "target", "provider", "cuda")
    monkeypatch.setattr("runtime.load.check_manifest", lambda manifest: None)
    return made


def test_missing_libraries_are_named_with_the_line_that_installs_them(monkeypatch, folder):
    monkeypatch.setattr(cuda_driver, "LIBRARIES", ("libno_such_cuda.so.13",))
    with pytest.raises(
        DeviceError, match=r"libno_such_cuda.so.13 are not .* pip install .*nvidia-cublas"
    ):
        load(folder)


def test_an_onnxruntime_without_cuda_is_named_with_the_line_that_installs_it(
    monkeypatch, folder
):
    monkeypatch.setattr(
        "onnxruntime.get_available_providers", lambda: ["CPUExecutionProvider"]
    )
    with pytest.raises(LoadError, match=r"needs CUDAExecutionProvider.*onnxruntime-gpu"):
        load(folder)


class NoDevice:
    """A runtime library without a GPU, or with one that fails."""

    def __init__(self, code: int, count: int = 0) -> None:
        self.code, self.count = code, count

    def cudaGetDeviceCount(self, out) -> int:
        ctypes.cast(out, ctypes.POINTER(ctypes.c_int))[0] = self.count
        return self.code

    def cudaSetDevice(self, number: int) -> int:
        return 999

    def cudaGetLastError(self) -> int:
        return 0

    def cudaGetErrorString(self, code: int) -> bytes:
        return b"no CUDA-capable device is detected"


@pytest.mark.parametrize(
    ("library", "message"),
    [
        (NoDevice(100), "finds no GPU: CUDA error 100, no CUDA-capable device.*--target cpu"),
        (NoDevice(0), "finds no GPU: none is visible. Check nvidia-smi"),
        (NoDevice(0, 1), "cudaSetDevice failed: CUDA error 999"),
    ],
)
def test_a_machine_without_a_gpu_is_told_so(monkeypatch, library, message):
    monkeypatch.setattr(cuda_driver, "_load_libraries", lambda: library)
    monkeypatch.setattr(cuda_driver, "_declare", lambda runtime: None)
    with pytest.raises(DeviceError, match=message):
        CudaDriver()


def test_libraries_are_looked_for_in_packages_too(monkeypatch, tmp_path):
    name = "libno_such_cuda.so.13"
    place = tmp_path / "nvidia" / "cu13" / "lib" / name
    place.parent.mkdir(parents=True)
    place.touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert list(cuda_driver._places(name)) == [name, str(place)]


def test_every_dtype_of_a_manifest_has_a_dlpack_code():
    from artifacts.manifest import DTYPES

    assert set(cuda_dlpack.ELEMENT_CODES) == set(DTYPES)


def test_settings_are_set_unless_the_user_set_them(monkeypatch, caplog):
    monkeypatch.setenv("MTP_TEST_MINE", "0")
    monkeypatch.delenv("MTP_TEST_OURS", raising=False)
    apply_settings((("MTP_TEST_OURS", "1"), ("MTP_TEST_MINE", "1")))
    assert (os.environ["MTP_TEST_OURS"], os.environ["MTP_TEST_MINE"]) == ("1", "0")
    assert caplog.messages == [
        "MTP_TEST_MINE is '0' in the environment, where '1' is expected; kernels may be "
        "slower or differ"
    ]
    monkeypatch.delenv("MTP_TEST_OURS")
