"""Tiny checkpoints for tests, and what their weights must become, by plain NumPy."""

import dataclasses
import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import export
from artifacts import HeadSpec
from export.checkpoint import read_checkpoint
from export.errors import CheckpointError

ORACLE = Path(__file__).parent / "oracle"
if str(ORACLE) not in sys.path:  # its modules import one another by bare names
    sys.path.insert(0, str(ORACLE))

from checkpoint import load_weights  # noqa: E402
from tiny_reference import random_weights, split_fused_gdn, tiny_config  # noqa: E402

__all__ = [
    "WEIGHTS",
    "MTP",
    "DECODER",
    "assert_weights",
    "refusal",
    "header",
    "entry",
    "BF16",
    "CONFIG",
    "DEMO",
    "HEAD",
    "config_values",
    "expected",
    "fused",
    "load_weights",
    "one_file",
    "random_weights",
    "stored_as",
    "tied_config",
    "tiny_config",
    "wrapped",
    "write",
]

DEMO = Path(export.__file__).parent / "demo" / "tiny-hybrid-mtp"
BF16 = np.dtype(ml_dtypes.bfloat16)

CONFIG = tiny_config()
HEAD = HeadSpec(
    layers=1,
    hidden_source="post_norm",
    feedback="post_norm",
    concat="embed_first",
    cache="own",
    intermediate_size=96,
)
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "linear_num_key_heads"),
    *("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
)


def config_values(config=CONFIG, **changes):
    """A config.json; a change of None takes the key away."""
    values = {
        "model_type": "qwen3_5_text",
        **{key: getattr(config, key) for key in SIZES},
        "layer_types": config.layer_types,
        "rope_parameters": ROPE,
        "tie_word_embeddings": config.tie_word_embeddings,
        "eos_token_id": 7,
    }
    return {k: v for k, v in (values | changes).items() if v is not None}


def wrapped(values, **changes):
    return {"model_type": "qwen3_5", "text_config": values} | changes


def write(folder, values, files, index=None):
    """A folder with config.json and safetensors files, {name: tensors}."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    if index is not None:
        text = json.dumps({"metadata": {}, "weight_map": index})
        (folder / "model.safetensors.index.json").write_text(text)
    return folder


def one_file(folder, weights, values=None):
    values = config_values() if values is None else values
    return write(folder, values, {"model.safetensors": weights})


def stored_as(weights, dtype):
    """As published: A_log and the norm of the Gated DeltaNet stay float32."""
    kept = ("A_log", "linear_attn.norm.weight")
    return {k: v if k.endswith(kept) else v.astype(dtype) for k, v in weights.items()}


def fused(config, seed=3):
    """Qwen3-Next weights, and the same with the projections split by the oracle."""
    split = random_weights(config, seed=seed)
    packed = dict(split)
    rng = np.random.default_rng(seed)
    for i, kind in enumerate(config.layer_types):
        if kind == "full_attention":
            continue
        q = f"model.layers.{i}.linear_attn."
        rows = 2 * config.key_dim + 2 * config.value_dim
        shapes = (rows, config.hidden_size), (2 * config.linear_num_value_heads, 64)
        qkvz, ba = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
        parts = split_fused_gdn(qkvz, ba, config)
        for part, value in zip(("qkv", "z", "b", "a"), parts, strict=True):
            split[f"{q}in_proj_{part}.weight"] = value
            del packed[f"{q}in_proj_{part}.weight"]
        packed |= {f"{q}in_proj_qkvz.weight": qkvz, f"{q}in_proj_ba.weight": ba}
    return packed, split


def expected(weights, config=CONFIG, prefix="model."):
    """Canonical weights by name, computed with NumPy from split weights."""

    def one_plus(name):
        return np.float32(1) + weights[name].astype(np.float32)

    def layer(source, target, kind):
        yield f"{target}.input_norm", one_plus(f"{source}.input_layernorm.weight")
        yield f"{target}.post_norm", one_plus(f"{source}.post_attention_layernorm.weight")
        for part in ("gate", "up", "down"):
            yield f"{target}.mlp.{part}", weights[f"{source}.mlp.{part}_proj.weight"]
        if kind == "linear_attention":
            s, t = f"{source}.linear_attn.", f"{target}.gdn."
            for part in ("qkv", "z", "b", "a"):
                yield t + part, weights[f"{s}in_proj_{part}.weight"]
            yield t + "conv", weights[s + "conv1d.weight"]
            yield t + "decay_scale", -np.exp(weights[s + "A_log"].astype(np.float32))
            yield t + "dt_bias", weights[s + "dt_bias"].astype(np.float32)
            yield t + "norm", weights[s + "norm.weight"].astype(np.float32)
            yield t + "out", weights[s + "out_proj.weight"]
        else:
            s, t = f"{source}.self_attn.", f"{target}.attention."
            shape = (config.num_attention_heads, 2, config.head_dim, config.hidden_size)
            packed = weights[s + "q_proj.weight"].reshape(shape)
            yield t + "q", packed[:, 0].reshape(-1, config.hidden_size)
            yield t + "gate", packed[:, 1].reshape(-1, config.hidden_size)
            for part in ("k", "v", "o"):
                yield t + part, weights[f"{s}{part}_proj.weight"]
            yield t + "q_norm", one_plus(s + "q_norm.weight")
            yield t + "k_norm", one_plus(s + "k_norm.weight")

    out = {"embed": weights[f"{prefix}embed_tokens.weight"]}
    for i, kind in enumerate(config.layer_types):
        out |= layer(f"{prefix}layers.{i}", f"layers.{i}", kind)
    out["norm"] = one_plus(f"{prefix}norm.weight")
    if not config.tie_word_embeddings:
        out["lm_head"] = weights["lm_head.weight"]
    if "mtp.fc.weight" in weights:
        out["head.fc"] = weights["mtp.fc.weight"]
        out["head.embed_norm"] = one_plus("mtp.pre_fc_norm_embedding.weight")
        out["head.hidden_norm"] = one_plus("mtp.pre_fc_norm_hidden.weight")
        out["head.norm"] = one_plus("mtp.norm.weight")
        out |= layer("mtp.layers.0", "head.layers.0", "full_attention")
    return out


def tied_config():
    return dataclasses.replace(CONFIG, tie_word_embeddings=True)


WEIGHTS = random_weights(CONFIG)

MTP = {name: value for name, value in WEIGHTS.items() if name.startswith("mtp.")}

DECODER = {name: value for name, value in WEIGHTS.items() if name not in MTP}


def assert_weights(checkpoint, want):
    """Equal to the last bit, dtype and name included."""
    assert checkpoint.weights.keys() == want.keys()
    for name, value in want.items():
        got = checkpoint.weights[name]
        assert got.name == name
        assert got.dtype.numpy() == value.dtype, name
        assert tuple(got.shape.numpy()) == value.shape, name
        np.testing.assert_array_equal(got.numpy(), value, err_msg=name)


def refusal(folder):
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def header(values, size):
    text = json.dumps(values).encode()
    return len(text).to_bytes(8, "little") + text + bytes(size)


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
