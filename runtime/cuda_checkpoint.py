"""Copies of buffers on a GPU, to go back to."""

from __future__ import annotations

from collections.abc import Mapping

from runtime.cuda_driver import ON_DEVICE, CudaDriver
from runtime.errors import SlotError

__all__ = ["CudaCheckpoint"]


class CudaCheckpoint:
    """`Checkpoint` in the device's memory.

    Copies are queued on the driver's stream, so they come after the graphs before and before
    the graphs after, without any waiting.
    """

    def __init__(self, driver: CudaDriver, places: Mapping[str, tuple[int, int]]) -> None:
        """Copy what lies at `places`, address and bytes by name.

        Raises:
            DeviceError: The device has too little memory.
        """
        self._driver = driver
        self._copies: dict[str, tuple[int, int, int]] | None = {}
        try:
            for name, (address, size) in places.items():
                copy = driver.allocate(size, f"a copy of the buffer {name!r}")
                self._copies[name] = (copy, address, size)
                driver.copy(copy, address, size, ON_DEVICE)
        except BaseException:
            self.close()
            raise

    def restore(self) -> None:
        """Give the buffers those values again; may be repeated."""
        if self._copies is None:
            raise SlotError("the checkpoint is closed. Prefill from the start")
        for copy, address, size in self._copies.values():
            self._driver.copy(address, copy, size, ON_DEVICE)

    def close(self) -> None:
        """Give the memory back; a later `restore` raises `SlotError`."""
        copies, self._copies = self._copies or {}, None
        if copies:
            self._driver.synchronize()
        for copy, _, _ in copies.values():
            self._driver.free(copy)
