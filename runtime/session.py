"""The seam to ONNX Runtime: everything untyped stays in this module.

Why the session options are what they are:

- **No graph optimisation.** A build emits the fused operators itself and proves the order of
  reads and writes on the graph as it stands (outputs are bound onto inputs' buffers). An
  optimiser that moves or merges nodes could break that proof.
- **Prepacking by graph.** All graphs map the one weight file; a graph that prepacks keeps a
  private copy of its matrices instead. `runtime.load` says which graphs that is worth it for.
- **No spinning.** The graphs of an artifact run in turn, each with its own threads; those of
  the last graph would burn the cores that the next one needs. Measured with 0.73 GB of
  float32 weights on two cores: a verify of four rows takes 27 ms, spinning 49 ms.
- **No fallback.** A provider that cannot be had is an error, never another provider.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as native

from runtime.errors import LoadError, SlotError

__all__ = ["Binding", "Session", "SessionOptions", "Tensor", "require_provider"]

logger = logging.getLogger(__name__)

PROVIDERS = {"cpu": "CPUExecutionProvider"}
"""Provider of a manifest -> ONNX Runtime's name for it."""

ELEMENTS = {
    "float32": ("tensor(float)", 1),
    "uint8": ("tensor(uint8)", 2),
    "int8": ("tensor(int8)", 3),
    "int32": ("tensor(int32)", 6),
    "int64": ("tensor(int64)", 7),
    "bool": ("tensor(bool)", 9),
    "float16": ("tensor(float16)", 10),
    "bfloat16": ("tensor(bfloat16)", 16),
}
"""Our dtype -> ONNX Runtime's name of the type, and ONNX's number for it."""

DTYPES = {name: dtype for dtype, (name, _) in ELEMENTS.items()}

FAILURES: tuple[type[Exception], ...] = (
    native.EPFail,
    native.EngineError,
    native.Fail,
    native.InvalidArgument,
    native.InvalidGraph,
    native.InvalidProtobuf,
    native.ModelRequiresCompilation,
    native.NoModel,
    native.NoSuchFile,
    native.NotFound,
    native.NotImplemented,
    native.RuntimeException,
    RuntimeError,
    ValueError,
)
"""What ONNX Runtime raises; its own classes have no common base but `Exception`."""


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """What a caller may choose about sessions."""

    threads: int = 0
    """Threads of a graph; 0 takes as many as there are cores."""
    prepack: bool = False
    """Let the graph keep its own copy of the matrices in its kernels' favourite layout."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input or output as the ONNX file declares it."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    """A string is a size that a run chooses."""

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class Binding:
    """Inputs and outputs of one session, bound to addresses."""

    def __init__(self, session: Any, provider: str) -> None:
        self._binding = onnxruntime.IOBinding(session)
        self._device = provider

    def bind_input(self, name: str, dtype: str, shape: Sequence[int], address: int) -> None:
        """Let input `name` read at `address` at every later run."""
        number = ELEMENTS[dtype][1]
        self._binding.bind_input(name, self._device, 0, number, list(shape), address)

    def bind_output(self, name: str, dtype: str, shape: Sequence[int], address: int) -> None:
        """Let output `name` be written at `address` at every later run."""
        number = ELEMENTS[dtype][1]
        self._binding.bind_output(name, self._device, 0, number, list(shape), address)


class Session:
    """One ONNX graph, loaded on one provider."""

    def __init__(self, path: Path, provider: str, options: SessionOptions) -> None:
        native_name = require_provider(provider)
        self.name = path.stem
        self._provider = provider
        try:
            self._session = onnxruntime.InferenceSession(
                path,
                sess_options=_native_options(options),
                providers=[native_name],
                enable_fallback=0,
            )
        except FAILURES as e:
            raise LoadError(
                f"ONNX Runtime {onnxruntime.__version__} does not load {path.name}: "
                f"{_first_line(e)}. Build the artifact again, or see what is wrong with: "
                f"mtp-export check {path.parent.name}"
            ) from e
        found = self._session.get_providers()
        if found != [native_name]:
            raise LoadError(
                f"{path.name} was loaded on {', '.join(found)}, not on {native_name} "
                "alone. Install an onnxruntime that has this provider"
            )
        self.inputs = tuple(_declared(value) for value in self._session.get_inputs())
        self.outputs = tuple(_declared(value) for value in self._session.get_outputs())
        logger.debug("loaded %s on %s", path.name, provider)

    def binding(self) -> Binding:
        """A fresh binding, nothing bound yet."""
        return Binding(self._session, self._provider)

    def run(self, binding: Binding) -> None:
        """Run once; raises `SlotError` with ONNX Runtime's reason."""
        try:
            self._session.run_with_iobinding(binding._binding)
        except FAILURES as e:
            raise SlotError(
                f"the {self.name} graph failed: {_first_line(e)}. Start a new prompt; "
                "mtp-run check says whether the artifact is sound"
            ) from e


def require_provider(provider: str) -> str:
    """ONNX Runtime's name of a manifest's provider; raises `LoadError` if it cannot be had."""
    if provider not in PROVIDERS:
        raise LoadError(
            f"the artifact is built for the provider {provider!r}; this runner drives "
            f"{', '.join(PROVIDERS)}. Build it for one of these"
        )
    name = PROVIDERS[provider]
    if name not in onnxruntime.get_available_providers():
        raise LoadError(
            f"the artifact needs {name}, which this onnxruntime {onnxruntime.__version__} was "
            "built without. Install one that has it"
        )
    return name


def _native_options(options: SessionOptions) -> Any:
    native_options = onnxruntime.SessionOptions()
    native_options.graph_optimization_level = (
        onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    )
    native_options.intra_op_num_threads = options.threads
    native_options.log_severity_level = (
        4  # an error is raised, with its text; not also printed
    )
    for key, value in (
        ("session.disable_prepacking", "0" if options.prepack else "1"),
        ("session.intra_op.allow_spinning", "0"),
    ):
        native_options.add_session_config_entry(key, value)
    return native_options


def _declared(value: Any) -> Tensor:
    shape = tuple(size if isinstance(size, int) else str(size) for size in value.shape)
    return Tensor(value.name, DTYPES.get(value.type, value.type), shape)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
