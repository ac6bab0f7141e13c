import json
from importlib import resources

import onnxruntime
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as state

from artifacts.types.table import OPEN_ENDED, OrtTable, ort_table, signature
from export.kernels.generate import kernel_table, registry, schema_table

SHIPPED = json.loads((resources.files("artifacts.types") / "ort_table.json").read_text())


def table(first: int, last: int, **types: list[str]) -> OrtTable:
    row = [first, last, types]
    return OrtTable({"onnxruntime": "1.0.0", "schemas": {}, "kernels": {"cpu": {"Op": [row]}}})


def test_the_shipped_cpu_kernels_are_those_of_the_runtime_that_it_names() -> None:
    assert SHIPPED["onnxruntime"] == onnxruntime.__version__
    made = kernel_table(registry(state, everything=False))
    assert json.loads(json.dumps(made["cpu"])) == SHIPPED["kernels"]["cpu"]


def test_the_shipped_schemas_are_those_of_the_runtime_that_it_names() -> None:
    made = schema_table(state.get_all_operator_schema())
    assert json.loads(json.dumps(made)) == SHIPPED["schemas"]


@pytest.mark.parametrize(
    ("provider", "op", "since", "bound", "found"),
    [
        # what facts of the 1.31.1 wheel say of each, read off its registry independently
        ("cuda", "com.microsoft.LinearAttention", 1, {"T": "bfloat16"}, True),
        ("cpu", "com.microsoft.LinearAttention", 1, {"T": "bfloat16"}, False),
        ("cpu", "com.microsoft.LinearAttention", 1, {"T": "float"}, True),
        ("cuda", "com.microsoft.GatedDeltaNet", 1, {"T": "float16"}, True),
        ("cpu", "com.microsoft.GatedDeltaNet", 1, {"T": "float"}, False),
        ("cuda", "com.microsoft.GroupQueryAttention", 1, {"T": "float"}, False),
        ("cuda", "Reciprocal", 13, {"T": "bfloat16"}, False),
        ("cpu", "MatMul", 13, {"T": "bfloat16"}, False),
        ("cuda", "MatMul", 13, {"T": "bfloat16"}, True),
        ("cuda", "NoSuchOp", 1, {}, False),
    ],
)
def test_kernels_are_found_by_provider_and_type(provider, op, since, bound, found) -> None:
    assert ort_table().has_kernel(provider, op, since, bound) is found


def test_an_open_range_does_not_reach_a_newer_version_and_a_closed_one_does() -> None:
    open_ended, closed = table(7, OPEN_ENDED, T=["float"]), table(7, 12, T=["float"])
    assert open_ended.has_kernel("cpu", "Op", 7, {"T": "float"})
    assert not open_ended.has_kernel("cpu", "Op", 9, {"T": "float"})
    assert closed.has_kernel("cpu", "Op", 9, {"T": "float"})
    assert not closed.has_kernel("cpu", "Op", 13, {"T": "float"})
    assert closed.has_kernel("cpu", "Op", 9, {})


def test_signatures_come_from_onnx_at_the_models_opset_and_from_the_table() -> None:
    old, new = signature("Add", "", 12), signature("Add", "", 24)
    assert old is not None and new is not None
    assert (old.since, new.since) == (7, 14)
    assert "bfloat16" in new.types["T"] and "bfloat16" not in old.types["T"]
    own = signature("SkipSimplifiedLayerNormalization", "com.microsoft", 1)
    assert own is not None and [f.name for f in own.inputs] == [
        "input",
        "skip",
        "gamma",
        "bias",
    ]
    assert signature("SimplifiedLayerNormalization", "", 24) is not None
    assert signature("NoSuchOp", "", 24) is None
