import json
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper
from third_party import NAMES, lay_out

from export.bundles import BundleError, inspect_bundle, render
from export.bundles.data_files import FileState
from export.bundles.describe import GraphDescription, inspect_node
from export.bundles.render import render_node
from export.bundles.states import CacheKind, StateKind
from export.bundles.weights import WeightClass
from export.bundles.wiring import HiddenKind, Sharing

HEADS = [name for name in NAMES if name != "cli-bf16-cuda"]


def bytes_of(graph: GraphDescription, kind: WeightClass) -> dict[str, int]:
    return {row.dtype: row.bytes for row in graph.weights if row.kind is kind}


@pytest.mark.parametrize("name", NAMES)
def test_every_state_is_paired_by_structure(tmp_path: Path, name: str) -> None:
    bundle = inspect_bundle(lay_out(name, tmp_path))
    target = bundle.graphs[0]
    assert len(target.states) == 8
    assert all(s.structural and s.present for g in bundle.graphs for s in g.states)
    assert sum(s.kind is StateKind.RECURRENT for s in target.states) == 3
    assert sum(s.kind is StateKind.CONV for s in target.states) == 3
    assert {s.layer for s in target.states} == {0, 1, 2, 3}
    assert target.cache is CacheKind.CONCATENATING


@pytest.mark.parametrize("name", NAMES)
def test_matrices_are_told_by_position(tmp_path: Path, name: str) -> None:
    target = inspect_bundle(lay_out(name, tmp_path)).graphs[0]
    width = {"bfloat16": 2, "float16": 2, "float": 4}
    dtype = target.outputs[0].dtype
    size = width[dtype]
    assert bytes_of(target, WeightClass.EMBEDDING) == {dtype: 320 * 64 * size}
    assert sum(bytes_of(target, WeightClass.MLP).values()) == 12 * 64 * 128 * size
    attention = sum(bytes_of(target, WeightClass.ATTENTION).values())
    assert attention == (512 * 64 + 2 * 128 * 64 + 256 * 64) * size


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("artifact-")])
def test_both_hidden_outputs_are_told_by_position(tmp_path: Path, name: str) -> None:
    bundle = inspect_bundle(lay_out(name, tmp_path))
    assert dict(bundle.graphs[0].hidden_outputs) == {
        "hidden_states.3": HiddenKind.PRE_NORM,
        "hidden_states": HiddenKind.POST_NORM,
    }
    assert bundle.wiring is not None
    declared = name != "artifact-int4-f32-cpu"  # no metadata: the right one is taken
    assert bundle.wiring.hidden_kind is (
        HiddenKind.PRE_NORM if declared else HiddenKind.POST_NORM
    )
    assert bundle.wiring.post_norm_output == "hidden_states"
    assert bundle.wiring.feedback_kind is HiddenKind.POST_NORM


@pytest.mark.parametrize("name", ["oga-fp32-cpu-w0", "oga-fp16-cuda-w3"])
def test_a_genai_head_reads_the_targets_own_bytes(tmp_path: Path, name: str) -> None:
    wiring = inspect_bundle(lay_out(name, tmp_path)).wiring
    assert wiring is not None
    assert (wiring.embedding, wiring.lm_head) == (Sharing.SAME_BYTES, Sharing.SAME_BYTES)
    assert wiring.hidden_kind is HiddenKind.POST_NORM
    assert (wiring.feedback_output, wiring.feedback_kind) == (
        "hidden_states_out",
        HiddenKind.POST_NORM,
    )


def test_a_mobius_head_takes_both_matrices_by_name(tmp_path: Path) -> None:
    wiring = inspect_bundle(lay_out("artifact-f16-cuda", tmp_path)).wiring
    assert wiring is not None
    assert wiring.embedding is Sharing.BY_NAME
    assert wiring.embedding_weight == "model.embed_tokens.weight"
    assert wiring.lm_head_weight == "lm_head.weight_t"


def test_a_lookalike_of_the_lm_heads_width_is_not_taken_for_it(tmp_path: Path) -> None:
    """A builder once wired a q_proj as wide as the vocabulary; here its place counts."""
    bundle = lay_out("artifact-f32-default", tmp_path)
    model = onnx.load(bundle / "model.onnx", load_external_data=False)
    wide = next(t for t in model.graph.initializer if "q_proj" in t.name)
    wide.dims[1] = 320
    onnx.save(model, bundle / "model.onnx")
    target = inspect_bundle(bundle).graphs[0]
    assert bytes_of(target, WeightClass.LM_HEAD) == {"float": 64 * 320 * 4}


def test_windowed_states_and_packed_weights_are_said(tmp_path: Path) -> None:
    windowed = inspect_bundle(lay_out("oga-fp16-cuda-w3", tmp_path)).graphs[0]
    assert {s.window for s in windowed.states} == {0, 3}
    packed = inspect_bundle(lay_out("artifact-int4-f32-cpu", tmp_path)).graphs[0]
    assert bytes_of(packed, WeightClass.LM_HEAD) == {
        "int4/32": 320 * 64 // 2,
        "float": 320 * 2 * 4,
        "uint8": 320,
    }


def test_orphaned_bytes_show_in_the_data_file(tmp_path: Path) -> None:
    bundle = inspect_bundle(lay_out("artifact-bf16-default", tmp_path))
    data = {file.file: file for file in bundle.files}
    assert data["model.onnx.data"].size == 1_057_792
    assert data["model.onnx.data"].size - data["model.onnx.data"].used >= 530_432
    assert data["mtp/model.onnx.data"].state is FileState.PRESENT


def test_a_bundle_without_a_head_has_no_wiring(tmp_path: Path) -> None:
    bundle = inspect_bundle(lay_out("cli-bf16-cuda", tmp_path))
    assert bundle.wiring is None
    assert bundle.graphs[0].hidden_outputs == ()


@pytest.mark.parametrize("name", HEADS)
def test_the_text_and_the_json_tell_of_both_graphs(tmp_path: Path, name: str) -> None:
    bundle = inspect_bundle(lay_out(name, tmp_path))
    text = render(bundle)
    assert "target: model.onnx" in text
    assert "wiring: the head starts from" in text
    values = json.loads(json.dumps(bundle.to_json()))
    assert [graph["role"] for graph in values["graphs"]] == ["target", "head"]
    assert values["wiring"]["feedback_kind"] == "post-norm"


def test_a_node_is_shown_with_its_neighbours(tmp_path: Path) -> None:
    bundle = lay_out("artifact-f32-default", tmp_path)
    view = inspect_node(bundle, "logits")
    text = render_node(view)
    assert "logits" in view.node
    assert "SkipSimplifiedLayerNormalization" in text
    assert "lm_head.weight_t: float[64, 320], stored" in text
    with pytest.raises(BundleError, match="no_such_node"):
        inspect_node(bundle, "no_such_node")


@pytest.mark.parametrize(
    ("spoil", "state"),
    [
        (lambda p: p.unlink(), FileState.MISSING),
        (lambda p: p.open("r+b").truncate(1000), FileState.TRUNCATED),
        (lambda p: (p.rename(p.with_suffix(".x")), p.symlink_to(p.with_suffix(".x"))),
         FileState.LINK),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_spoiled_data_file_is_described_and_not_opened(tmp_path, spoil, state) -> None:
    bundle = lay_out("oga-fp32-cpu-w0", tmp_path)
    spoil(bundle / "mtp.onnx.data")
    states = {file.file: file.state for file in inspect_bundle(bundle).files}
    assert states == {"model.onnx.data": FileState.PRESENT, "mtp.onnx.data": state}


@pytest.mark.parametrize(
    ("key", "value", "state"),
    [
        ("location", "../../secret", FileState.OUTSIDE),
        ("location", "/etc/passwd", FileState.OUTSIDE),
        ("offset", "ninety", FileState.TRUNCATED),
        ("offset", str(2**70), FileState.TRUNCATED),
        ("length", "-5", FileState.TRUNCATED),
    ],
)
def test_hostile_data_places_are_told(tmp_path: Path, key, value, state) -> None:
    bundle = lay_out("oga-fp32-cpu-w0", tmp_path)
    model = onnx.load(bundle / "mtp.onnx", load_external_data=False)
    tensor = next(t for t in model.graph.initializer if t.external_data)
    next(entry for entry in tensor.external_data if entry.key == key).value = value
    onnx.save(model, bundle / "mtp.onnx")
    assert state in {file.state for file in inspect_bundle(bundle).files}


@pytest.mark.parametrize("content", [b"", b"\x00" * 64, b"not a model", b"\x0a\xff\xff\xff"])
def test_a_file_that_is_no_model_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(BundleError, match="not an ONNX model"):
        inspect_bundle(tmp_path)


def test_a_linked_graph_and_an_oversized_one_are_refused(tmp_path: Path) -> None:
    with (tmp_path / "real.onnx").open("wb") as file:
        file.truncate(2**30)
    (tmp_path / "model.onnx").symlink_to(tmp_path / "real.onnx")
    with pytest.raises(BundleError, match="not a plain file"):
        inspect_bundle(tmp_path)
    (tmp_path / "model.onnx").unlink()
    (tmp_path / "real.onnx").rename(tmp_path / "model.onnx")
    with pytest.raises(BundleError, match="weights are inside"):
        inspect_bundle(tmp_path)


def large_bundle(folder: Path) -> Path:
    """64 layers of 48 nodes over a sparse file of 17 GB."""
    info = helper.make_tensor_value_info
    nodes, tensors, offset = [], [], 0
    for layer in range(64):
        for i in range(48):
            name = f"layers.{layer}.{i}.weight"
            tensor = TensorProto(name=name, data_type=TensorProto.BFLOAT16, dims=[512, 5632])
            tensor.data_location = TensorProto.EXTERNAL
            length = 512 * 5632 * 2
            for key, value in ("location", "d"), ("offset", offset), ("length", length):
                tensor.external_data.add(key=key, value=str(value))
            offset += length
            tensors.append(tensor)
            nodes.append(helper.make_node("MatMul", ["x", name], [f"y.{layer}.{i}"]))
    nodes.append(helper.make_node("Identity", ["y.63.47"], ["logits"]))
    graph = helper.make_graph(
        nodes, "g", [info("x", 16, [1, 512])], [info("logits", 16, [1, 5632])], tensors
    )
    folder.mkdir()
    onnx.save(helper.make_model(graph), folder / "model.onnx")
    with (folder / "d").open("wb") as data:
        data.truncate(offset)
    assert offset > 17e9
    return folder


def test_describing_and_checking_seventeen_gigabytes_take_two_seconds_and_200_mb(
    tmp_path: Path,
) -> None:
    code = (
        "import sys, time, pathlib; start = time.process_time()\n"
        "from export.bundles import inspect_bundle, render\n"
        "from export.bundles.check import check_bundle\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "render(inspect_bundle(folder)); check_bundle(folder)\n"
        "status = pathlib.Path('/proc/self/status').read_text()\n"
        "peak = int(status.split('VmHWM:')[1].split()[0]) // 1024\n"
        "sys.stdout.write(f'{time.process_time() - start} {peak}')"
    )
    bundle = large_bundle(tmp_path / "large")
    done = subprocess.run(
        [sys.executable, "-c", code, str(bundle)], capture_output=True, text=True, check=True
    )
    # of the process and of its own memory: ru_maxrss would count what pytest had at the fork
    seconds, megabytes = done.stdout.split()
    assert float(seconds) < 2
    assert int(megabytes) < 200
