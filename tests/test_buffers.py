import ml_dtypes
import numpy as np
import pytest

from artifacts import Buffer
from runtime.buffers import ALIGNMENT, CpuBuffers
from runtime.errors import LoadError, SlotError


@pytest.fixture
def buffers() -> CpuBuffers:
    return CpuBuffers(
        {
            "ids": Buffer("int64", (1, 4)),
            "target.0.recurrent": Buffer("float32", (1, 2, 3, 3)),
            "target.1.key": Buffer("float16", (1, 1, 8, 2)),
            "hidden": Buffer("bfloat16", (1, 4, 5)),
            "length": Buffer("int32", (1,)),
        }
    )


def test_all_memory_is_zero_aligned_and_typed_as_declared(buffers):
    kinds = {
        "ids": np.int64,
        "target.0.recurrent": np.float32,
        "target.1.key": np.float16,
        "hidden": ml_dtypes.bfloat16,
        "length": np.int32,
    }
    for name, kind in kinds.items():
        array = buffers.read(name)
        assert array.dtype == kind
        assert array.shape == buffers.declared(name).shape
        assert not array.any()
        assert buffers.address(name) % ALIGNMENT == 0


def test_a_write_covers_the_start_and_a_read_may_cover_less(buffers):
    buffers.write("ids", np.array([[7, 8]]))
    assert buffers.read("ids").tolist() == [[7, 8, 0, 0]]
    assert buffers.read("ids", (3,)).tolist() == [7, 8, 0]


def test_reads_and_writes_may_begin_inside(buffers):
    buffers.write("ids", np.array([7, 8]), offset=2)
    assert buffers.read("ids").tolist() == [[0, 0, 7, 8]]
    assert buffers.read("ids", (1, 2), offset=1).tolist() == [[0, 7]]
    for offset in (-1, 3):
        with pytest.raises(SlotError, match=f"from element {offset} on does not fit"):
            buffers.read("ids", (2,), offset=offset)


def test_a_read_is_a_copy(buffers):
    buffers.read("ids")[...] = 5
    assert not buffers.read("ids").any()


def test_addresses_stay_through_writes_and_resets(buffers):
    before = {name: buffers.address(name) for name in ("ids", "hidden", "length")}
    buffers.write("hidden", np.ones((1, 4, 5), ml_dtypes.bfloat16))
    buffers.reset()
    assert before == {name: buffers.address(name) for name in before}


def test_reset_zeroes_states_and_leaves_caches(buffers):
    for name in ("target.0.recurrent", "target.1.key"):
        array = buffers.read(name)
        array[...] = np.nan
        buffers.write(name, array)
    buffers.reset()
    assert not buffers.read("target.0.recurrent").any()
    assert np.isnan(buffers.read("target.1.key")).all()


def test_nothing_is_converted(buffers):
    with pytest.raises(SlotError, match="'length' holds int32, not int64"):
        buffers.write("length", np.array([3]))


def test_what_does_not_fit_is_refused(buffers):
    with pytest.raises(SlotError, match=r"'ids' has 4 elements \[1, 4\]; \[1, 5\] from"):
        buffers.write("ids", np.zeros((1, 5), np.int64))
    with pytest.raises(SlotError, match="does not fit"):
        buffers.read("ids", (5,))


def test_an_unknown_name_is_told_with_the_known_ones(buffers):
    with pytest.raises(SlotError, match="no buffer 'idz', only ids, "):
        buffers.address("idz")


def test_a_closed_buffer_cannot_be_read(buffers):
    buffers.close()
    with pytest.raises(SlotError, match="closed"):
        buffers.read("ids")


def test_memory_that_no_machine_has_is_a_clear_error():
    for shape in ((2**40, 2**20), (2**62, 2**62)):
        with pytest.raises(LoadError, match=r"'target.0.key'.*smaller capacity"):
            CpuBuffers({"target.0.key": Buffer("float32", shape)})


def test_a_checkpoint_gives_back_what_was_there_and_only_that(buffers):
    buffers.write("length", np.array([5], np.int32))
    buffers.write("ids", np.array([[1, 2, 3, 4]]))
    checkpoint = buffers.checkpoint(["length"])
    address = buffers.address("length")
    for _ in range(2):
        buffers.write("length", np.array([6], np.int32))
        buffers.write("ids", np.array([[9]]))
        checkpoint.restore()
        assert buffers.read("length").tolist() == [5]
        assert buffers.read("ids").tolist() == [[9, 2, 3, 4]]
    assert buffers.address("length") == address
    checkpoint.close()
    with pytest.raises(SlotError, match="checkpoint is closed"):
        checkpoint.restore()
