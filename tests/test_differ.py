import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from third_party import lay_out_whole

from export.differ import differences
from export.errors import BundleError
from export.repair import repair_bundle

LAYER = "/model/layers.0"


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    one = lay_out_whole("oga-fp32-cpu-w0", tmp_path)
    shutil.copytree(one, tmp_path / "other")
    return one, tmp_path / "other"


def edited(bundle: Path, change) -> None:
    model = onnx.load(bundle / "model.onnx", load_external_data=False)
    change(model.graph)
    onnx.save(model, bundle / "model.onnx")


def told(one: Path, other: Path) -> list[tuple[str, str, str]]:
    return [(d.graph, d.kind, d.name) for d in differences(one, other)]


def test_a_bundle_is_the_same_as_its_copy(pair) -> None:
    assert told(*pair) == []


def test_where_weights_lie_makes_no_difference(pair) -> None:
    one, other = pair
    model = onnx.load(other / "model.onnx")
    (other / "model.onnx.data").unlink()
    onnx.save(model, other / "model.onnx")  # all of them inside
    assert told(one / "model.onnx", other / "model.onnx") == []


def rename_op(graph) -> None:
    next(n for n in graph.node if n.op_type == "Sigmoid").op_type = "Tanh"


def change_attribute(graph) -> None:
    node = next(n for n in graph.node if n.op_type == "LinearAttention")
    next(a for a in node.attribute if a.name == "scale").f = 0.5


def widen_input(graph) -> None:
    graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.INT32


def fix_size(graph) -> None:
    graph.output[1].type.tensor_type.shape.dim[0].dim_value = 1


@pytest.mark.parametrize(
    ("change", "kind", "name"),
    [
        (rename_op, "node", f"{LAYER}/mlp/act_fn/Sigmoid/output_0"),
        (change_attribute, "attribute", f"{LAYER}/linear_attn/LinearAttention/output_0:scale"),
        (widen_input, "input", "input_ids"),
        (fix_size, "output", "logits"),
    ],
)
def test_each_kind_of_difference_is_told(pair, change, kind: str, name: str) -> None:
    edited(pair[1], change)
    assert told(*pair) == [("target", kind, name)]


def test_one_number_of_one_weight_is_told(pair) -> None:
    with (pair[1] / "model.onnx.data").open("r+b") as data:
        data.seek(90_112)
        data.write(np.float32(1).tobytes())
    (found,) = told(*pair)
    assert found[:2] == ("target", "weight")


def test_a_missing_head_and_other_metadata_are_told(pair) -> None:
    one, other = pair
    (other / "mtp.onnx").unlink()
    (other / "genai_config.json").unlink()
    assert told(one, other) == [
        ("head", "file", "head"),
        ("metadata", "file", "genai_config.json"),
    ]


def test_a_repair_is_told_by_its_nodes(tmp_path: Path) -> None:
    bundle = lay_out_whole("artifact-f32-default", tmp_path)
    repair_bundle(bundle, tmp_path / "out")
    kinds = {kind for _, kind, _ in told(bundle, tmp_path / "out")}
    assert kinds == {"node", "weight", "file"}  # the guard's constant counts as a weight


def test_a_side_that_cannot_be_read_is_refused(pair) -> None:
    (pair[1] / "model.onnx.data").unlink()
    with pytest.raises(BundleError, match="is missing"):
        told(*pair)
