import json
from pathlib import Path

import pytest
from third_party import lay_out

from export.bundles import BundleError, Exporter, find_layout

MOBIUS = "speculative:\n  model: {model}\n"


def folder_of(tmp_path: Path, **files: str) -> Path:
    for name, text in files.items():
        path = tmp_path / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_a_mobius_bundle_is_its_yaml_and_the_head_that_it_names(tmp_path: Path) -> None:
    layout = find_layout(lay_out("artifact-bf16-default", tmp_path))
    assert layout.exporter is Exporter.MOBIUS
    assert layout.graphs == {"target": "model.onnx", "head": "mtp/model.onnx"}
    assert layout.declared.hidden_output == "hidden_states.3"
    assert layout.declared.lm_head == "lm_head.weight_t"
    assert layout.declared.kv_mode == "proposal_local"


def test_a_genai_bundle_is_its_config_and_the_head_beside_the_target(tmp_path: Path) -> None:
    layout = find_layout(lay_out("oga-fp32-cpu-w0", tmp_path))
    assert layout.exporter is Exporter.GENAI
    assert layout.graphs == {"target": "model.onnx", "head": "mtp.onnx"}
    assert layout.declared.hidden_output == "hidden_states"
    assert (layout.declared.vocab_size, layout.declared.layers) == (320, 4)


def test_graphs_without_metadata_are_found_by_their_places(tmp_path: Path) -> None:
    layout = find_layout(lay_out("artifact-int4-f32-cpu", tmp_path))
    assert layout.exporter is Exporter.BARE
    assert layout.head == "mtp/model.onnx"


def test_the_older_speculator_block_names_a_head_too(tmp_path: Path) -> None:
    yaml = "speculator:\n  model_path: draft.onnx\n  embedding: model.embed.weight\n"
    folder = folder_of(
        tmp_path, inference_metadata_DOT_yaml=yaml, model_DOT_onnx="", draft_DOT_onnx=""
    )
    layout = find_layout(folder)
    assert layout.head == "draft.onnx"
    assert layout.declared.embedding == "model.embed.weight"


def test_a_declared_head_that_is_gone_is_missing_and_not_absent(tmp_path: Path) -> None:
    bundle = lay_out("artifact-f32-default", tmp_path)
    (bundle / "mtp" / "model.onnx").unlink()
    layout = find_layout(bundle)
    assert layout.head is None
    assert layout.missing == ("mtp/model.onnx",)


def test_a_folder_without_a_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"holds no model\.onnx"):
        find_layout(tmp_path)


@pytest.mark.parametrize("path", ["../other/model.onnx", "/etc/passwd", "a/../../b.onnx"])
def test_a_head_outside_of_the_folder_is_refused(tmp_path: Path, path: str) -> None:
    yaml = MOBIUS.format(model=path)
    folder = folder_of(tmp_path, inference_metadata_DOT_yaml=yaml, model_DOT_onnx="")
    with pytest.raises(BundleError, match="inside of the bundle's folder"):
        find_layout(folder)


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("a: &a [x]\nb: [*a, *a]\n", "alias"),
        ("a: 1\na: 2\n", "stands twice"),
        ("1: a\n", "not a string"),
        ("a: !!python/object/apply:os.system [id]\n", "not plain YAML"),
        ("- a\n", "must be a JSON object"),
        ("[" * 5000, "nested too deeply"),
        ("speculative: 7\n", "must be a JSON object"),
        ("speculative: {model: 7}\n", "must be a string"),
        ("a: [\n", "not plain YAML"),
        ("a: \x01\n", "not plain YAML"),
    ],
)
def test_hostile_yaml_is_refused_with_its_reason(
    tmp_path: Path, yaml: str, message: str
) -> None:
    folder = folder_of(tmp_path, inference_metadata_DOT_yaml=yaml, model_DOT_onnx="")
    with pytest.raises(BundleError, match=message):
        find_layout(folder)


def test_yaml_over_the_limit_is_not_even_parsed(tmp_path: Path) -> None:
    folder = folder_of(
        tmp_path, inference_metadata_DOT_yaml="a: " + "x" * 2**20, model_DOT_onnx=""
    )
    with pytest.raises(BundleError, match="no metadata is over 1048576"):
        find_layout(folder)


def test_linked_metadata_is_refused(tmp_path: Path) -> None:
    bundle = lay_out("oga-fp32-cpu-w0", tmp_path)
    (bundle / "genai_config.json").rename(tmp_path / "elsewhere.json")
    (bundle / "genai_config.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(BundleError, match="is a link"):
        find_layout(bundle)


def test_a_config_of_wrong_types_is_refused(tmp_path: Path) -> None:
    config = {"model": {"decoder": {"filename": "model.onnx"}, "mtp": {"enabled": "yes"}}}
    folder = folder_of(tmp_path, genai_config_DOT_json=json.dumps(config), model_DOT_onnx="")
    with pytest.raises(BundleError, match="true or false"):
        find_layout(folder)
