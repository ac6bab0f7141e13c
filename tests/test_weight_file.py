"""The weight file: its layout, its readers, and what it refuses."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from safetensors import deserialize, safe_open
from safetensors.numpy import load

from artifacts import WeightTensor
from artifacts.weight_header import read_header
from export import weight_file
from export.errors import ExportError
from export.weight_file import plan, write_weights
from passes.streamed import StreamedTensor, from_array

RANDOM = np.random.default_rng(7)
ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    "odd": RANDOM.integers(0, 255, 7).astype(np.uint8),
    "norm": RANDOM.standard_normal(12).astype(np.float32),
    "matrix": RANDOM.standard_normal((64, 32)).astype(np.float32),
    "half": RANDOM.standard_normal((3, 5)).astype(np.float16),
    "brain": RANDOM.standard_normal((5, 3)).astype(ml_dtypes.bfloat16),
    "flags": np.array([True, False, True]),
    "ids": RANDOM.integers(-9, 9, (2, 2)),
    "bytes": RANDOM.integers(-9, 9, 5).astype(np.int8),
    "counts": RANDOM.integers(-9, 9, 3).astype(np.int32),
    "empty": np.zeros((0, 4), np.float32),
    "large": RANDOM.standard_normal((64, 64)).astype(np.float32),
}


def streamed(arrays: dict[str, np.ndarray[Any, Any]]) -> dict[str, StreamedTensor]:
    return {name: from_array(array, name) for name, array in arrays.items()}


def test_every_dtype_comes_back_bit_for_bit_through_safetensors(tmp_path: Path) -> None:
    write_weights(tmp_path / "w.safetensors", streamed(ARRAYS))
    read = dict(deserialize((tmp_path / "w.safetensors").read_bytes()))
    assert read.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert tuple(read[name]["shape"]) == array.shape
        assert bytes(read[name]["data"]) == array.tobytes(), name


def test_safe_open_takes_single_tensors_from_the_file(tmp_path: Path) -> None:
    write_weights(tmp_path / "w.safetensors", streamed(ARRAYS))
    with safe_open(tmp_path / "w.safetensors", framework="numpy") as file:
        assert set(file.keys()) == set(ARRAYS)
        np.testing.assert_array_equal(file.get_tensor("matrix"), ARRAYS["matrix"])


def test_data_begins_at_a_page_and_has_no_holes(tmp_path: Path) -> None:
    header, placed = plan(streamed(ARRAYS))
    assert len(header) % 4096 == 0
    end = len(header)
    for tensor in placed.values():
        assert tensor.offset == end
        end += tensor.length
    weights = write_weights(tmp_path / "w.safetensors", streamed(ARRAYS))
    assert weights.size == end == (tmp_path / "w.safetensors").stat().st_size
    assert weights.tensors == placed


def test_aligned_and_large_tensors_come_first_and_odd_ones_last() -> None:
    names = list(plan(streamed(ARRAYS))[1])
    assert names == [
        "large", "matrix", "ids", "norm", "counts", "half", "brain",
        "odd", "bytes", "flags", "empty",
    ]  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5000)), max_size=12))
@settings(max_examples=60, deadline=None)
def test_each_tensor_begins_at_a_multiple_of_its_item(kinds: list[tuple[int, int]]) -> None:
    dtypes = [np.int64, np.float32, np.float16, np.uint8]
    arrays = {f"t{i}": np.zeros(n, dtypes[kind]) for i, (kind, n) in enumerate(kinds)}
    for name, tensor in plan(streamed(arrays))[1].items():
        assert tensor.offset % arrays[name].itemsize == 0 or tensor.length == 0


def test_digest_and_description_are_those_of_the_file(tmp_path: Path) -> None:
    weights = write_weights(tmp_path / "w.safetensors", streamed(ARRAYS))
    data = (tmp_path / "w.safetensors").read_bytes()
    assert weights.file == "w.safetensors"
    assert weights.sha256 == hashlib.sha256(data).hexdigest()
    matrix = weights.tensors["matrix"]
    assert matrix == WeightTensor("float32", (64, 32), matrix.offset, 64 * 32 * 4)
    found = np.frombuffer(data, np.float32, 64 * 32, matrix.offset).reshape(64, 32)
    np.testing.assert_array_equal(found, ARRAYS["matrix"])
    with (tmp_path / "w.safetensors").open("rb") as file:
        assert read_header(file, len(data), "w.safetensors") == (4096, weights.tensors)


def test_progress_rises_to_the_size_of_the_file(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    weights = write_weights(
        tmp_path / "w.safetensors",
        streamed(ARRAYS),
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == sorted(seen)
    assert {total for _, total in seen} == {weights.size}
    assert seen[-1][0] == weights.size


def test_tensors_of_onnx_ir_are_written_too(tmp_path: Path) -> None:
    array = ARRAYS["matrix"]
    write_weights(
        tmp_path / "w.safetensors", {"scalar": ir.tensor(3.5), "m": ir.tensor(array)}
    )
    read = load((tmp_path / "w.safetensors").read_bytes())
    assert read["scalar"].shape == () and read["scalar"] == np.float32(3.5)
    np.testing.assert_array_equal(read["m"], array)


def test_memory_stays_at_one_block(tmp_path: Path) -> None:
    rows, block = 64, np.ones((1, 2**18), np.float32)  # 64 blocks of 1 MiB

    def blocks() -> Iterator[np.ndarray[Any, Any]]:
        for i in range(rows):
            yield block * np.float32(i)

    tensor = StreamedTensor(blocks, dtype=ir.DataType.FLOAT, shape=(rows, 2**18), name="big")
    tracemalloc.start()
    try:
        write_weights(tmp_path / "w.safetensors", {"big": tensor})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 5 * 2**20


@pytest.mark.parametrize(
    ("stored", "proto", "dtype"),
    [
        ("float32", TensorProto.FLOAT, np.float32),
        ("float16", TensorProto.FLOAT16, np.float16),
        ("bfloat16", TensorProto.BFLOAT16, ml_dtypes.bfloat16),
    ],
)
def test_onnxruntime_reads_it_as_external_data(
    tmp_path: Path, stored: str, proto: int, dtype: Any
) -> None:
    matrix = ARRAYS["matrix"].astype(dtype)
    tensors = {"w": from_array(matrix), "first": from_array(ARRAYS["large"])}
    _, placed = plan(tensors)
    assert placed["w"].dtype == stored
    value = TensorProto(name="w", data_type=proto, dims=matrix.shape)
    value.data_location = TensorProto.EXTERNAL
    for key, text in (
        ("location", "w.safetensors"),
        ("offset", str(placed["w"].offset)),
        ("length", str(placed["w"].length)),
    ):
        value.external_data.add(key=key, value=text)
    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["w"], ["w32"], to=TensorProto.FLOAT),
            helper.make_node("MatMul", ["x", "w32"], ["y"]),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 32])],
        [value],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10
    )
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    write_weights(tmp_path / "w.safetensors", tensors)

    session = ort.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    x = RANDOM.standard_normal((2, 64)).astype(np.float32)
    (y,) = session.run(None, {"x": x})
    np.testing.assert_allclose(y, x @ matrix.astype(np.float32), rtol=1e-5, atol=1e-5)
    assert onnx.load(tmp_path / "m.onnx").graph.initializer[0].raw_data == matrix.tobytes()


@pytest.mark.parametrize("name", ["", "__metadata__", "broken\ud800"])
def test_names_that_safetensors_cannot_hold_are_refused(name: str) -> None:
    with pytest.raises(ExportError, match="a weight cannot be called"):
        plan({name: from_array(ARRAYS["norm"])})


def test_a_name_that_comes_twice_is_refused() -> None:
    tensor = from_array(ARRAYS["norm"])
    with pytest.raises(ExportError, match="two weights are called 'a'"):
        plan([("a", tensor), ("a", tensor)])


@pytest.mark.parametrize("dtype", [ir.DataType.INT4, ir.DataType.STRING, ir.DataType.DOUBLE])
def test_dtypes_outside_the_contract_are_refused(dtype: ir.DataType) -> None:
    tensor = StreamedTensor(lambda: iter(()), dtype=dtype, shape=(2,), name="t")
    with pytest.raises(ExportError, match=r"weight 't' is \w+; a weight file holds float32"):
        plan({"t": tensor})


def test_a_header_longer_than_readers_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_file, "MAX_HEADER_BYTES", 1000)
    with pytest.raises(ExportError, match="need a header of 4088 bytes"):
        plan({"t": from_array(ARRAYS["norm"])})


def test_an_existing_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_text("mine")
    with pytest.raises(ExportError, match="cannot be created: File exists"):
        write_weights(tmp_path / "w.safetensors", streamed(ARRAYS))
    assert (tmp_path / "w.safetensors").read_text() == "mine"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"nowhere/w\.safetensors cannot be created"):
        write_weights(tmp_path / "nowhere" / "w.safetensors", streamed(ARRAYS))


class Raw:
    """A tensor whose bytes are not those its shape announces."""

    dtype, shape = ir.DataType.UINT8, ir.Shape((8,))

    def __init__(self, data: bytes) -> None:
        self._data = data

    def tofile(self, file: Any) -> None:
        file.write(self._data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"1234567", "'t' ended 1 bytes before its shape is full"),
        (b"123456789", "'t' gives more bytes than its shape holds"),
    ],
)
def test_a_tensor_of_the_wrong_length_leaves_no_file(
    tmp_path: Path, data: bytes, message: str
) -> None:
    with pytest.raises(ExportError, match=message):
        write_weights(tmp_path / "w.safetensors", {"t": Raw(data)})
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_the_system_refuses_is_told_in_a_sentence(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises(ExportError, match=r"cannot be written past byte \d+ of \d+: File"):
            write_weights(tmp_path / "w.safetensors", streamed(ARRAYS))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_foretold(tmp_path: Path) -> None:
    huge = StreamedTensor(
        lambda: iter(()), dtype=ir.DataType.FLOAT, shape=(2**30, 2**20), name="huge"
    )
    with pytest.raises(
        ExportError, match=r"needs 45035996\d+ bytes and its disk has \d+ free"
    ):
        write_weights(tmp_path / "w.safetensors", {"huge": huge})
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_that_tells_no_size_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((4096, 0) + (0,) * 8))
    write_weights(tmp_path / "w.safetensors", streamed(ARRAYS))


def test_an_interrupted_write_leaves_no_file(tmp_path: Path) -> None:
    def interrupt(done: int, _: int) -> None:
        if done > 4096:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_weights(tmp_path / "w.safetensors", streamed(ARRAYS), on_progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_no_tensors_make_a_valid_file(tmp_path: Path) -> None:
    weights = write_weights(tmp_path / "w.safetensors", {})
    assert load((tmp_path / "w.safetensors").read_bytes()) == {}
    assert weights.size == 4096


def test_the_header_names_tensors_as_json(tmp_path: Path) -> None:
    header, _ = plan({'quote " and ünïcode': from_array(ARRAYS["norm"])})
    assert json.loads(header[8:]) == {
        'quote " and ünïcode': {"dtype": "F32", "shape": [12], "data_offsets": [0, 48]}
    }
