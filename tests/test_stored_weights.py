import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from checkpoint_cases import (
    BF16,
    CONFIG,
    HEAD,
    WEIGHTS,
    assert_weights,
    config_values,
    entry,
    expected,
    fused,
    header,
    one_file,
    refusal,
    stored_as,
    write,
)

import export.safetensors_index
import export.stored_weights
import passes.streamed
from export.checkpoint import read_checkpoint
from export.errors import CheckpointError


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
def test_values_keep_their_stored_dtype_and_fold_in_float32(tmp_path, dtype):
    weights = stored_as(WEIGHTS, dtype)
    checkpoint = read_checkpoint(one_file(tmp_path / "m", weights))
    assert_weights(checkpoint, expected(weights))
    assert checkpoint.spec.head == HEAD
    assert checkpoint.weights["layers.0.gdn.conv"].dtype.numpy() == dtype
    assert checkpoint.weights["layers.0.input_norm"].dtype == ir.DataType.FLOAT


def test_small_blocks_give_the_same_values(tmp_path, monkeypatch):
    packed, split = fused(CONFIG)
    folder = one_file(tmp_path / "m", packed, config_values(model_type="qwen3_next"))
    monkeypatch.setattr(passes.streamed, "BLOCK_BYTES", 5 * 4 * CONFIG.hidden_size)
    checkpoint = read_checkpoint(folder)
    assert_weights(checkpoint, expected(split))
    blocks = [len(block) for block in checkpoint.weights["layers.0.gdn.qkv"].blocks()]
    assert blocks == [5] * 32
    assert [len(b) for b in checkpoint.weights["layers.0.gdn.b"].blocks()] == [5, 1]


def test_matrices_are_read_only_when_they_are_asked_for(tmp_path, monkeypatch):
    reads = []
    read = export.safetensors_index.StoredTensor.read

    def recorded(self, ranges):
        reads.append(self.name)
        return read(self, ranges)

    monkeypatch.setattr(export.safetensors_index.StoredTensor, "read", recorded)
    checkpoint = read_checkpoint(one_file(tmp_path / "m", WEIGHTS))
    assert reads
    assert all(WEIGHTS[name].ndim == 1 for name in reads)
    reads.clear()
    checkpoint.weights["layers.3.attention.gate"].numpy()
    assert reads == ["model.layers.3.self_attn.q_proj.weight"]


@pytest.mark.parametrize("dtype", [np.int8, np.float64, np.uint8])
def test_quantised_and_other_dtypes_are_refused_by_name(tmp_path, dtype):
    name = "model.layers.0.mlp.up_proj.weight"
    weights = WEIGHTS | {name: WEIGHTS[name].astype(dtype)}
    message = refusal(one_file(tmp_path / "m", weights))
    assert f"{name!r} in" in message
    assert "only F32, F16, BF16 can be built from" in message


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "BOOL"])
def test_eight_bit_tensors_are_refused_before_they_are_read(tmp_path, dtype):
    folder = write(tmp_path / "m", config_values(), {})
    data = header({"model.embed_tokens.weight": entry([128, 64], 0, 8192, dtype)}, 8192)
    (folder / "model.safetensors").write_bytes(data)
    assert f"is stored as {dtype}; only F32, F16, BF16" in refusal(folder)


BAD_VALUES = [
    ("model.layers.0.linear_attn.A_log", 89.0, "holds 89.0 at 2, which becomes -inf"),
    ("model.layers.0.linear_attn.A_log", -np.inf, "holds -inf at 2"),
    ("model.layers.0.linear_attn.dt_bias", np.nan, "holds nan at 2"),
    ("model.layers.0.linear_attn.norm.weight", np.inf, "holds inf at 2"),
    ("model.norm.weight", np.nan, "holds nan at 2"),
    ("mtp.layers.0.self_attn.q_norm.weight", -np.inf, "holds -inf at 2"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD_VALUES)
def test_values_that_are_not_finite_are_refused_by_name(tmp_path, name, value, message):
    weights = WEIGHTS | {name: WEIGHTS[name].copy()}
    weights[name][2] = value
    found = refusal(one_file(tmp_path / "m", weights))
    assert f"{name!r} in" in found
    assert message in found


def test_a_file_that_changes_during_the_build_is_an_error_when_it_is_read(tmp_path):
    folder = one_file(tmp_path / "m", WEIGHTS)
    embed = read_checkpoint(folder).weights["embed"]
    one_file(folder, WEIGHTS | {"model.embed_tokens.weight": np.zeros((4, 4), np.float32)})
    with pytest.raises(CheckpointError, match="changed during the build"):
        embed.numpy()
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        embed.numpy()


MEASURE = """
import resource
from pathlib import Path
from export.safetensors_index import read_index
from export.family import Piece
from export.stored_weights import weight

stored, _ = read_index(Path({folder!r}))
tensor = weight(stored["embed"], Piece("embed"))
start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
size = sum(block.nbytes for block in tensor.blocks())
print(size, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start)
"""


def test_streaming_a_matrix_needs_the_memory_of_a_few_blocks(tmp_path):
    size = 2**28
    text = json.dumps({"embed": entry([2**16, 2**11], 0, size, "BF16")}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size)  # a sparse file: nothing is written
    root = Path(export.__file__).parent.parent
    output = subprocess.run(
        [sys.executable, "-c", MEASURE.format(folder=str(tmp_path))],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    read, grown = map(int, output.split())
    assert read == size
    assert grown < 6 * passes.streamed.BLOCK_BYTES // 1024  # kilobytes
