"""Places of weights that cannot be; uploads themselves: test_cuda_runtime.py."""

import pytest

from artifacts import Weights, WeightTensor
from runtime.cuda_weights import check_tensors
from runtime.errors import LoadError


def weights(*tensors: WeightTensor) -> Weights:
    named = {f"w{number}": tensor for number, tensor in enumerate(tensors)}
    return Weights(file="weights.safetensors", size=100, sha256="", tensors=named)


def test_tensors_may_share_bytes_of_the_file():
    tensor = WeightTensor("float16", (5, 10), 0, 100)
    check_tensors(weights(tensor, tensor))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (WeightTensor("float16", (5, 10), 0, 99), "takes 100 bytes; it is said to be 99"),
        (WeightTensor("bfloat16", (5, 10), 2, 100), "100 bytes at 2 of 100"),
        (WeightTensor("float32", (2**40,), 0, 2**42), "at 0 of 100"),
    ],
)
def test_a_tensor_that_does_not_lie_in_the_file_is_refused(tensor, message):
    with pytest.raises(LoadError, match=message):
        check_tensors(weights(tensor))
