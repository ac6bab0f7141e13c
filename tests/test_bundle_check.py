import json
from pathlib import Path

import onnx
import pytest
from third_party import HOME, NAMES, lay_out

from artifacts.findings import Severity
from export.bundles.check import RULES, check_bundle

GOLDEN = json.loads((HOME / "findings.json").read_text())


def told(bundle: Path, provider: str = "cpu") -> list[str]:
    return [f"{f.code} {f.place}" for f in check_bundle(bundle, provider)]


def messages(bundle: Path, code: str) -> list[str]:
    return [f.message for f in check_bundle(bundle) if f.code == code]


def edit(path: Path, change) -> None:
    model = onnx.load(path, load_external_data=False)
    change(model.graph)
    onnx.save(model, path)


@pytest.mark.parametrize("provider", ["cpu", "cuda"])
@pytest.mark.parametrize("name", NAMES)
def test_each_fixture_has_its_golden_findings(tmp_path: Path, name, provider) -> None:
    assert told(lay_out(name, tmp_path), provider) == GOLDEN[name][provider]


@pytest.mark.parametrize(
    ("name", "bytes_unread"),
    [
        ("artifact-bf16-default", 530_432),
        ("artifact-f16-cuda", 530_432),
        ("artifact-f16-default-noisy", 530_432),
        ("artifact-f32-default", 1_061_376),
        ("artifact-int4-f32-cpu", 992_576),
    ],
)
def test_d07_orphaned_bytes_are_counted(tmp_path: Path, name: str, bytes_unread: int) -> None:
    (message,) = messages(lay_out(name, tmp_path), "files.orphaned")
    assert message.startswith(f"no graph reads {bytes_unread} of its ")


def test_the_wrong_hidden_state_is_an_error_that_names_the_right_one(tmp_path: Path) -> None:
    bundle = lay_out("artifact-f32-default", tmp_path)
    (finding,) = [f for f in check_bundle(bundle) if f.code == "mtp.hidden"]
    assert finding.severity is Severity.ERROR
    assert "before the final norm; 'hidden_states' is the one after it" in finding.message


def test_c16_a_weight_of_the_head_that_nobody_reads_is_told(tmp_path: Path) -> None:
    bundle = lay_out("artifact-f32-default", tmp_path)

    def lose(graph: onnx.GraphProto) -> None:
        graph.initializer.append(onnx.TensorProto(name="lost.weight", data_type=1, dims=[64]))

    edit(bundle / "mtp" / "model.onnx", lose)
    assert "weights.unread head:lost.weight" in told(bundle)


def test_c19_a_head_fed_by_an_unknown_output_is_told(tmp_path: Path) -> None:
    bundle = lay_out("artifact-f32-default", tmp_path)
    yaml = bundle / "inference_metadata.yaml"
    text = yaml.read_text().replace("_output: hidden_states.3", "_output: hidden_states.9")
    yaml.write_text(text)
    assert "no such output" in messages(bundle, "mtp.hidden")[0]


def test_a21_plain_matrices_in_a_quantised_bundle_are_told_with_their_bytes(
    tmp_path: Path,
) -> None:
    told_of = messages(lay_out("artifact-int4-f32-cpu", tmp_path), "weights.unquantised")
    assert [message.split()[0] for message in told_of] == ["864768", "393216"]


def test_a_past_without_a_present_is_told(tmp_path: Path) -> None:
    bundle = lay_out("oga-fp32-cpu-w0", tmp_path)

    def drop(graph: onnx.GraphProto) -> None:
        (output,) = [o for o in graph.output if o.name == "present.1.recurrent"]
        graph.output.remove(output)

    edit(bundle / "model.onnx", drop)
    assert "states.unpaired target:past.1.recurrent" in told(bundle)


def test_a_present_of_another_dtype_is_told(tmp_path: Path) -> None:
    bundle = lay_out("oga-fp32-cpu-w0", tmp_path)

    def retype(graph: onnx.GraphProto) -> None:
        (output,) = [o for o in graph.output if o.name == "present.0.conv"]
        output.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16

    edit(bundle / "model.onnx", retype)
    assert "states.mismatched target:past.0.conv" in told(bundle)


@pytest.mark.parametrize(
    ("key", "value", "finding"),
    [
        ("location", "../outside", "files.escapes ../outside"),
        ("location", "gone", "files.missing gone"),
        ("length", str(2**60), "files.truncated model.onnx.data"),
    ],
)
def test_a_spoiled_data_place_is_told(tmp_path: Path, key, value, finding) -> None:
    bundle = lay_out("oga-fp32-cpu-w0", tmp_path)

    def spoil(graph: onnx.GraphProto) -> None:
        tensor = next(t for t in graph.initializer if t.external_data)
        next(e for e in tensor.external_data if e.key == key).value = value

    edit(bundle / "mtp.onnx", spoil)
    assert finding in told(bundle)


def test_d20_a_linked_data_file_is_told(tmp_path: Path) -> None:
    bundle = lay_out("oga-fp32-cpu-w0", tmp_path)
    (bundle / "mtp.onnx.data").rename(tmp_path / "elsewhere")
    (bundle / "mtp.onnx.data").symlink_to(tmp_path / "elsewhere")
    assert "files.link mtp.onnx.data" in told(bundle)


def test_weights_that_overlap_without_being_one_are_told(tmp_path: Path) -> None:
    bundle = lay_out("oga-fp32-cpu-w0", tmp_path)

    def shift(graph: onnx.GraphProto) -> None:
        tensor = [t for t in graph.initializer if t.external_data][3]
        entry = next(e for e in tensor.external_data if e.key == "offset")
        entry.value = str(int(entry.value) - 64)

    edit(bundle / "mtp.onnx", shift)
    assert any(line.startswith("files.overlap ") for line in told(bundle))


def test_d11_types_are_checked_without_the_data_files(tmp_path: Path) -> None:
    bundle = lay_out("artifact-bf16-default", tmp_path)
    (bundle / "model.onnx.data").unlink()
    found = told(bundle)
    assert "files.missing model.onnx.data" in found
    assert sum(line.startswith("types.clash ") for line in found) == 2


def test_every_rule_explains_itself() -> None:
    codes = [rule.code for rule in RULES]
    assert len(set(codes)) == len(codes)
    for rule in RULES:
        assert rule.title and rule.remedy
        assert rule.explanation.endswith(".")
