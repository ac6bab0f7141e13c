"""Random weights in public sizes, so that speed can be measured where the real ones are not.

Tensors of equal shape, type and role have the same values and lie in the weight file once: a
27B artifact in four bits is written in seconds. A runner still gives each its own memory, so
what a step reads is real; what it says is not. The manifest names the source `synthetic`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir

from artifacts import LayerKind, ModelSpec, Source
from export.build import Model
from export.geometries import spec_of
from export.quantisers import MIN_ROWS
from passes.quantise import BLOCK, PackedMatrix
from passes.streamed import Array, StreamedTensor, rows_per_block

__all__ = ["pack_synthetic", "synthetic"]

FLOAT, BFLOAT16 = ir.DataType.FLOAT, ir.DataType.BFLOAT16


def synthetic(name: str) -> Model:
    """A model of a public size with random weights; raises `KeyError` for an unknown name."""
    spec = spec_of(name)
    return Model(
        spec=spec,
        weights={key: _weight(key, shape) for key, shape in shapes(spec).items()},
        source=Source(kind="synthetic", name=name, config_sha256="", left_out=()),
        eos_token_ids=(),
        files={},
        pack=pack_synthetic,
    )


def shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every canonical weight of a model and its shape."""
    d = spec.hidden_size
    found: dict[str, tuple[int, ...]] = {"embed": (spec.vocab_size, d), "norm": (d,)}
    if not spec.tied_embedding:
        found["lm_head"] = (spec.vocab_size, d)
    for i, kind in enumerate(spec.layers):
        mixer = _attention(spec) if kind is LayerKind.ATTENTION else _gdn(spec)
        found |= {f"layers.{i}.{n}": s for n, s in _layer(spec, mixer).items()}
    if spec.head is not None:
        found["head.fc"] = (d, 2 * d)
        found |= {f"head.{n}": (d,) for n in ("embed_norm", "hidden_norm", "norm")}
        layer = _layer(spec, _attention(spec))
        found |= {f"head.layers.0.{n}": s for n, s in layer.items()}
    return found


Shapes = Mapping[str, tuple[int, ...]]


def _layer(spec: ModelSpec, mixer: Shapes) -> dict[str, tuple[int, ...]]:
    d, inner = spec.hidden_size, spec.intermediate_size
    mlp = {"mlp.gate": (inner, d), "mlp.up": (inner, d), "mlp.down": (d, inner)}
    return {"input_norm": (d,), "post_norm": (d,), **mixer, **mlp}


def _attention(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    d, hd = spec.hidden_size, spec.attention.head_dim
    heads, kv = spec.attention.query_heads * hd, spec.attention.kv_heads * hd
    sizes = {"q": (heads, d), "gate": (heads, d), "k": (kv, d), "v": (kv, d), "o": (d, heads)}
    norms = {"q_norm": (hd,), "k_norm": (hd,)}
    return {f"attention.{n}": s for n, s in (sizes | norms).items()}


def _gdn(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    gdn, d = spec.gdn, spec.hidden_size
    assert gdn is not None
    sizes: dict[str, tuple[int, ...]] = {
        "qkv": (gdn.conv_dim, d),
        "z": (gdn.values_width, d),
        "b": (gdn.value_heads, d),
        "a": (gdn.value_heads, d),
        "conv": (gdn.conv_dim, 1, gdn.conv_kernel),
        "decay_scale": (gdn.value_heads,),
        "dt_bias": (gdn.value_heads,),
        "norm": (gdn.value_dim,),
        "out": (d, gdn.values_width),
    }
    return {f"gdn.{n}": s for n, s in sizes.items()}


QUIET = ("down", "o", "out")
"""Matrices that write into the stream: small, so that 64 layers of them stay in float16."""
QUIETNESS = 0.02
VOCABULARY = ("embed", "lm_head")
"""Made of the same four-bit numbers: a token's own logit then stands far above all others,
and kernels that round differently still choose the same tokens."""
DEVIATION = 4.3
"""Of four-bit values between -7 and 7."""


def _weight(name: str, shape: tuple[int, ...]) -> StreamedTensor:
    last = name.rpartition(".")[2]
    dtype = FLOAT if len(shape) == 1 else BFLOAT16

    def blocks() -> Iterator[Array]:
        if last in VOCABULARY:
            scale = 1 / DEVIATION if last == "embed" else shape[1] ** -0.5 / DEVIATION
            values = (scale * (np.arange(16) - 8)).astype(dtype.numpy())
            for nibbles in _nibbles("vocabulary", *shape):
                yield values[nibbles]
            return
        rng = np.random.default_rng(zlib.crc32(f"{last}{shape}".encode()))
        step = rows_per_block(shape, 4)
        for start in range(0, shape[0], step):
            size = (min(step, shape[0] - start), *shape[1:])
            yield _values(last, rng, size).astype(dtype.numpy())

    return StreamedTensor(
        blocks, dtype=dtype, shape=shape, name=name, shared_as=f"{last} {list(shape)}"
    )


def _values(last: str, rng: np.random.Generator, size: tuple[int, ...]) -> Array:
    if last == "decay_scale":
        return -np.exp(rng.uniform(-4, 2, size))
    if last == "dt_bias":
        return rng.standard_normal(size)
    if len(size) == 1:
        return 1 + 0.1 * rng.standard_normal(size)
    deviation = 0.3 if last == "conv" else _deviation(last, size[-1])
    return rng.standard_normal(size, np.float32) * np.float32(deviation)


def _deviation(last: str, width: int) -> float:
    """Of a matrix that keeps the size of what it reads, or writes little of it."""
    return float(width**-0.5) * (QUIETNESS if last in QUIET else 1)


def _nibbles(role: str, rows: int, width: int) -> Iterator[Array]:
    """Blocks of uint8 [n, width], each 1 .. 15; 8 stands for zero, so the mean is zero."""
    rng = np.random.default_rng(zlib.crc32(f"{role} {rows}x{width}".encode()))
    step = rows_per_block((rows, width), 1)
    for start in range(0, rows, step):
        yield rng.integers(1, 16, (min(step, rows - start), width), np.uint8)


def pack_synthetic(weight: StreamedTensor) -> PackedMatrix | None:
    """Random four-bit weights in the place of `weight`, of about its size."""
    rows, width = weight.shape.numpy()
    if rows < MIN_ROWS or width % BLOCK:
        return None
    blocks, dtype = width // BLOCK, weight.dtype
    name, last = weight.name or "", (weight.name or "").rpartition(".")[2]
    role = "vocabulary" if last in VOCABULARY else last
    deviation = 1.0 if last == "embed" else _deviation(last, width)

    def data() -> Iterator[Array]:
        for nibbles in _nibbles(role, rows, width):
            packed = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
            yield packed.reshape(len(nibbles), blocks, BLOCK // 2)

    def scales() -> Iterator[Array]:
        yield np.full((rows, blocks), deviation / DEVIATION).astype(dtype.numpy())

    key = f"q4 {last} {rows}x{width}"
    return PackedMatrix(
        StreamedTensor(
            data,
            dtype=ir.DataType.UINT8,
            shape=(rows, blocks, BLOCK // 2),
            name=f"{name}.q4",
            shared_as=key,
        ),
        StreamedTensor(
            scales,
            dtype=dtype,
            shape=(rows, blocks),
            name=f"{name}.q4.scales",
            shared_as=f"{key} {dtype.name}",
        ),
    )
