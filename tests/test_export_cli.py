"""``mtp-export``: what it prints, how it ends, and that no wrong input shows a traceback."""

import dataclasses
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoint_cases import config_values, header
from click.testing import CliRunner
from tiny_builds import HYBRID, digests, loads, names, write_hybrid

import export.demo
from artifacts import Manifest
from artifacts.rules import RULES
from export import artifact_files
from export.cli import main
from runtime.decode import Decoder
from runtime.errors import LoadError

ROOT = Path(__file__).parent.parent
SMALL = ("--capacity", 40, "--prefill-rows", 16)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_hybrid(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def artifact(checkpoint, tmp_path_factory):
    output = tmp_path_factory.mktemp("built") / "artifact"
    assert run("build", checkpoint, "-o", output, *SMALL).exit_code == 0
    return output


def run(*args):
    return CliRunner().invoke(main, [str(arg) for arg in args])


def refused(result, code, message):
    """One line of error, no traceback, nothing on standard output."""
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    errors = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1, result.stderr
    assert result.stderr.splitlines()[-1] == errors[0]
    assert re.search(message, errors[0]), errors[0]


@pytest.mark.parametrize("command", [(), ("build",), ("check",), ("demo",)])
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_every_command_has_help_with_examples(command, option):
    result = run(*command, option)
    assert result.exit_code == 0
    assert re.search(
        r"Examples:\n +mtp-export " + " ".join(command or ("demo",)), result.stdout
    )


def test_every_option_of_build_and_demo_says_what_it_is_for():
    for command in ("build", "demo", "check"):
        for option in main.commands[command].params:
            hidden = option.param_type_name == "argument" or option.name in ("output", "k")
            assert hidden or option.help or option.name == "max_new_tokens", option.name


def test_the_version_is_told():
    assert re.fullmatch(r"mtp-export, version \d+\.\d+\S*\n", run("--version").stdout)


def test_a_build_says_in_one_line_what_it_made(checkpoint, tmp_path):
    result = run("build", checkpoint, "-o", tmp_path / "a", "--k", 2, *SMALL)
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{tmp_path / 'a'}: 2 layers, prefill, decode, verify, ")
    assert "k = 2, capacity 40, float32 on cpu, 0.7 MB" in result.stdout
    assert result.stdout.count("\n") == 1
    assert loads(tmp_path / "a")


def test_json_is_one_object_and_nothing_else(checkpoint, tmp_path):
    result = run("build", checkpoint, "-o", tmp_path / "a", "--json", *SMALL)
    assert (result.exit_code, result.stderr) == (0, "")
    values = json.loads(result.stdout)
    manifest = Manifest.read(tmp_path / "a")
    assert values["output"] == str(tmp_path / "a")
    assert (values["k"], values["rows"], values["capacity"]) == (3, 4, 40)
    assert values["weight_bytes"] == manifest.weights.size
    assert values["graphs"]["verify"]["KeepRowStatesPass"] == 2
    assert values["left_out"] == []
    result = run("check", tmp_path / "a", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout) == {"findings": []}
    result = run("demo", "--max-new-tokens", 4, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout)["same_tokens"] is True


def test_a_checkpoint_without_a_head_is_said_to_be_one(tmp_path):
    source = write_hybrid(tmp_path / "c", without=["mtp."])
    result = run("build", source, "-o", tmp_path / "a", *SMALL)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[1].startswith("The checkpoint has no MTP head")


def test_the_default_capacity_is_what_the_model_announces(tmp_path):
    source = write_hybrid(tmp_path / "c", max_position_embeddings=100)
    assert run("build", source, "-o", tmp_path / "a").exit_code == 0
    assert Manifest.read(tmp_path / "a").capacity == 100


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--k", 17), "17 is not in the range 0<=x<=16"),
        (("--k", -1), "-1 is not in the range"),
        (("--k", "x"), "'x' is not a valid integer"),
        (("--capacity", 1), "1 is not in the range 2<="),
        (("--capacity", 2**63), "is not in the range"),
        (("--prefill-rows", 0), "0 is not in the range 1<="),
        (("--target", "tpu"), "'tpu' is not one of"),
        (("--dtype", "fp16"), "needs --target cuda"),
        (("--target", "cuda", "--dtype", "fp32"), "needs --target cpu"),
        (("--target", "cuda", "--k", 16), "too many for CUDA"),
        (("--frobnicate",), "No such option"),
    ],
)
def test_misuse_exits_with_2_and_makes_nothing(checkpoint, tmp_path, args, message):
    refused(run("build", checkpoint, "-o", tmp_path / "a", *args), 2, message)
    assert names(tmp_path) == []


def test_a_source_and_an_output_must_be_named(checkpoint, tmp_path):
    refused(run("build", "-o", tmp_path / "a"), 2, "name the SOURCE folder")
    refused(run("build", checkpoint), 2, "Missing option '-o'")
    refused(run("build", tmp_path / "no", "-o", tmp_path / "a"), 2, "does not exist")
    refused(run("build", ROOT / "README.md", "-o", tmp_path / "a"), 2, "is a file")


def broken(folder, name, data):
    (folder / name).write_bytes(data)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("config.json", None, "config.json is missing"),
        ("config.json", b"", "config.json is not JSON"),
        ("config.json", b"[1]", "config.json"),
        ("config.json", b"\xff\xfe", "config.json is not JSON"),
        ("config.json", b"[" * 100_000, "nested too deeply|not JSON"),
        ("config.json", b'{"model_type": "llama"}', "model_type is .*llama.*no other family"),
        ("config.json", b'{"model_type": 5}', "model_type"),
        ("model.safetensors", None, "no .safetensors file"),
        ("model.safetensors", b"", "cannot be read as safetensors"),
        ("model.safetensors", b"\xff" * 64, "cannot be read as safetensors"),
        ("model.safetensors", header({}, 0), "'model.embed_tokens.weight' .* is missing"),
        ("model.safetensors.index.json", b"{}", "weight_map"),
    ],
)
def test_a_broken_checkpoint_is_told_in_one_line(checkpoint, tmp_path, name, data, message):
    source = tmp_path / "c"
    shutil.copytree(checkpoint, source)
    if data is None:
        (source / name).unlink()
    else:
        broken(source, name, data)
    refused(run("build", source, "-o", tmp_path / "a"), 1, message)
    assert names(tmp_path) == ["c"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 129}, r"'model.embed_tokens.weight' .* it must be \[129, 64\]"),
        ({"hidden_size": 10**30}, "hidden_size"),
        ({"num_hidden_layers": 3, "layer_types": None}, "is missing|is no tensor"),
        ({"num_experts": 4}, "only dense"),
        ({"quantization_config": {"bits": 4}}, "unquantised"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}},
            "rotary_dim",
        ),
    ],
)
def test_a_model_that_cannot_be_built_is_told_in_one_line(tmp_path, changes, message):
    source = write_hybrid(tmp_path / "c")
    values = json.loads((source / "config.json").read_text()) | changes
    kept = {key: value for key, value in values.items() if value is not None}
    (source / "config.json").write_text(json.dumps(kept))
    refused(run("build", source, "-o", tmp_path / "a"), 1, message)
    assert names(tmp_path) == ["c"]


def test_a_model_of_no_attention_is_told_in_one_line(tmp_path):
    config = dataclasses.replace(HYBRID, layer_types=["linear_attention"] * 2)
    source = write_hybrid(tmp_path / "c", config)
    refused(run("build", source, "-o", tmp_path / "a"), 1, "no attention layer")


def test_a_capacity_without_room_for_a_step_is_told(checkpoint, tmp_path):
    result = run("build", checkpoint, "-o", tmp_path / "a", "--capacity", 5)
    refused(result, 1, "with k = 3 give at least 6")
    source = write_hybrid(tmp_path / "c", max_position_embeddings=4)
    refused(run("build", source, "-o", tmp_path / "a"), 1, "capacity of 4 leaves no room")


def test_an_output_that_exists_is_kept_without_force(checkpoint, artifact, tmp_path):
    before = digests(artifact)
    refused(run("build", checkpoint, "-o", artifact), 1, "Replace it with --force")
    assert digests(artifact) == before
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "text").write_text("mine")
    for args in ((), ("--force",)):
        result = run("build", checkpoint, "-o", tmp_path / "thesis", *args)
        refused(result, 1, "never replaced")
    refused(run("build", checkpoint, "-o", tmp_path / "no" / "a"), 1, "does not exist")
    assert names(tmp_path) == ["thesis"]


def test_force_replaces_an_artifact(checkpoint, tmp_path):
    for k in (2, 1):
        args = ("--k", k, "--force", *SMALL)
        assert run("build", checkpoint, "-o", tmp_path / "a", *args).exit_code == 0
        assert Manifest.read(tmp_path / "a").k == k
    assert names(tmp_path) == ["a"]


def test_a_folder_without_permission_is_told(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_, **__: False)  # root may write anywhere
    source = str(checkpoint)
    monkeypatch.setattr("click.types.os.access", lambda path, mode: str(path) == source)
    refused(run("build", checkpoint, "-o", tmp_path / "a"), 1, "not writable for you")


@pytest.mark.parametrize("what", ["graph", "manifest", "copy", "sync"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_a_disk_that_refuses_is_told_in_one_line(
    checkpoint, tmp_path, monkeypatch, what, code
):
    def refuse(*_, **__):
        raise OSError(code, os.strerror(code))

    source = tmp_path / "c"
    shutil.copytree(checkpoint, source)
    (source / "tokenizer_config.json").write_text("{}")
    target = {
        "graph": (artifact_files.ir, "save"),
        "manifest": (Manifest, "write"),
        "copy": (shutil, "copyfile"),
        "sync": (os, "fsync"),
    }[what]
    monkeypatch.setattr(*target, refuse)
    result = run("build", source, "-o", tmp_path / "a")
    refused(result, 1, os.strerror(code))
    assert names(tmp_path) == ["c"]


def test_a_full_disk_is_noticed_before_the_first_byte(checkpoint, tmp_path, monkeypatch):
    real = os.statvfs(tmp_path)
    fields = list(real)
    fields[4] = 3  # f_bavail
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
    refused(run("build", checkpoint, "-o", tmp_path / "a"), 1, r"needs \d+ bytes .* free")
    assert names(tmp_path) == []


def test_no_check_runs_nothing(checkpoint, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise AssertionError

    monkeypatch.setattr("runtime.check.check_run", fail)
    args = ("build", checkpoint, "-o", tmp_path / "a", *SMALL)
    assert isinstance(run(*args).exception, AssertionError)
    assert run(*args, "--no-check").exit_code == 0


def test_check_exits_with_0_1_and_2(artifact, tmp_path):
    result = run("check", artifact)
    assert (result.exit_code, result.stdout) == (0, "clean\n")
    worse = tmp_path / "worse"
    shutil.copytree(artifact, worse)
    (worse / "verify.onnx").write_bytes(b"")
    result = run("check", worse)
    assert result.exit_code == 1
    assert re.search(r"^error \S+  verify\.onnx", result.stdout, re.MULTILINE)
    codes = [f["code"] for f in json.loads(run("check", worse, "--json").stdout)["findings"]]
    assert codes and set(codes) <= RULES.keys()
    (tmp_path / "empty").mkdir()
    result = run("check", tmp_path / "empty")
    assert result.exit_code == 2
    assert "is no artifact" in result.stdout


def test_digests_are_compared_unless_that_is_declined(artifact, tmp_path):
    worse = tmp_path / "worse"
    shutil.copytree(artifact, worse)
    with (worse / "weights.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\1\2\3\4")
    assert run("check", worse).exit_code == 1
    assert run("check", worse, "--no-digests").exit_code == 0


def test_check_without_a_folder_is_misuse(artifact):
    refused(run("check"), 2, "name the artifact's FOLDER")
    refused(run("check", artifact / "manifest.json"), 2, "is a file")
    refused(run("check", artifact / "nowhere"), 2, "does not exist")
    refused(run("check", "--explain", "nothing"), 2, "no rule 'nothing'")


@pytest.mark.parametrize("code", RULES)
def test_every_rule_explains_itself(code):
    result = run("check", "--explain", code)
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{code} (")
    assert "Remedy: " in result.stdout


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("--k", 0), 2, "0 is not in the range 1<="),
        (("--max-new-tokens", 0), 2, "0 is not in the range"),
        (("--prompt", ""), 1, "the prompt is empty"),
        (("--prompt", "x " * 5000), 1, "takes at most"),
    ],
)
def test_a_demo_that_cannot_be_shown_is_told(args, code, message):
    result = run("demo", *args)
    assert result.exit_code == code
    assert (result.stdout, re.search(message, result.stderr) is None) == ("", False)
    assert "Traceback" not in result.stderr


def test_a_demo_whose_tokens_differ_exits_with_1(monkeypatch):
    right = export.demo.DemoRun
    monkeypatch.setattr(
        export.demo, "DemoRun", lambda **fields: right(**fields | {"same_tokens": False})
    )
    result = run("demo", "--max-new-tokens", 2)
    assert result.exit_code == 1
    assert "TOKENS DIFFER" in result.stdout


def test_a_demo_that_does_not_run_is_told(monkeypatch):
    def fail(folder):
        raise LoadError("no provider")

    monkeypatch.setattr(Decoder, "open", fail)
    refused(run("demo"), 1, "no provider")


def test_the_demo_keeps_its_artifact_only_where_nothing_is(artifact, tmp_path):
    result = run("demo", "--max-new-tokens", 1, "--keep", tmp_path / "a")
    assert result.exit_code == 0
    assert loads(tmp_path / "a")
    refused(run("demo", "--keep", artifact), 1, "holds an artifact already")
    refused(run("demo", "--keep", tmp_path / "no" / "a"), 1, "does not exist")


def test_ctrl_c_leaves_nothing_behind(checkpoint, tmp_path):
    command = [sys.executable, "-m", "export", "build", str(checkpoint)]
    process = subprocess.Popen(
        [*command, "-o", str(tmp_path / "a"), "--capacity", "300000"],  # a long run check
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 30
    while not names(tmp_path) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stdout) == (1, ""), stderr
    assert "Aborted!" in stderr
    assert "Traceback" not in stderr
    assert names(tmp_path) == []


def test_a_checkpoint_in_the_output_is_no_artifact_to_replace(tmp_path):
    source = write_hybrid(tmp_path / "c")
    before = digests(source)
    refused(run("build", source, "-o", source, "--force"), 1, "never replaced")
    assert digests(source) == before
    assert json.loads((source / "config.json").read_text()).keys() >= config_values().keys()
