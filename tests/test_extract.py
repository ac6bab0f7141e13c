from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as state
from third_party import lay_out, lay_out_whole

from export.errors import BundleError, ExportError
from export.extract import extract

NORMED = "v_model.layers.3.input_layernorm.RMSNormalization_228"
ATTENDED = "v_model.layers.3.self_attn.o_proj.MatMul_251"


def run(folder: Path) -> dict[str, np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(folder / "model.onnx", options, ["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    fed = dict(np.load(folder / "inputs.npz"))
    assert fed.keys() == {port.name for port in session.get_inputs()}
    return dict(zip(names, session.run(names, fed), strict=True))


def test_a_piece_gives_what_the_whole_gives(tmp_path: Path) -> None:
    bundle = lay_out_whole("artifact-f32-default", tmp_path)
    piece = extract(bundle, [NORMED], [ATTENDED], tmp_path / "piece")
    assert piece.role == "target" and piece.outputs == (ATTENDED,)
    assert NORMED in piece.inputs and "past_key_values.3.key" in piece.inputs
    assert "past_key_values.0.conv_state" not in piece.inputs
    got = run(tmp_path / "piece")[ATTENDED]
    # the whole graph, with the sample in the place of what the norm makes
    model = onnx.load(bundle / "model.onnx")
    samples = dict(np.load(tmp_path / "piece" / "inputs.npz"))
    norm = next(node for node in model.graph.node if NORMED in node.output)
    norm.output[0] = "replaced"
    value = onnx.helper.make_tensor_value_info
    model.graph.input.append(value(NORMED, 1, samples[NORMED].shape))
    del model.graph.output[:]
    model.graph.output.append(value(ATTENDED, 1, None))
    session = ort.InferenceSession(model.SerializeToString(), None, ["CPUExecutionProvider"])
    for port in session.get_inputs():
        sizes = [1 if isinstance(size, str) else size for size in port.shape]
        samples.setdefault(port.name, np.zeros(sizes, np.float32))
    (expected,) = session.run(None, samples)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


def test_only_the_weights_that_are_read_come_along(tmp_path: Path) -> None:
    bundle = lay_out_whole("artifact-f32-default", tmp_path)
    piece = extract(bundle, [NORMED], [ATTENDED], tmp_path / "piece")
    size = (tmp_path / "piece" / "model.onnx.data").stat().st_size
    projections = 4 * 64 * (512 + 128 + 128 + 256)
    assert size == piece.weight_bytes == projections + 2 * 512 * 8 * 4  # and the rotary table


@pytest.mark.parametrize(
    ("name", "start", "end"),
    [
        ("oga-fp32-cpu-w0", "/model/layers.3/input_layernorm/output_0", "logits"),
        ("artifact-f16-cuda", "inputs_embeds", "mtp_hidden"),
        ("artifact-int4-f32-cpu", "input_ids", "logits"),
    ],
)
def test_pieces_of_every_kind_of_bundle_run(tmp_path: Path, name, start, end) -> None:
    extract(lay_out_whole(name, tmp_path), [start], [end], tmp_path / "piece")
    assert np.isfinite(run(tmp_path / "piece")[end].astype(np.float32)).all()


def test_the_fault_of_a_bundle_is_in_the_piece(tmp_path: Path) -> None:
    bundle = lay_out_whole("artifact-bf16-default", tmp_path)
    piece = extract(bundle, ["v_fc.MatMul_6"], ["mtp_hidden"], tmp_path / "piece")
    assert piece.nodes < 50
    with pytest.raises(state.Fail, match="bound to different types"):
        run(tmp_path / "piece")
    assert np.load(tmp_path / "piece" / "inputs.npz")["v_fc.MatMul_6"].dtype == np.uint16


def test_values_that_are_not_connected_or_not_there_are_refused(tmp_path: Path) -> None:
    bundle = lay_out("artifact-f32-default", tmp_path)
    with pytest.raises(ExportError, match="no way leads from logits"):
        extract(bundle, ["logits"], [NORMED], tmp_path / "piece")
    with pytest.raises(ExportError, match="'nothing' is not in the first one"):
        extract(bundle, ["nothing"], [NORMED], tmp_path / "piece")
    (bundle / "model.onnx.data").unlink()
    with pytest.raises(BundleError, match="is missing"):
        extract(bundle, [NORMED], [ATTENDED], tmp_path / "piece")
    (tmp_path / "there").mkdir()
    with pytest.raises(ExportError, match="exists"):
        extract(bundle, [NORMED], [ATTENDED], tmp_path / "there")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "artifact-f32-default",
        "there",
    ]
