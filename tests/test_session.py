from pathlib import Path

import pytest
from counting_artifact import Counting

from runtime.errors import LoadError
from runtime.session import Session, SessionOptions, Tensor


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return Counting().write(tmp_path_factory.mktemp("counting"))


def test_a_session_tells_types_and_shapes_as_the_manifest_does(folder):
    session = Session(folder / "prefill.onnx", "cpu", SessionOptions())
    assert session.inputs[:2] == (
        Tensor("input_ids", "int64", (1, "S")),
        Tensor("past_length", "int32", (1,)),
    )
    assert Tensor("logits", "float32", (1, 1, 320)) in session.outputs


def test_a_provider_that_this_runner_does_not_drive_is_refused(folder):
    with pytest.raises(LoadError, match=r"artifact is built for the provider 'rocm'"):
        Session(folder / "decode.onnx", "rocm", SessionOptions())


def test_a_provider_that_cannot_be_had_is_an_error_and_no_fallback(folder, monkeypatch, capfd):
    monkeypatch.setattr("runtime.session.PROVIDERS", {"cpu": "NoSuchExecutionProvider"})
    with pytest.raises(LoadError, match="needs NoSuchExecutionProvider"):
        Session(folder / "decode.onnx", "cpu", SessionOptions())
    assert capfd.readouterr() == ("", "")


def test_a_session_on_another_provider_is_refused(folder, monkeypatch):
    monkeypatch.setattr(
        "onnxruntime.InferenceSession.get_providers", lambda self: ["CPUExecutionProvider"] * 2
    )
    with pytest.raises(LoadError, match="not on CPUExecutionProvider alone"):
        Session(folder / "decode.onnx", "cpu", SessionOptions())


def test_a_file_that_is_no_graph_is_a_clear_error_on_no_stream(tmp_path, capfd):
    path = tmp_path / "decode.onnx"
    path.write_bytes(b"no protobuf at all")
    with pytest.raises(LoadError, match=r"does not load decode.onnx: .*mtp-export check"):
        Session(path, "cpu", SessionOptions())
    assert capfd.readouterr() == ("", "")


def test_a_graph_without_its_weights_is_a_clear_error(folder, tmp_path):
    path = tmp_path / "decode.onnx"
    path.write_bytes((folder / "decode.onnx").read_bytes())
    with pytest.raises(LoadError, match=r"does not load decode.onnx: .*weights.safetensors"):
        Session(path, "cpu", SessionOptions())
