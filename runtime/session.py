"""The seam to ONNX Runtime: everything untyped stays here and in `runtime.binding`.

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
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as native

from runtime.binding import HOST_MEMORY, Binding, Tensor, declared
from runtime.errors import KernelError, LoadError, SlotError

__all__ = [
    "Binding",
    "Placement",
    "Session",
    "SessionOptions",
    "Tensor",
    "first_line",
    "require_library",
    "require_provider",
]

logger = logging.getLogger(__name__)

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
"""Provider of a manifest -> ONNX Runtime's name for it."""
INSTALL = {"cuda": 'pip install "onnxruntime-gpu>=1.31"'}
"""Provider of a manifest -> how to get an ONNX Runtime that has it."""

HOST = PROVIDERS["cpu"]
"""Always there besides another provider."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What a session needs on its provider."""

    options: Mapping[str, str] = field(default_factory=dict)
    """Of the provider."""
    initializers: Mapping[str, Any] = field(default_factory=dict)
    """Weights that are on the device already: name -> ``onnxruntime.OrtValue``."""
    run: Mapping[str, str] = field(default_factory=dict)
    """Configuration of every run."""
    eager: Mapping[str, str] = field(default_factory=dict)
    """What differs in a run that neither captures nor replays."""
    libraries: tuple[Path, ...] = ()
    """Of operators that are not ONNX Runtime's own."""


class Session:
    """One ONNX graph, loaded on one provider."""

    def __init__(
        self,
        path: Path,
        provider: str,
        options: SessionOptions,
        placement: Placement | None = None,
        hint: str = "",
    ) -> None:
        """Load a graph.

        Args:
            path: The ONNX file.
            provider: As a manifest names it.
            options: What a caller may choose.
            placement: What the provider needs; nothing where None.
            hint: How to install what the provider needs besides ONNX Runtime.

        Raises:
            LoadError: The provider is missing or refuses the graph; ONNX Runtime's own error
                is its cause.
        """
        placement = placement or Placement()
        wanted = require_provider(provider)
        self.name = path.stem
        self._provider = provider
        self._run = _run_options(placement.run)
        self._eager = _run_options({**placement.run, **placement.eager})
        native_options = _native_options(options)
        for name, value in placement.initializers.items():
            native_options.add_initializer(name, value)
        try:
            for library in placement.libraries:
                native_options.register_custom_ops_library(str(library))
            self._session = onnxruntime.InferenceSession(
                path,
                sess_options=native_options,
                providers=[(wanted, dict(placement.options))],
                enable_fallback=0,
            )
        except FAILURES as e:
            raise LoadError(
                f"ONNX Runtime {onnxruntime.__version__} does not load {path.name}: "
                f"{first_line(e)}. Build the artifact again, or see what is wrong with: "
                f"mtp-export check {path.parent.name}"
            ) from e
        found = self._session.get_providers()
        if found != list(dict.fromkeys((wanted, HOST))):
            raise LoadError(
                f"{path.name} was loaded on {', '.join(found)}, not on {wanted} alone: ONNX "
                "Runtime could not start that provider. Check that its libraries and drivers "
                f"are installed{hint and ': ' + hint}"
            )
        self.inputs = tuple(declared(value) for value in self._session.get_inputs())
        self.outputs = tuple(declared(value) for value in self._session.get_outputs())
        memory = zip(self.inputs, self._session.get_input_memory_infos(), strict=True)
        self.host_inputs = frozenset(t.name for t, info in memory if info.name == HOST_MEMORY)
        """Inputs that ONNX Runtime reads in the host's memory."""
        logger.debug("loaded %s on %s", path.name, provider)

    def binding(self) -> Binding:
        """A fresh binding, nothing bound yet."""
        return Binding(self._session, self._provider)

    def on_host(self) -> tuple[str, ...]:
        """Operators that a session of another provider left to the CPU, each once."""
        if PROVIDERS[self._provider] == HOST:
            return ()
        parts = self._session.get_provider_graph_assignment_info()
        nodes = [node for part in parts if part.ep_name == HOST for node in part.get_nodes()]
        return tuple(sorted({str(node.op_type) for node in nodes}))

    def run(self, binding: Binding, *, eager: bool = False) -> None:
        """Run once, node by node if `eager`; raises `SlotError` with ONNX Runtime's reason."""
        try:
            self._session.run_with_iobinding(
                binding._binding, self._eager if eager else self._run
            )
        except FAILURES as e:
            raise SlotError(
                f"the {self.name} graph failed: {first_line(e)}. Start a new prompt; "
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
            + (f": {INSTALL[provider]}" if provider in INSTALL else "")
        )
    return name


def require_library(path: Path) -> None:
    """Let ONNX Runtime load a library of operators; raises `KernelError` where it cannot."""
    try:
        onnxruntime.SessionOptions().register_custom_ops_library(str(path))
    except FAILURES as e:
        raise KernelError(
            f"ONNX Runtime {onnxruntime.__version__} does not load {path.name}: "
            f"{first_line(e)}. Remove {path.parent.name} from the cache to compile it anew"
        ) from e


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
        ("session.record_ep_graph_assignment_info", "1"),  # for `on_host`
    ):
        native_options.add_session_config_entry(key, value)
    return native_options


def _run_options(entries: Mapping[str, str]) -> Any:
    made = onnxruntime.RunOptions()
    for key, value in entries.items():
        made.add_run_config_entry(key, value)
    return made


def first_line(error: BaseException) -> str:
    """What an error of ONNX Runtime says, as part of a sentence."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
