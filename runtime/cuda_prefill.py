"""The slot of a graph whose rows each run chooses: it runs node by node on the GPU.

ONNX Runtime leaves a few nodes of such a graph to the CPU (arithmetic on its sizes), and may
want an input there that lies on the device. It would copy such an input *when it is bound*
and never again, so a length that was bound once would stay what it was. The slot binds it to
page-locked memory of its own instead and refreshes that before each run.
"""

from __future__ import annotations

from artifacts import Graph, Port
from runtime.buffers import numpy_dtype
from runtime.cuda_buffers import CudaBuffers
from runtime.cuda_driver import TO_HOST, CudaDriver
from runtime.errors import LoadError
from runtime.session import Session
from runtime.slots import GraphSlot

__all__ = ["OpenCudaSlot"]

MAX_HOST_BYTES = 64
"""Lengths and the like; more would be data that belongs on the device."""


class OpenCudaSlot(GraphSlot):
    """A slot on CUDA that has nothing to capture."""

    def __init__(
        self,
        name: str,
        graph: Graph,
        session: Session,
        buffers: CudaBuffers,
        driver: CudaDriver,
    ) -> None:
        """Bind; raises `LoadError` where the graph wants more than lengths on the host."""
        self._driver = driver
        self._on_host: dict[Port, int] = {}
        super().__init__(name, graph, session, buffers)

    def close(self) -> None:
        """Let go of the graph; a later `run` raises `SlotError`."""
        super().close()
        while self._on_host:
            self._driver.free_pinned(self._on_host.popitem()[1])

    def _attach(self, session: Session) -> None:
        super()._attach(session)
        assert self._binding is not None
        for port in self._graph.inputs:
            if port.name not in session.host_inputs:
                continue
            first, last = port.span()
            size = (last - first) * numpy_dtype(port.dtype).itemsize
            if size > MAX_HOST_BYTES:
                raise LoadError(
                    f"ONNX Runtime wants the input {port.name!r} of the {self.name} graph in "
                    f"the host's memory, {size} bytes each run; at most {MAX_HOST_BYTES} are "
                    "copied there. Build the artifact again, for this release of it"
                )
            address = self._on_host[port] = self._driver.allocate_pinned(size)
            shape = tuple(n for n in port.shape if isinstance(n, int))
            self._binding.bind_input(port.name, port.dtype, shape, address, on_host=True)

    def _execute(self, session: Session) -> None:
        for port, address in self._on_host.items():
            item = numpy_dtype(port.dtype).itemsize
            first, last = port.span()
            source = self._addresses[port.buffer] + first * item
            self._driver.copy(address, source, (last - first) * item, TO_HOST)
        if self._on_host:
            self._driver.synchronize()
        super()._execute(session)
