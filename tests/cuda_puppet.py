"""Drives a loaded CUDA artifact in the dry run, where no kernel writes anything.

"Device" memory is host memory there, so what a forward would leave in `result` and `length`
can be put in place without a CUDA call: every forward commits its rows, accepts `accepted`
drafts, and emits the token 7.
"""

from __future__ import annotations

import ctypes

import numpy as np

from runtime.decode import Decoder
from runtime.load import Loaded

TOKEN = 7


class Puppet:
    """A decoder whose forwards give what they must."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded
        self.accepted = 0
        self.length = 0
        self.interrupt: str | None = None
        self.lengths: list[int] = []
        for name, slot in loaded.slots.items():
            slot.run = self._running(name, slot.run)
        reset = loaded.buffers.reset

        def forget() -> None:
            reset()
            self.length = 0

        loaded.buffers.reset = forget
        self.decoder = Decoder(loaded)

    def _running(self, name, run):
        def wrapped(rows: int | None = None) -> None:
            if self.interrupt == name:
                self.interrupt = None
                raise KeyboardInterrupt
            run(rows)
            if name in ("draft", "catch_up"):
                return
            verifies = name.startswith("verify")
            accepted = self.accepted if verifies else 0
            self.length += (rows or 1) + accepted
            count = self.loaded.manifest.rows if verifies else 1
            values = [accepted, self.length, *[TOKEN] * count, *[1] * count]
            self.poke("result", np.array(values, np.int64))
            self.poke("length", np.array([self.length], np.int32))
            self.lengths.append(self.length)

        return wrapped

    def poke(self, name: str, values: np.ndarray) -> None:
        ctypes.memmove(self.loaded.buffers.address(name), values.ctypes.data, values.nbytes)
