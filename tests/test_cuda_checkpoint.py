"""Copies on a device whose memory is this process's: what is copied, what is given back."""

import ctypes

import pytest

from runtime.cuda_checkpoint import CudaCheckpoint
from runtime.cuda_driver import ON_DEVICE
from runtime.errors import DeviceError, SlotError


class Device:
    """The calls of `CudaDriver` that a checkpoint makes."""

    def __init__(self, room: int = 1 << 20) -> None:
        self.room = room
        self.held: dict[int, ctypes.Array] = {}
        self.waits = 0

    def allocate(self, size: int, what: str) -> int:
        if size > self.room:
            raise DeviceError(f"{what} takes {size} bytes")
        self.room -= size
        memory = ctypes.create_string_buffer(size)
        self.held[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def free(self, address: int) -> None:
        self.room += len(self.held.pop(address))

    def copy(self, to: int, source: int, size: int, kind: int) -> None:
        assert kind == ON_DEVICE
        ctypes.memmove(to, source, size)

    def synchronize(self) -> None:
        self.waits += 1


def places(*buffers: ctypes.Array) -> dict[str, tuple[int, int]]:
    return {str(i): (ctypes.addressof(b), len(b)) for i, b in enumerate(buffers)}


def test_a_checkpoint_gives_back_what_was_there_as_often_as_wanted():
    device = Device()
    state, length = (
        ctypes.create_string_buffer(b"abcd", 4),
        ctypes.create_string_buffer(b"5", 1),
    )
    checkpoint = CudaCheckpoint(device, places(state, length))
    for other in (b"wxyz", b"1234"):
        state.raw, length.raw = other, b"9"
        checkpoint.restore()
        assert (state.raw, length.raw) == (b"abcd", b"5")
    assert device.waits == 0  # all on one stream: nothing to wait for


def test_closing_waits_and_leaves_no_memory_behind():
    device = Device(100)
    checkpoint = CudaCheckpoint(device, places(ctypes.create_string_buffer(60)))
    assert device.room == 40
    checkpoint.close()
    checkpoint.close()
    assert (device.room, device.held, device.waits) == (100, {}, 1)
    with pytest.raises(SlotError, match="checkpoint is closed"):
        checkpoint.restore()


def test_a_device_without_room_keeps_nothing_of_it():
    device = Device(100)
    with pytest.raises(DeviceError, match="a copy of the buffer '1' takes 60 bytes"):
        CudaCheckpoint(device, places(*(ctypes.create_string_buffer(60) for _ in "ab")))
    assert (device.room, device.held) == (100, {})
