import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from third_party import NAMES, lay_out, lay_out_whole

import export
from export.cli import main

CHECKPOINT = Path(export.__file__).parent / "demo" / "tiny-hybrid-mtp"


def call(*words: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("command", sorted(main.commands))
def test_every_command_helps_with_examples(command: str) -> None:
    code, out, _ = call(command, "--help")
    assert code == 0 and "Examples:" in out and f"mtp-export {command}" in out


def test_check_exits_0_for_an_artifact_and_2_for_nothing(tmp_path: Path) -> None:
    call("build", CHECKPOINT, "-o", tmp_path / "a", "--k", 1, "--capacity", 64, "--no-check")
    assert call("check", tmp_path / "a") == (0, "clean\n", "")
    (tmp_path / "empty").mkdir()
    code, out, _ = call("check", tmp_path / "empty")
    assert code == 2 and "manifest.unreadable" in out


def test_check_of_metadata_without_a_graph_is_one_clear_line(tmp_path: Path) -> None:
    bundle = lay_out("oga-fp32-cpu-w0", tmp_path)
    (bundle / "model.onnx").unlink()
    code, out, err = call("check", bundle)
    assert (code, out) == (2, "") and err.startswith("Error: ") and err.count("\n") == 1


def test_check_of_a_spoiled_manifest_exits_2(tmp_path: Path) -> None:
    (tmp_path / "artifact.json").write_text("{}")
    from artifacts.manifest import MANIFEST

    (tmp_path / MANIFEST).write_text("{")
    code, out, _ = call("check", tmp_path, "--ignore", "manifest")
    assert code == 2 and "manifest.unreadable" in out


@pytest.mark.parametrize("name", [name for name in NAMES if name != "oga-fp32-cpu-w0"])
def test_check_of_a_bundle_exits_1_with_its_findings(tmp_path: Path, name: str) -> None:
    code, out, _ = call("check", lay_out(name, tmp_path), "--json")
    assert code == 1 and json.loads(out)["findings"]


def test_notes_alone_leave_the_exit_code_0(tmp_path: Path) -> None:
    code, out, _ = call("check", lay_out("oga-fp32-cpu-w0", tmp_path), "--json")
    found = json.loads(out)["findings"]
    assert code == 0 and {finding["severity"] for finding in found} <= {"note"}


def test_select_and_ignore_take_rules_and_families(tmp_path: Path) -> None:
    bundle = lay_out("artifact-bf16-default", tmp_path)
    _, out, _ = call(
        "check", bundle, "--json", "--select", "types", "--ignore", "types.kernel"
    )
    assert {f["code"] for f in json.loads(out)["findings"]} == {"types.clash"}
    code, out, _ = call("check", bundle, "--ep", "cuda", "--select", "types.kernel")
    assert (code, out) == (0, "clean\n")


def test_a_rule_that_is_none_is_refused_with_those_that_are(tmp_path: Path) -> None:
    code, _, err = call("check", tmp_path, "--select", "tpyes")
    assert code == 2 and "no rule 'tpyes'" in err and "types.clash" in err


@pytest.mark.parametrize("rule", ["types.clash", "graphs.aliases", "files.missing"])
def test_explain_says_what_a_rule_means(rule: str) -> None:
    code, out, _ = call("check", "--explain", rule)
    assert code == 0 and rule in out and "Remedy:" in out


def test_a_code_that_both_kinds_have_is_explained_for_both() -> None:
    _, out, _ = call("check", "--explain", "files.missing")
    assert "of an artifact" in out and "of a bundle" in out


def test_inspect_prints_text_and_json(tmp_path: Path) -> None:
    bundle = lay_out("oga-fp32-cpu-w0", tmp_path)
    assert "onnxruntime-genai" in call("inspect", bundle)[1]
    described = json.loads(call("inspect", bundle, "--json")[1])
    assert [graph["role"] for graph in described["graphs"]] == ["target", "head"]


def test_inspect_shows_a_node_with_its_neighbours(tmp_path: Path) -> None:
    bundle = lay_out("oga-fp32-cpu-w0", tmp_path)
    code, out, _ = call("inspect", bundle, "--node", "logits")
    assert code == 0 and "MatMul" in out and "SkipSimplifiedLayerNormalization" in out
    code, _, err = call("inspect", bundle, "--node", "nothing")
    assert code == 1 and "'nothing'" in err


def test_repair_says_what_it_did_and_then_that_there_is_nothing_to_do(tmp_path: Path) -> None:
    bundle = lay_out("artifact-bf16-default", tmp_path)
    code, out, _ = call("repair", bundle, "-o", tmp_path / "out", "--prefer", "bf16", "--diff")
    assert code == 0 and "attention masks settled" in out and "is_causal: int = 1" in out
    again = call("repair", tmp_path / "out", "--in-place", "--prefer", "bf16")
    assert again == (0, "nothing to do\n", "")


def test_repair_wants_one_place_to_write(tmp_path: Path) -> None:
    bundle = lay_out("oga-fp32-cpu-w0", tmp_path)
    code, _, err = call("repair", bundle)
    assert code == 2 and "--in-place" in err
    code, out, _ = call("repair", lay_out("artifact-f32-default", tmp_path), "--dry-run")
    assert code == 0 and "nothing was written" in out


def test_build_takes_a_bundle_and_tells_what_it_decided(tmp_path: Path) -> None:
    bundle = lay_out_whole("artifact-int4-f32-cpu", tmp_path)
    (bundle / "tokenizer.json").write_text("{}")
    words = ("-o", tmp_path / "a", "--capacity", 64, "--k", 1, "--no-check")
    code, out, _ = call("build", bundle, *words)
    assert code == 0 and "stored in four bits and are unpacked" in out
    assert (tmp_path / "a" / "tokenizer.json").read_text() == "{}"
    code, out, _ = call("build", bundle, *words, "--force", "--json")
    assert code == 0 and len(json.loads(out)["notes"]) == 2
    assert json.loads(out)["source"] == "bundle"


def test_build_of_a_bundle_without_its_weights_is_one_clear_line(tmp_path: Path) -> None:
    bundle = lay_out("artifact-f32-default", tmp_path)
    (bundle / "model.onnx.data").unlink()
    code, out, err = call("build", bundle, "-o", tmp_path / "a")
    assert (code, out) == (1, "")
    assert err.startswith("Error: model.onnx.data") and err.count("\n") == 1


def test_diff_exits_0_1_and_2(tmp_path: Path) -> None:
    bundle = lay_out_whole("artifact-f32-default", tmp_path)
    assert call("diff", bundle, bundle) == (0, "the same\n", "")
    call("repair", bundle, "-o", tmp_path / "out")
    code, out, _ = call("diff", bundle, tmp_path / "out")
    assert code == 1 and "+ Max(" in out and out.endswith(" differences\n")
    (tmp_path / "empty").mkdir()
    code, out, err = call("diff", bundle, tmp_path / "empty")
    assert (code, out) == (2, "") and err.startswith("Error: ")


def test_extract_says_what_it_cut(tmp_path: Path) -> None:
    bundle = lay_out_whole("oga-fp32-cpu-w0", tmp_path)
    words = ("--from", "hidden_states", "--to", "logits", "-o", tmp_path / "piece")
    code, out, _ = call("extract", bundle, *words)
    assert code == 0 and "1 nodes of the target, inputs hidden_states, outputs logits" in out
    code, _, err = call("extract", bundle, *words)
    assert code == 1 and "exists" in err
