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


def _weight(name: str, shape: tuple[int, ...]) -> StreamedTensor:
    last = name.rpartition(".")[2]
    exact = len(shape) == 1
    dtype = FLOAT if exact else BFLOAT16
    deviation = 0.3 if last == "conv" else shape[-1] ** -0.5

    def values(rng: np.random.Generator, rows: int) -> Array:
        size = (rows, *shape[1:])
        if last == "decay_scale":
            return -np.exp(rng.uniform(-4, 2, size))
        if last == "dt_bias":
            return rng.standard_normal(size)
        if exact:
            return 1 + 0.1 * rng.standard_normal(size)
        return rng.standard_normal(size, np.float32) * np.float32(deviation)

    def blocks() -> Iterator[Array]:
        rng = np.random.default_rng(zlib.crc32(f"{last}{shape}".encode()))
        step = rows_per_block(shape, 4)
        for start in range(0, shape[0], step):
            yield values(rng, min(step, shape[0] - start)).astype(dtype.numpy())

    return StreamedTensor(
        blocks, dtype=dtype, shape=shape, name=name, shared_as=f"{last} {list(shape)}"
    )


def pack_synthetic(weight: StreamedTensor) -> PackedMatrix | None:
    """Random four-bit weights in the place of `weight`, of about its size."""
    rows, width = weight.shape.numpy()
    if rows < 128 or width % BLOCK:
        return None
    blocks, dtype = width // BLOCK, weight.dtype
    name, last = weight.name or "", (weight.name or "").rpartition(".")[2]

    def data() -> Iterator[Array]:
        rng = np.random.default_rng(zlib.crc32(f"{last}{rows}x{width}".encode()))
        step = rows_per_block((rows, width // 2), 1)
        for start in range(0, rows, step):
            size = (min(step, rows - start), blocks, BLOCK // 2)
            low, high = rng.integers(1, 16, (2, *size), np.uint8)  # 8 is zero: mean 0
            yield low | high << 4

    def scales() -> Iterator[Array]:
        # values -7 .. 7 deviate by 4.3
        yield np.full((rows, blocks), width**-0.5 / 4.3).astype(dtype.numpy())

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
