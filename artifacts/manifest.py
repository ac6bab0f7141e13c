"""``manifest.json``: all that a runner needs to know of an artifact without loading ONNX.

A graph's inputs and outputs are *ports*. Each port names the *buffer* it is bound to for
life and the row at which it begins there. Ports that share a buffer are how graphs hand
values on (the draft graph's ids are the verify graph's), and how a graph updates a value in
place (``present.0.key`` onto ``past.0.key``): no value is copied between graphs.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from artifacts.fallback import DerivedTensor, Fallback
from artifacts.parse import Fields, ParseError, read_json
from artifacts.spec import ModelSpec

__all__ = [
    "GRAPHS",
    "MANIFEST",
    "SCHEMA",
    "Buffer",
    "Graph",
    "Manifest",
    "OPTIONAL_GRAPHS",
    "PassRecord",
    "Port",
    "SAMPLED_RANKS",
    "Source",
    "Target",
    "WeightTensor",
    "Weights",
    "overlaps",
]

SCHEMA = 1
"""Raised whenever a reader of the old form would misread the new one."""
MANIFEST = "manifest.json"
GRAPHS = ("prefill", "decode", "verify", "draft")
"""Graphs of an artifact with a head; without one, `verify` and `draft` are absent."""
OPTIONAL_GRAPHS = ("decode_sampled", "verify_sampled", "catch_up")
"""Graphs that may be there besides: decode and verify that sample, and the head alone over
rows that it has not seen. The last two need a head."""
SAMPLED_RANKS = 256
"""Likeliest tokens that sampling chooses from (all, where the vocabulary is smaller)."""

DTYPES = ("float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool")


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory that lives as long as the runner: allocated once, its address fixed."""

    dtype: str
    shape: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {"dtype": self.dtype, "shape": list(self.shape)}

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        """Read from parsed JSON; raises `ParseError` that names the key."""
        return cls(fields.one_of("dtype", DTYPES), fields.integers("shape"))


@dataclass(frozen=True, slots=True)
class Port:
    """One input or output of a graph and the buffer it is bound to.

    The port covers its own shape from `offset` on: ``[1, 1]`` at the start of a buffer of
    ``[1, M]`` is the first row.
    """

    name: str
    """Name in the graph."""
    buffer: str
    dtype: str
    shape: tuple[int | str, ...]
    """A string is a size chosen at each run (``S`` of the prefill)."""
    offset: int = 0
    """Elements of the buffer before the port's first one."""
    view: bool = False
    """An input that shows what this very run's outputs write to the same memory: all its
    readers come after the writers. Other inputs are read before anything is written there."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "name": self.name,
            "buffer": self.buffer,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "offset": self.offset,
            "view": self.view,
        }

    def span(self) -> tuple[int, int]:
        """First and last element (exclusive) in the buffer; open sizes reach to its end."""
        if any(isinstance(size, str) for size in self.shape):
            return self.offset, 2**62
        return self.offset, self.offset + math.prod(
            n for n in self.shape if isinstance(n, int)
        )

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        """Read from parsed JSON; raises `ParseError` that names the key."""
        shape = fields.sizes("shape")
        return cls(
            fields.text("name"),
            fields.text("buffer"),
            fields.one_of("dtype", DTYPES),
            shape,
            fields.integer("offset", default=0),
            fields.boolean("view", default=False),
        )


def overlaps(
    inputs: tuple[Port, ...], outputs: tuple[Port, ...]
) -> tuple[tuple[Port, Port], ...]:
    """Pairs of an output and an input that share memory."""
    return tuple(
        (output, port)
        for output in outputs
        for port in inputs
        if output.buffer == port.buffer
        and output.span()[0] < port.span()[1]
        and port.span()[0] < output.span()[1]
    )


@dataclass(frozen=True, slots=True)
class PassRecord:
    """A pass that made a graph: its name and how many places it changed."""

    name: str
    changes: int

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {"name": self.name, "changes": self.changes}

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        """Read from parsed JSON; raises `ParseError` that names the key."""
        return cls(fields.text("name"), fields.integer("changes"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """One ONNX file of the artifact."""

    file: str
    """Beside the manifest."""
    sha256: str
    rows: int | None
    """Rows of a forward; None where a run chooses (prefill)."""
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    passes: tuple[PassRecord, ...]
    weights: tuple[str, ...] = ()
    """Names of the tensors of the weight file that the graph reads."""
    fallback: Fallback | None = None
    """The same in stock operators, where this one has others."""

    def in_stock(self) -> Graph:
        """The graph as it runs in stock operators; itself where it has no others."""
        if self.fallback is None:
            return self
        other = self.fallback
        return dataclasses.replace(
            self, file=other.file, sha256=other.sha256, weights=other.weights, fallback=None
        )

    def aliases(self) -> tuple[tuple[Port, Port], ...]:
        """Pairs of an output and an input that share memory."""
        return overlaps(self.inputs, self.outputs)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "file": self.file,
            "sha256": self.sha256,
            "rows": self.rows,
            "inputs": [port.to_json() for port in self.inputs],
            "outputs": [port.to_json() for port in self.outputs],
            "passes": [record.to_json() for record in self.passes],
            "weights": list(self.weights),
            **({"fallback": self.fallback.to_json()} if self.fallback else {}),
        }

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        """Read from parsed JSON; raises `ParseError` that names the key."""
        fallback = fields.optional_object("fallback")
        rows = fields.integer("rows", default=0)
        return cls(
            file=fields.file_name("file"),
            sha256=fields.text("sha256"),
            rows=rows or None,
            inputs=tuple(Port.parse(port) for port in fields.objects("inputs")),
            outputs=tuple(Port.parse(port) for port in fields.objects("outputs")),
            passes=tuple(PassRecord.parse(record) for record in fields.objects("passes")),
            weights=fields.texts("weights") if "weights" in fields else (),
            fallback=None if fallback is None else Fallback.parse(fallback),
        )


@dataclass(frozen=True, slots=True)
class WeightTensor:
    """Where one weight lies in the weight file; the file's own header says the same."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file."""
    length: int
    """Bytes."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "dtype": self.dtype,
            "shape": list(self.shape),
            "offset": self.offset,
            "length": self.length,
        }

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        """Read from parsed JSON; raises `ParseError` that names the key."""
        return cls(
            fields.one_of("dtype", DTYPES),
            fields.integers("shape"),
            fields.integer("offset"),
            fields.integer("length"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The one weight file that all graphs of an artifact share."""

    file: str
    size: int
    """Bytes."""
    sha256: str
    tensors: dict[str, WeightTensor]
    derived: dict[str, DerivedTensor] = field(default_factory=dict)
    """Weights of fallback graphs that are unpacked from one of `tensors`."""

    def length(self, name: str) -> int:
        """Bytes of a weight on the device, wherever it comes from."""
        return (self.derived.get(name) or self.tensors[name]).length

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        derived = {name: tensor.to_json() for name, tensor in self.derived.items()}
        return {
            "file": self.file,
            "size": self.size,
            "sha256": self.sha256,
            "tensors": {name: tensor.to_json() for name, tensor in self.tensors.items()},
            **({"derived": derived} if derived else {}),
        }

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        """Read from parsed JSON; raises `ParseError` that names the key."""
        tensors = fields.named_objects("tensors")
        derived = fields.named_objects("derived") if "derived" in fields else {}
        return cls(
            file=fields.file_name("file"),
            size=fields.integer("size"),
            sha256=fields.text("sha256"),
            tensors={name: WeightTensor.parse(tensor) for name, tensor in tensors.items()},
            derived={name: DerivedTensor.parse(tensor) for name, tensor in derived.items()},
        )


@dataclass(frozen=True, slots=True)
class Target:
    """What the graphs were lowered for."""

    provider: str
    """``cpu`` or ``cuda``."""
    dtype: str
    """Of activations and caches; the recurrent state is float32 everywhere."""
    weights: str = "dense"
    """``dense``: matrices in `dtype`; ``int4``: four bits, 32 weights a scale."""
    kernels: str = "stock"
    """``stock``: ONNX Runtime's own; ``own``: with this project's library of operators."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "provider": self.provider,
            "dtype": self.dtype,
            "weights": self.weights,
            "kernels": self.kernels,
        }

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        """Read from parsed JSON; raises `ParseError` that names the key."""
        return cls(
            fields.one_of("provider", ("cpu", "cuda")),
            fields.one_of("dtype", ("float32", "float16", "bfloat16")),
            fields.one_of("weights", ("dense", "int4")) if "weights" in fields else "dense",
            fields.one_of("kernels", ("stock", "own")) if "kernels" in fields else "stock",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the weights came from."""

    kind: str
    """``checkpoint``, ``bundle`` or ``synthetic``."""
    name: str
    """Folder name of the source, for people; never a path."""
    config_sha256: str
    """Of its config file; empty where it has none."""
    left_out: tuple[str, ...]
    """Tensors of the source that were left out on purpose, such as the vision tower's."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "kind": self.kind,
            "name": self.name,
            "config_sha256": self.config_sha256,
            "left_out": list(self.left_out),
        }

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        """Read from parsed JSON; raises `ParseError` that names the key."""
        return cls(
            kind=fields.one_of("kind", ("checkpoint", "bundle", "synthetic")),
            name=fields.text("name"),
            config_sha256=fields.text("config_sha256"),
            left_out=fields.texts("left_out"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """An artifact, described."""

    producer: str
    """``onnx-mtp`` and its version."""
    spec: ModelSpec
    target: Target
    k: int
    """Drafted tokens a step; 0 where the source has no head."""
    capacity: int
    """Tokens a sequence may hold, prompt included."""
    cache_rows: int
    """C: rows of every cache in memory: `capacity` and room for a verify's padding rows."""
    prefill_rows: int
    """Most rows of one prefill chunk."""
    eos_token_ids: tuple[int, ...]
    buffers: dict[str, Buffer]
    graphs: dict[str, Graph]
    weights: Weights
    files: dict[str, str]
    """Other files of the artifact (tokenizer, chat template): name -> sha256."""
    source: Source

    @property
    def rows(self) -> int:
        """M, the rows of the verify graph."""
        return self.k + 1

    @property
    def sampled_ranks(self) -> int:
        """Tokens that a row samples from."""
        return min(SAMPLED_RANKS, self.spec.vocab_size)

    @property
    def samples(self) -> bool:
        """Whether the graphs that sample are there."""
        return "decode_sampled" in self.graphs

    @property
    def graph_rows(self) -> dict[str, int | None]:
        """Rows of each graph that this artifact may have; None where a run chooses."""
        found: dict[str, int | None] = {"prefill": None, "decode": 1, "decode_sampled": 1}
        if self.k:
            found |= dict.fromkeys(("verify", "draft", "verify_sampled"), self.rows)
            found["catch_up"] = None
        return found

    @property
    def has_fallback(self) -> bool:
        """Whether it can run in stock operators although it was built with others."""
        return all(graph.fallback is not None for graph in self.graphs.values())

    def in_stock(self) -> Manifest:
        """The artifact as it runs where this project's kernels are not to be had."""
        graphs = {name: graph.in_stock() for name, graph in self.graphs.items()}
        target = dataclasses.replace(self.target, kernels="stock")
        return dataclasses.replace(self, graphs=graphs, target=target)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values, the inverse of `parse`."""
        return {
            "schema": SCHEMA,
            "producer": self.producer,
            "spec": self.spec.to_json(),
            "target": self.target.to_json(),
            "k": self.k,
            "capacity": self.capacity,
            "cache_rows": self.cache_rows,
            "prefill_rows": self.prefill_rows,
            "eos_token_ids": list(self.eos_token_ids),
            "buffers": {name: buffer.to_json() for name, buffer in self.buffers.items()},
            "graphs": {name: graph.to_json() for name, graph in self.graphs.items()},
            "weights": self.weights.to_json(),
            "files": self.files,
            "source": self.source.to_json(),
        }

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        """Read from parsed JSON; raises `ParseError` that names the key."""
        schema = fields.integer("schema")
        if schema != SCHEMA:
            raise fields.refuse(
                "schema", f"{SCHEMA}. Build the artifact again with this version of mtp-export"
            )
        files = fields.object("files")
        return cls(
            producer=fields.text("producer"),
            spec=ModelSpec.parse(fields.object("spec")),
            target=Target.parse(fields.object("target")),
            k=fields.integer("k", maximum=64),
            capacity=fields.integer("capacity", minimum=1),
            cache_rows=fields.integer("cache_rows", minimum=1),
            prefill_rows=fields.integer("prefill_rows", minimum=1),
            eos_token_ids=fields.integers("eos_token_ids"),
            buffers={n: Buffer.parse(b) for n, b in fields.named_objects("buffers").items()},
            graphs={n: Graph.parse(g) for n, g in fields.named_objects("graphs").items()},
            weights=Weights.parse(fields.object("weights")),
            files={name: files.text(name) for name in files},
            source=Source.parse(fields.object("source")),
        )

    def write(self, folder: Path) -> None:
        """Write ``manifest.json`` into `folder`."""
        text = json.dumps(self.to_json(), indent=1, ensure_ascii=False)
        (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read ``manifest.json`` of `folder`; raises `ParseError` that names what is wrong."""
        if not (folder / MANIFEST).is_file():
            raise ParseError(
                f"{folder} is no artifact: it holds no {MANIFEST}. "
                "Make one with: mtp-export build CHECKPOINT -o DIR"
            )
        return cls.parse(read_json(folder / MANIFEST))
