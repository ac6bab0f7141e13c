"""MatMulW4 as ONNX Runtime runs it: values, capture and replay, ragged sizes, misuse."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from passes.quantise import PackedMatrix
from passes.repack_w4 import interleave, repack
from passes.streamed import from_array
from runtime.cuda_driver import CudaDriver
from runtime.errors import DeviceError, KernelError
from runtime.kernels.build import build_library

pytestmark = pytest.mark.gpu

TYPES = {
    "float16": (np.dtype(np.float16), TensorProto.FLOAT16, 6e-4),
    "bfloat16": (np.dtype(ml_dtypes.bfloat16), TensorProto.BFLOAT16, 5e-3),
}
TO_DEVICE, FROM_DEVICE = 1, 2


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    try:
        CudaDriver().close()
        return build_library(tmp_path_factory.mktemp("kernels"))
    except (DeviceError, KernelError) as error:
        pytest.skip(str(error))


def matrix(rows, k, kind, seed):
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows, k // 32, 16), np.uint8)
    scales = (rng.uniform(0.5, 1, (rows, k // 32)) * 0.02).astype(kind)
    q = np.stack([data & 15, data >> 4], -1).reshape(rows, k).astype(np.float64)
    return data, scales, (q - 8) * np.repeat(scales.astype(np.float64), 32, axis=1)


def as_packed(data, scales):
    return PackedMatrix(from_array(data, "w.q4"), from_array(scales, "w.q4.scales"))


class Product:
    """One MatMulW4 with buffers of its own."""

    def __init__(self, library, packed, n, k, rows, kind, *, silu=False, residual=False):
        self.kind, element, _ = TYPES[kind]
        self.driver, self.n, self.k, self.rows = CudaDriver(), n, k, rows
        shapes = {"x": (rows, k), "y": (rows, n)} | ({"r": (rows, n)} if residual else {})
        inputs = [name for name in shapes if name != "y"]
        node = helper.make_node(
            "MatMulW4",
            ["x", "packed", *inputs[1:]],
            ["y"],
            domain="onnx_mtp",
            N=n,
            silu=int(silu),
        )
        info = {
            name: helper.make_tensor_value_info(name, element, [1, *shape])
            for name, shape in shapes.items()
        }
        weights = helper.make_tensor(
            "packed", TensorProto.UINT8, packed.shape, packed.tobytes(), raw=True
        )
        graph = helper.make_graph(
            [node], "g", [info[name] for name in inputs], [info["y"]], [weights]
        )
        domains = [helper.make_opsetid("", 21), helper.make_opsetid("onnx_mtp", 1)]
        model = helper.make_model(graph, opset_imports=domains, ir_version=10)
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.register_custom_ops_library(str(library))
        provider = ("CUDAExecutionProvider", {"enable_cuda_graph": "1"})
        self.session = ort.InferenceSession(
            model.SerializeToString(), options, providers=[provider]
        )
        assert self.session.get_providers()[0] == "CUDAExecutionProvider"
        self.shapes, self.io = shapes, self.session.io_binding()
        self.memory = {
            name: self.driver.allocate(2 * int(np.prod(shape)), name)
            for name, shape in shapes.items()
        }
        for name, shape in shapes.items():
            bind = self.io.bind_output if name == "y" else self.io.bind_input
            bind(name, "cuda", 0, element, [1, *shape], self.memory[name])

    def __call__(self, graph="-1", **values):
        poison = np.full(self.shapes["y"], 0xFFFF, np.uint16)
        self.driver.copy(self.memory["y"], poison.ctypes.data, poison.nbytes, TO_DEVICE)
        for name, value in values.items():
            value = np.ascontiguousarray(value.astype(self.kind))
            self.driver.copy(self.memory[name], value.ctypes.data, value.nbytes, TO_DEVICE)
        self.driver.synchronize()
        run = ort.RunOptions()
        run.add_run_config_entry("gpu_graph_id", graph)
        self.session.run_with_iobinding(self.io, run)
        self.driver.synchronize()
        y = np.empty(self.shapes["y"], np.uint16)
        self.driver.copy(y.ctypes.data, self.memory["y"], y.nbytes, FROM_DEVICE)
        self.driver.synchronize()
        return y.view(self.kind)


def relative(y, want):
    error = np.linalg.norm(y.astype(np.float64) - want)
    return error / np.linalg.norm(want)


def inputs(kind, *shape, seed):
    values = np.random.default_rng(seed).normal(size=shape)
    return values.astype(TYPES[kind][0]).astype(np.float64)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(
    ("n", "k", "rows"),
    [
        (5120, 640, 4),
        (1, 32, 1),
        (1000, 1056, 3),
        (16480, 512, 8),
        (300, 4352, 1),
        (77, 96, 20),
    ],
)
def test_values_captured_and_not(library, kind, n, k, rows):
    data, scales, w = matrix(n, k, TYPES[kind][0], n + k)
    packed = repack(as_packed(data, scales), "w").numpy()
    product = Product(library, packed, n, k, rows, kind)
    for seed, graph in ((1, "-1"), (2, "1"), (3, "1")):  # eager, capture, replay
        x = inputs(kind, rows, k, seed=seed)
        assert relative(product(graph, x=x), x @ w.T) < TYPES[kind][2]


@pytest.mark.parametrize("kind", TYPES)
def test_a_row_has_the_same_bits_whatever_the_number_of_rows(library, kind):
    data, scales, _ = matrix(1000, 4352, TYPES[kind][0], 5)
    packed = repack(as_packed(data, scales), "w").numpy()
    x = inputs(kind, 8, 4352, seed=9)
    whole = Product(library, packed, 1000, 4352, 8, kind)(x=x)
    for rows in range(1, 8):
        part = Product(library, packed, 1000, 4352, rows, kind)(x=x[:rows])
        assert part.tobytes() == whole[:rows].tobytes()


@pytest.mark.parametrize("kind", TYPES)
def test_a_residual_is_added_before_the_rounding(library, kind):
    data, scales, w = matrix(500, 512, TYPES[kind][0], 6)
    packed = repack(as_packed(data, scales), "w").numpy()
    x, r = inputs(kind, 4, 512, seed=1), inputs(kind, 4, 500, seed=2)
    y = Product(library, packed, 500, 512, 4, kind, residual=True)(x=x, r=r)
    assert relative(y, x @ w.T + r) < TYPES[kind][2]


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("n", [1000, 1001])
def test_gate_and_value_give_their_product_through_silu(library, kind, n):
    gate, value = (matrix(n, 256, TYPES[kind][0], seed) for seed in (1, 2))
    packed = repack(interleave(as_packed(*gate[:2]), as_packed(*value[:2])), "w").numpy()
    x = inputs(kind, 4, 256, seed=3)
    g = x @ gate[2].T
    y = Product(library, packed, n, 256, 4, kind, silu=True)(x=x)
    assert relative(y, g / (1 + np.exp(-g)) * (x @ value[2].T)) < TYPES[kind][2]


def test_packed_bytes_of_another_shape_are_refused(library):
    data, scales, _ = matrix(300, 128, np.float16, 1)
    packed = repack(as_packed(data, scales), "w").numpy()
    with pytest.raises(Exception, match="repack the matrix for this shape"):
        Product(library, packed, 300, 160, 1, "float16")(x=np.ones((1, 160)))
