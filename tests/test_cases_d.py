"""Public reports of large files and data beside graphs, in their smallest form."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as state
from third_party import Target, lay_out, lay_out_whole
from tiny_bundle import external, findings, load

import export.bundles.graph_index as graph_index
from artifacts import Target as BuiltFor
from export.build import build
from export.bundles.check import check_bundle
from export.bundles.describe import inspect_bundle
from export.errors import BundleError
from export.extract import extract
from export.options import BuildOptions
from export.repair import repair_bundle
from export.sources import read_source
from runtime.decode import Decoder

OVER_2_GB = (24_576, 24_576)
"""Of float32: 2.4 GB."""


def codes(bundle: Path) -> list[str]:
    return [finding.code for finding in check_bundle(bundle)]


def stored(graph: Path) -> dict[str, np.ndarray]:
    model = onnx.load(graph)
    return {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}


def spoil(bundle: Path) -> None:
    """Declare a wrong type for a value, for repair to have something to do."""
    model = onnx.load(bundle / "model.onnx", load_external_data=False)
    model.graph.node[0].output[0] = "product"
    model.graph.node.append(onnx.helper.make_node("Relu", ["product"], ["y"]))
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("product", 10, None))
    (bundle / "model.onnx").write_bytes(model.SerializeToString())


def test_d01_a_graph_with_its_weights_inside_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch
) -> None:
    bundle = lay_out("oga-fp32-cpu-w0", tmp_path)
    monkeypatch.setattr(graph_index, "MAX_GRAPH_BYTES", 10_000)  # for 512 MB
    with pytest.raises(BundleError, match="save them as external data"):
        check_bundle(bundle)


def test_d02_a_bundle_over_2_gb_is_read_by_its_path(tmp_path: Path) -> None:
    bundle = external(tmp_path / "b", OVER_2_GB)
    (file,) = inspect_bundle(bundle).files
    assert (file.size, file.used) == (4 * OVER_2_GB[0] ** 2, 4 * OVER_2_GB[0] ** 2)
    assert not [code for code in codes(bundle) if code != "mtp.absent"]


def test_d03_a_graph_over_2_gb_is_mended_without_its_weights(tmp_path: Path) -> None:
    bundle = external(tmp_path / "b", OVER_2_GB)
    spoil(bundle)
    assert [f.code for f in findings(bundle)] == ["types.value_info"]
    before = (bundle / "w.data").stat().st_mtime_ns
    (repair,) = repair_bundle(bundle, bundle)
    assert repair.file == "model.onnx" and findings(bundle) == []
    assert (bundle / "w.data").stat().st_mtime_ns == before


def test_d05_places_of_weights_survive_a_repair(tmp_path: Path) -> None:
    bundle = external(tmp_path / "b", (64, 32), bytes_before=4096)
    spoil(bundle)
    weight = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
    with (bundle / "w.data").open("r+b") as data:
        data.seek(4096)
        data.write(weight.tobytes())
    repair_bundle(bundle, tmp_path / "out")
    x = np.ones((1, 64), np.float32)
    (got,) = load(tmp_path / "out").run(None, {"x": x})
    np.testing.assert_allclose(got, np.maximum(x @ weight, 0), rtol=1e-5, atol=1e-5)


def test_d06_a_fault_in_a_graph_over_2_gb_is_found(tmp_path: Path) -> None:
    bundle = external(tmp_path / "b", OVER_2_GB)
    model = onnx.load(bundle / "model.onnx", load_external_data=False)
    model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    (bundle / "model.onnx").write_bytes(model.SerializeToString())
    assert "types.clash" in codes(bundle)


def test_d07_saving_again_appends_nothing_and_old_leftovers_are_told(tmp_path: Path) -> None:
    bundle = lay_out_whole("artifact-f32-default", tmp_path)
    assert "files.orphaned" in codes(bundle)
    sizes = [
        (tmp_path / name / "model.onnx.data").stat().st_size
        for name, before in (("one", bundle), ("two", tmp_path / "one"))
        if repair_bundle(before, tmp_path / name) is not None
    ]
    assert sizes == [2_122_240, 2_122_240]
    repair_bundle(bundle, tmp_path / "three", rewrite_data=True)
    assert "files.orphaned" not in codes(tmp_path / "three")


def test_d08_rewritten_data_holds_every_weight(tmp_path: Path) -> None:
    bundle = lay_out_whole("artifact-f16-cuda", tmp_path)
    repair_bundle(bundle, tmp_path / "out", rewrite_data=True)
    before, after = (stored(b / "model.onnx") for b in (bundle, tmp_path / "out"))
    for name in before.keys() & after.keys():
        np.testing.assert_array_equal(after[name], before[name], err_msg=name)
    assert {name for name in before if "proj" in name} <= after.keys()


def test_d10_a_graph_whose_data_is_gone_is_checked_and_the_file_named(tmp_path: Path) -> None:
    bundle = external(tmp_path / "b", (64, 32))
    (bundle / "w.data").unlink()
    with pytest.raises(onnx.checker.ValidationError):
        onnx.checker.check_model(bundle / "model.onnx")
    (found,) = [f for f in check_bundle(bundle) if f.code == "files.missing"]
    assert found.place == "w.data" and "8192 bytes" in found.message


def test_d11_types_are_checked_where_the_data_is_not(tmp_path: Path) -> None:
    bundle = external(tmp_path / "b", (64, 32))
    spoil(bundle)
    (bundle / "w.data").unlink()
    assert {"types.value_info", "files.missing"} <= set(codes(bundle))


def test_d12_outputs_keep_their_declared_shapes(tmp_path: Path) -> None:
    bundle = lay_out("artifact-bf16-default", tmp_path)
    repair_bundle(bundle, tmp_path / "out", prefer="fp32")
    for graph in ("model.onnx", "mtp/model.onnx"):
        before, after = (
            {o.name: o.type.tensor_type.shape.SerializeToString() for o in
             onnx.load(b / graph, load_external_data=False).graph.output}
            for b in (bundle, tmp_path / "out")
        )  # fmt: skip
        assert before.items() <= after.items()


def test_d14_files_are_loaded_by_path_from_anywhere(tmp_path: Path, monkeypatch) -> None:
    bundle = lay_out_whole("artifact-f32-default", tmp_path)
    graph = bundle / "model.onnx"
    monkeypatch.chdir(tmp_path)
    with pytest.raises((state.Fail, state.InvalidArgument, state.NoSuchFile)):
        ort.InferenceSession(graph.read_bytes(), None, ["CPUExecutionProvider"])
    options = BuildOptions(k=1, capacity=64, prefill_rows=8, target=BuiltFor("cpu", "float32"))
    build(read_source(bundle), tmp_path / "artifact", options, run_check=False)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with Decoder.open(Path("..") / "artifact") as decoder:
        first = int(Target(graph).step([1, 5, 9])["logits"][0, -1].argmax())
        assert next(iter(decoder.prefill([1, 5, 9]).tokens)) == first


MEASURE = """
import json, sys
from pathlib import Path
from export.bundles.check import check_bundle
from export.bundles.describe import inspect_bundle
from export.repair import repair_bundle
bundle = Path(sys.argv[1])
inspect_bundle(bundle)
found = [f.code for f in check_bundle(bundle, "cuda")]
repairs = len(repair_bundle(bundle, bundle))
peak = next(line for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith("VmHWM"))
print(json.dumps({"found": found, "repairs": repairs, "peak": int(peak.split()[1])}))
"""
"""The peak of the process itself: getrusage would count its parent's before the exec."""


def test_d17_17_gb_are_inspected_checked_and_mended_within_200_mb(tmp_path: Path) -> None:
    bundle = external(tmp_path / "b", (65_536, 65_536))
    spoil(bundle)
    with (bundle / "w.data").open("r+b") as data:
        assert data.seek(0, os.SEEK_END) == 17_179_869_184
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(bundle)],
        cwd=Path(__file__).parent.parent, capture_output=True, check=True, text=True,
    )  # fmt: skip
    told = json.loads(done.stdout)
    assert "types.value_info" in told["found"] and told["repairs"] == 1
    assert told["peak"] < 200 * 1024, f"{told['peak']} KiB"


def test_d18_a_piece_of_a_large_bundle_takes_its_own_weights_only(tmp_path: Path) -> None:
    bundle = external(tmp_path / "b", (64, 32), bytes_before=2**32)
    piece = extract(bundle, ["x"], ["y"], tmp_path / "piece")
    assert (tmp_path / "piece" / "model.onnx.data").stat().st_size == 64 * 32 * 4
    (got,) = load(tmp_path / "piece").run(
        None, dict(np.load(tmp_path / "piece" / "inputs.npz"))
    )
    assert piece.weight_bytes == 64 * 32 * 4 and not got.any()


def test_d20_links_are_told_and_copies_take_their_place(tmp_path: Path) -> None:
    bundle = external(tmp_path / "b", (64, 32))
    (tmp_path / "second name").hardlink_to(bundle / "w.data")
    load(bundle)
    with pytest.raises(onnx.checker.ValidationError):
        onnx.load(bundle / "model.onnx")
    assert "files.hard_link" in codes(bundle) and "files.link" not in codes(bundle)
    repair_bundle(bundle, tmp_path / "out")
    assert "files.hard_link" not in codes(tmp_path / "out")
    onnx.load(tmp_path / "out" / "model.onnx")
    (bundle / "w.data").unlink()
    (bundle / "w.data").symlink_to(tmp_path / "second name")
    assert "files.link" in codes(bundle)
    with pytest.raises(state.Fail):
        load(bundle)
