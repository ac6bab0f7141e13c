"""StreamedTensor: the values of an array, without ever holding them all."""

import io

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.streamed import (
    BLOCK_BYTES,
    StreamedTensor,
    cast,
    concat_rows,
    from_array,
    rows_per_block,
)

BF16 = np.dtype(ml_dtypes.bfloat16)


def in_blocks(array, sizes, name="w", log=None):
    """`array` cut into blocks of `sizes` rows; `log` notes each that is read."""

    def blocks():
        start = 0
        for size in sizes:
            if log is not None:
                log.append(size)
            yield array[start : start + size]
            start += size

    return StreamedTensor(
        blocks, dtype=ir.DataType.from_numpy(array.dtype), shape=array.shape, name=name
    )


def written(tensor):
    file = io.BytesIO()
    tensor.tofile(file)
    return file.getvalue()


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=5),
    st.sampled_from([np.float32, np.float16, BF16, np.int64, np.uint8, np.bool_]),
    st.sampled_from([(), (3,), (2, 2)]),
)
def test_values_and_bytes_are_those_of_the_array(sizes, dtype, rest):
    rng = np.random.default_rng(sum(sizes))
    array = rng.integers(0, 100, (sum(sizes), *rest)).astype(dtype)
    tensor = in_blocks(array, sizes)
    assert written(tensor) == array.tobytes()
    np.testing.assert_array_equal(tensor.numpy(), array)
    assert tensor.numpy().dtype == array.dtype
    assert (tensor.dtype, tensor.shape) == (ir.DataType.from_numpy(array.dtype), array.shape)
    assert tensor.nbytes == array.nbytes
    assert tensor.tobytes() == array.tobytes()


def test_blocks_can_be_read_again_and_one_at_a_time():
    log = []
    tensor = in_blocks(np.arange(12, dtype=np.float32).reshape(4, 3), [1, 3], log=log)
    assert log == []
    blocks = tensor.blocks()
    next(blocks)
    assert log == [1]
    written(tensor)
    written(tensor)
    assert log == [1, 1, 3, 1, 3]


def test_it_is_shown_without_being_read():
    log = []
    tensor = in_blocks(np.zeros((4, 3), np.float32), [4], log=log)
    assert repr(tensor) == "StreamedTensor<'w', FLOAT[4, 3]>"
    assert log == []


def test_blocks_that_are_not_contiguous_are_written_in_their_order():
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T
    assert written(in_blocks(array, [2, 2])) == np.ascontiguousarray(array).tobytes()


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ([2], "'w' hold 2 rows of 4"),
        ([2, 3], "'w' hold 5 rows of 4"),
        ([], "hold 0 rows of 4"),
    ],
)
def test_blocks_that_do_not_fill_the_shape_are_refused(sizes, said):
    array = np.zeros((5, 3), np.float32)
    tensor = StreamedTensor(
        lambda: (array[:size] for size in sizes),
        dtype=ir.DataType.FLOAT,
        shape=(4, 3),
        name="w",
    )
    for read in (written, lambda t: t.numpy()):
        with pytest.raises(ValueError, match=said):
            read(tensor)


@pytest.mark.parametrize(
    "block", [np.zeros((4, 3)), np.zeros((4, 2), np.float32), np.zeros((4, 3), ">f4")]
)
def test_a_block_of_another_kind_is_refused(block):
    tensor = StreamedTensor(
        lambda: iter([block]), dtype=ir.DataType.FLOAT, shape=(4, 3), name="w"
    )
    with pytest.raises(
        ValueError, match=r"a block of 'w' is .*; the tensor is float32\[4, 3\]"
    ):
        written(tensor)


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0)])
def test_an_array_of_no_axes_or_no_rows_can_be_held(shape):
    array = np.full(shape, 1.5, np.float32)
    tensor = from_array(array, "s")
    assert tensor.numpy().shape == shape
    assert written(tensor) == array.tobytes()
    assert written(cast(tensor, ir.DataType.FLOAT16)) == array.astype(np.float16).tobytes()


def test_casting_rounds_to_nearest_even():
    # 1 + 2^-8 lies half way between two bfloat16 neighbours, as does 1 + 3 * 2^-8
    array = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -0.0], np.float32)
    got = cast(from_array(array, "w"), ir.DataType.BFLOAT16).numpy()
    assert got.dtype == BF16
    assert got.astype(np.float32).tolist() == [1, 1 + 2**-6, 1 + 2**-7, 0]
    assert np.signbit(got[3])


def test_casting_to_the_same_type_is_nothing():
    tensor = from_array(np.zeros(3, np.float32), "w")
    assert cast(tensor, ir.DataType.FLOAT) is tensor


def test_a_cast_keeps_blocks_name_and_shape():
    array = np.arange(12, dtype=np.float32).reshape(4, 3)
    tensor = cast(in_blocks(array, [1, 3]), ir.DataType.FLOAT16)
    assert [len(block) for block in tensor.blocks()] == [1, 3]
    assert (tensor.name, tensor.shape, tensor.dtype) == ("w", (4, 3), ir.DataType.FLOAT16)


def test_tensors_stand_one_below_the_other():
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones((1, 3), np.float32)
    joined = concat_rows([in_blocks(a, [1, 1]), from_array(b, "b")], "ab")
    assert joined.name == "ab"
    assert written(joined) == np.concatenate([a, b]).tobytes()
    assert joined.shape == (3, 3)


@pytest.mark.parametrize("other", [np.zeros((1, 2), np.float32), np.zeros((1, 3), np.float16)])
def test_tensors_that_do_not_fit_below_one_another_are_refused(other):
    first = from_array(np.zeros((2, 3), np.float32), "a")
    with pytest.raises(
        ValueError, match=r"'b' is .* which does not go below 'a', FLOAT\[2,3\]"
    ):
        concat_rows([first, from_array(other, "b")], "ab")


def test_a_renamed_tensor_has_the_same_values():
    tensor = in_blocks(np.arange(4, dtype=np.float32), [3, 1])
    other = tensor.renamed("v")
    assert (other.name, tensor.name) == ("v", "w")
    assert written(other) == written(tensor)


def test_it_serves_as_the_value_of_an_initializer():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    value = ir.Value(
        name="w",
        type=ir.TensorType(ir.DataType.FLOAT),
        shape=ir.Shape([2, 3]),
        const_value=in_blocks(array, [1, 1]),
    )
    proto = ir.to_proto(value.const_value)
    np.testing.assert_array_equal(np.frombuffer(proto.raw_data, np.float32), array.reshape(-1))


@pytest.mark.parametrize(
    ("shape", "itemsize", "rows"),
    [
        ((10, BLOCK_BYTES), 4, 1),
        ((10, 1024), 2, BLOCK_BYTES // 2048),
        ((7,), 4, BLOCK_BYTES // 4),
    ],
)
def test_a_block_has_at_least_one_row(shape, itemsize, rows):
    assert rows_per_block(shape, itemsize) == rows
