"""What bundles are read as: weights against the stored bytes, refusals by name."""

import random
import string
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
import pytest
from third_party import lay_out, lay_out_whole

from artifacts import LayerKind
from export.build import Model
from export.errors import BundleError
from export.importing import import_bundle
from export.repair import repair_bundle
from export.sources import read_source

MOBIUS, GENAI = "artifact-f32-default", "oga-fp32-cpu-w0"


def stored(bundle: Path, graph: str = "model.onnx") -> dict[str, np.ndarray]:
    model = onnx.load(bundle / graph)
    return {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}


def edit(path: Path, change) -> None:
    model = onnx.load(path, load_external_data=False)
    change(model.graph)
    onnx.save(model, path)


def values(model: Model) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in model.weights.items()}


def same(one: Model, other: Model) -> None:
    assert one.spec == other.spec
    ours, theirs = values(one), values(other)
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array, err_msg=name)


@pytest.fixture(scope="module")
def mobius(tmp_path_factory) -> tuple[Path, Model]:
    bundle = lay_out_whole(MOBIUS, tmp_path_factory.mktemp("mobius"))
    return bundle, import_bundle(bundle)


@pytest.fixture(scope="module")
def genai(tmp_path_factory) -> tuple[Path, Model]:
    bundle = lay_out_whole(GENAI, tmp_path_factory.mktemp("genai"))
    return bundle, import_bundle(bundle)


def test_the_sizes_are_those_of_the_exported_checkpoint(mobius, genai) -> None:
    for _, model in (mobius, genai):
        spec = model.spec
        assert [str(kind) for kind in spec.layers] == ["gdn"] * 3 + ["attention"]
        assert (spec.hidden_size, spec.intermediate_size, spec.vocab_size) == (64, 128, 320)
        a, g = spec.attention, spec.gdn
        assert (a.query_heads, a.kv_heads, a.head_dim, a.rotary_dim) == (4, 2, 64, 16)
        assert a.rope_theta == 10_000.0 and spec.rms_norm_eps == 1e-6
        assert (g.key_heads, g.value_heads, g.key_dim, g.value_dim) == (2, 4, 16, 16)
        assert (g.conv_kernel, g.output_gate) == (4, "silu")
        assert spec.head.intermediate_size == 128 and not spec.tied_embedding
        assert (spec.family, spec.max_positions) == ("qwen3_5_text", 512)
    assert genai[1].eos_token_ids == (2,)


def test_transposed_matrices_and_unfolded_norms(mobius) -> None:
    bundle, model = mobius
    got, raw = values(model), stored(bundle)
    layer = "model.layers.3.self_attn."
    q = raw[f"{layer}q_proj.weight_t"].T.reshape(4, 2, 64, 64)
    np.testing.assert_array_equal(got["layers.3.attention.q"], q[:, 0].reshape(256, 64))
    np.testing.assert_array_equal(got["layers.3.attention.gate"], q[:, 1].reshape(256, 64))
    norm = np.float32(1) + raw["model.layers.3.input_layernorm.weight"]
    np.testing.assert_array_equal(got["layers.3.input_norm"], norm)
    decay = -np.exp(raw["model.layers.1.linear_attn.A_log"])
    np.testing.assert_array_equal(got["layers.1.gdn.decay_scale"], decay)
    fc = stored(bundle, "mtp/model.onnx")["fc.weight_t"].T
    np.testing.assert_array_equal(got["head.fc"], fc)


def test_packed_projections_and_folded_norms(genai) -> None:
    bundle, model = genai
    got, raw = values(model), stored(bundle)
    packed = raw["model.layers.3.attn.qkv_proj.MatMul.weight"].T
    q = packed[:512].reshape(4, 2, 64, 64)
    np.testing.assert_array_equal(got["layers.3.attention.gate"], q[:, 1].reshape(256, 64))
    np.testing.assert_array_equal(got["layers.3.attention.k"], packed[512:640])
    np.testing.assert_array_equal(got["layers.3.attention.v"], packed[640:])
    for ours, theirs in (
        ("layers.0.gdn.decay_scale", "model.layers.0.linear_attn.neg_exp_A"),
        ("norm", "model.layers.4.final_norm_layernorm.weight"),
    ):
        np.testing.assert_array_equal(got[ours], raw[theirs])


def test_a_windowed_state_changes_nothing(genai, tmp_path: Path) -> None:
    windowed = import_bundle(lay_out_whole("oga-fp16-cuda-w3", tmp_path))
    assert windowed.spec == genai[1].spec
    for name, array in values(genai[1]).items():
        np.testing.assert_allclose(
            windowed.weights[name].numpy().astype(np.float32), array, atol=2e-3, rtol=1e-3
        )


def test_four_bits_are_unpacked_and_said(mobius, tmp_path: Path) -> None:
    bundle = lay_out_whole("artifact-int4-f32-cpu", tmp_path)
    model = import_bundle(bundle)
    raw = stored(bundle)
    packed, scales = raw["lm_head.weight"], raw["lm_head.scales"].reshape(320, 2)
    zeros = raw["lm_head.zero_points"].reshape(320, 1)
    expected = np.zeros((320, 64), np.float32)
    for row in range(320):
        for column in range(64):
            byte = packed[row, column // 32, column % 32 // 2]
            number = (byte >> 4 if column % 2 else byte & 15).astype(np.float32)
            zero = zeros[row, 0] >> 4 if column // 32 else zeros[row, 0] & 15
            expected[row, column] = (number - zero) * scales[row, column // 32]
    np.testing.assert_array_equal(values(model)["lm_head"], expected)
    assert np.abs(expected - values(mobius[1])["lm_head"]).max() < 0.03
    assert "1 matrices of the target were stored in four bits" in model.notes[0]


def test_recurrences_written_out_are_recognised(mobius, tmp_path: Path) -> None:
    bundle = lay_out_whole(MOBIUS, tmp_path)
    for graph in ("model.onnx", "mtp/model.onnx"):
        model = onnx.load(bundle / graph, load_external_data=False)
        onnx.save(onnx.inliner.inline_local_functions(model), bundle / graph)
    ops = {
        n.op_type
        for n in onnx.load(bundle / "model.onnx", load_external_data=False).graph.node
    }
    assert {"Scan", "Conv"} <= ops and "LinearAttention" not in ops
    same(import_bundle(bundle), mobius[1])


@pytest.mark.parametrize(("op", "into"), [("Exp", "Sigmoid"), ("Sub", "Add")])
def test_a_scan_that_is_another_rule_is_refused(tmp_path: Path, op: str, into: str) -> None:
    bundle = lay_out_whole(MOBIUS, tmp_path)
    model = onnx.load(bundle / "model.onnx", load_external_data=False)
    model = onnx.inliner.inline_local_functions(model)
    (scan, *_) = [node for node in model.graph.node if node.op_type == "Scan"]
    body = next(a.g for a in scan.attribute if a.name == "body")
    next(node for node in body.node if node.op_type == op).op_type = into
    onnx.save(model, bundle / "model.onnx")
    with pytest.raises(BundleError, match="not the gated delta rule"):
        import_bundle(bundle)


def test_functions_that_are_no_operators_are_written_out(mobius, tmp_path: Path) -> None:
    bundle = lay_out_whole(MOBIUS, tmp_path)
    model = onnx.load(bundle / "model.onnx", load_external_data=False)
    for function in model.functions:
        function.domain = "somewhere"
    for node in model.graph.node:
        node.domain = "somewhere" if node.domain else ""
    model.opset_import.append(onnx.helper.make_opsetid("somewhere", 1))
    onnx.save(model, bundle / "model.onnx")
    same(import_bundle(bundle), mobius[1])


@pytest.mark.parametrize("name", [MOBIUS, GENAI])
def test_no_name_but_those_of_inputs_and_outputs_matters(
    request, tmp_path: Path, name: str
) -> None:
    bundle = lay_out_whole(name, tmp_path)
    draw = random.Random(5)
    renamed: dict[str, str] = {}

    def other(text: str) -> str:
        word = "".join(draw.choices(string.ascii_lowercase, k=12))
        return renamed.setdefault(text, word) if text else ""

    def scramble(graph: onnx.GraphProto) -> None:
        kept = {value.name for value in (*graph.input, *graph.output)}
        del graph.value_info[:]
        for tensor in graph.initializer:
            tensor.name = other(tensor.name)
        for node in graph.node:
            node.name = other(f"node {node.name}")
            for names in (node.input, node.output):
                names[:] = [text if text in kept else other(text) for text in names]

    edit(bundle / "model.onnx", scramble)
    metadata = bundle / "inference_metadata.yaml"
    if metadata.exists():
        text = metadata.read_text()
        for weight in ("model.embed_tokens.weight", "lm_head.weight_t"):
            text = text.replace(weight, renamed[weight])
        metadata.write_text(text)
    same(
        import_bundle(bundle),
        request.getfixturevalue("mobius" if name == MOBIUS else "genai")[1],
    )


def node_of(graph: onnx.GraphProto, op: str, number: int = 0) -> onnx.NodeProto:
    return [node for node in graph.node if node.op_type == op][number]


def attribute(node: onnx.NodeProto, name: str) -> onnx.AttributeProto:
    return next(a for a in node.attribute if a.name == name)


def double_stream(graph: onnx.GraphProto) -> None:
    node = node_of(graph, "SkipSimplifiedLayerNormalization", 2)
    graph.initializer.append(onnx.numpy_helper.from_array(np.float32(2), "two"))
    twice = onnx.helper.make_node("Mul", [node.input[0], "two"], ["twice"], name="twice")
    graph.node.insert(list(graph.node).index(node), twice)
    node.input[0] = "twice"


def no_mask(graph: onnx.GraphProto) -> None:
    attribute(node_of(graph, "Attention"), "is_causal").i = 0
    where = node_of(graph, "Where")
    where.input[2] = where.input[1]


def other_scale(graph: onnx.GraphProto) -> None:
    attribute(node_of(graph, "LinearAttention"), "scale").f = 0.5


def other_epsilon(graph: onnx.GraphProto) -> None:
    attribute(node_of(graph, "RMSNormalization"), "epsilon").f = 1e-5


def no_unit_norm(graph: onnx.GraphProto) -> None:
    node = node_of(graph, "LinearAttention")
    node.input[0] = node_of(graph, "Split").output[0]


def keys_first(graph: onnx.GraphProto) -> None:
    split = node_of(graph, "Split")
    split.output[:] = [split.output[1], split.output[0], split.output[2]]


def no_silu(graph: onnx.GraphProto) -> None:
    attribute(node_of(graph, "CausalConvWithState"), "activation").s = b"none"


def tanh_feed_forward(graph: onnx.GraphProto) -> None:
    node_of(graph, "Sigmoid", 2).op_type = "Tanh"


def spare_output(graph: onnx.GraphProto) -> None:
    graph.node.append(
        onnx.helper.make_node("Softmax", ["logits"], ["chance"], name="sampling")
    )
    graph.output.append(onnx.helper.make_tensor_value_info("chance", 1, None))


def softcap(graph: onnx.GraphProto) -> None:
    attribute(node_of(graph, "Attention"), "softcap").f = 30.0


def lost_state(graph: onnx.GraphProto) -> None:
    graph.output.remove(next(o for o in graph.output if o.name == "present.1.recurrent_state"))


def lost_weight(graph: onnx.GraphProto) -> None:
    graph.initializer.append(
        onnx.numpy_helper.from_array(np.ones((64, 128), np.float32), "adapter.weight")
    )


FAULTS = [
    (double_stream, "the stream goes on from|is looked for"),
    (no_mask, "do not make it causal"),
    (other_scale, "queries are scaled by 0.5"),
    (other_epsilon, "different epsilons: "),
    (no_unit_norm, "no L2 norm over heads of 16"),
    (keys_first, "are not its output"),
    (no_silu, "its activation is none"),
    (tanh_feed_forward, "silu"),
    (spare_output, r"sampling\(Softmax\)"),
    (softcap, "its softcap is 30"),
    (lost_state, "is not handed from step to step"),
    (lost_weight, "adapter.weight"),
]


@pytest.mark.parametrize(("change", "told"), FAULTS, ids=[f.__name__ for f, _ in FAULTS])
def test_what_is_no_part_of_the_model_is_named_and_refused(tmp_path, change, told) -> None:
    bundle = lay_out_whole(MOBIUS, tmp_path)
    edit(bundle / "model.onnx", change)
    with pytest.raises(BundleError, match=told):
        import_bundle(bundle)


def test_a_bias_that_is_not_zero_is_refused(tmp_path: Path) -> None:
    bundle = lay_out_whole(GENAI, tmp_path)
    model = onnx.load(bundle / "model.onnx", load_external_data=False)
    bias = next(
        t
        for t in model.graph.initializer
        if t.name.endswith("layers.1.linear_attn.conv1d.bias")
    )
    offset = next(int(e.value) for e in bias.external_data if e.key == "offset")
    with (bundle / "model.onnx.data").open("r+b") as data:
        data.seek(offset)
        data.write(np.float32(0.5).tobytes())
    with pytest.raises(BundleError, match="a bias that is not zero"):
        import_bundle(bundle)


def test_a_scaled_rotary_table_is_refused(tmp_path: Path) -> None:
    bundle = lay_out_whole(GENAI, tmp_path)
    model = onnx.load(bundle / "model.onnx", load_external_data=False)
    angle = np.arange(512)[:, None] * 1e4 ** -(np.arange(8) / 8)
    angle[:, 5:] /= 4  # long wavelengths stretched, as scaled rotary embeddings do
    for name, table in (("cos_cache", np.cos(angle)), ("sin_cache", np.sin(angle))):
        tensor = next(t for t in model.graph.initializer if t.name == name)
        offset = next(int(e.value) for e in tensor.external_data if e.key == "offset")
        with (bundle / "model.onnx.data").open("r+b") as data:
            data.seek(offset)
            data.write(table.astype(np.float32).tobytes())
    with pytest.raises(BundleError, match="not that of one base"):
        import_bundle(bundle)


def test_a_head_with_a_matrix_of_its_own_is_refused(tmp_path: Path) -> None:
    bundle = lay_out_whole(GENAI, tmp_path)

    def own(graph: onnx.GraphProto) -> None:
        tensor = next(t for t in graph.initializer if t.name == "lm_head.MatMul.weight")
        tensor.CopyFrom(
            onnx.numpy_helper.from_array(np.ones((64, 320), np.float32), tensor.name)
        )

    edit(bundle / "mtp.onnx", own)
    with pytest.raises(BundleError, match="its LM head is not the target's"):
        import_bundle(bundle)


def test_metadata_that_names_another_matrix_is_refused(tmp_path: Path) -> None:
    bundle = lay_out_whole(MOBIUS, tmp_path)
    text = (bundle / "inference_metadata.yaml").read_text()
    (bundle / "inference_metadata.yaml").write_text(
        text.replace("name: lm_head", "name: other")
    )
    with pytest.raises(BundleError, match=r"'other\.weight_t' for its LM head"):
        import_bundle(bundle)


def test_truncated_and_linked_data_is_refused(tmp_path: Path) -> None:
    bundle = lay_out(GENAI, tmp_path)
    with (bundle / "model.onnx.data").open("r+b") as data:
        data.truncate(1000)
    with pytest.raises(BundleError, match="is truncated"):
        import_bundle(bundle)
    (bundle / "model.onnx.data").rename(tmp_path / "elsewhere")
    (bundle / "model.onnx.data").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BundleError, match="is link"):
        import_bundle(bundle)


@pytest.mark.parametrize(("key", "value"), [("length", "4"), ("offset", "-1")])
def test_places_that_are_none_are_refused(tmp_path: Path, key: str, value: str) -> None:
    bundle = lay_out(GENAI, tmp_path)

    def spoil(graph: onnx.GraphProto) -> None:
        tensor = next(t for t in graph.initializer if t.external_data)
        next(e for e in tensor.external_data if e.key == key).value = value

    edit(bundle / "model.onnx", spoil)
    with pytest.raises(BundleError, match="its type and shape make"):
        import_bundle(bundle)


def test_a_huge_shape_is_refused_unread(tmp_path: Path) -> None:
    bundle = lay_out(GENAI, tmp_path)

    def grow(graph: onnx.GraphProto) -> None:
        next(t for t in graph.initializer if t.external_data).dims[:] = [2**40, 2**40]

    edit(bundle / "model.onnx", grow)
    with pytest.raises(BundleError, match="no shape"):
        import_bundle(bundle)


def test_an_artifact_is_no_source(tmp_path: Path) -> None:
    from artifacts.manifest import MANIFEST

    (tmp_path / MANIFEST).write_text("{}")
    with pytest.raises(BundleError, match="is an artifact already"):
        read_source(tmp_path)


def test_a_bundle_without_a_head_is_read_without_one(tmp_path: Path) -> None:
    model = import_bundle(lay_out_whole("cli-bf16-cuda", tmp_path))
    assert model.spec.head is None and model.spec.layers[3] is LayerKind.ATTENTION


def test_the_head_starts_from_the_right_state_and_that_is_said(mobius) -> None:
    assert mobius[1].spec.head.hidden_source == "post_norm"
    assert "starts its head from hidden_states.3" in mobius[1].notes[0]


@pytest.mark.parametrize("name", ["artifact-bf16-default", "artifact-f16-cuda"])
@pytest.mark.parametrize("prefer", [None, "fp32"])
def test_a_mended_bundle_is_the_same_model(tmp_path: Path, name: str, prefer) -> None:
    bundle = lay_out_whole(name, tmp_path)
    repair_bundle(bundle, tmp_path / "out", prefer=prefer)
    before, after = import_bundle(bundle), import_bundle(tmp_path / "out")
    assert before.spec == after.spec
    theirs = values(before)
    for weight, array in values(after).items():  # norms were rounded to the bundle's type
        step = 0.0 if theirs[weight].dtype != np.float32 else 8e-3
        np.testing.assert_allclose(
            array.astype(np.float32), theirs[weight].astype(np.float32), rtol=step,
            err_msg=weight,
        )  # fmt: skip
