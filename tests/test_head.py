"""The canonical head against the NumPy oracle."""

import dataclasses

import numpy as np
import onnx_ir as ir
import pytest
from canonical import Run, assert_complete, demo, greedy_cases, oracle_drafts, tiny

from export.head import build_head

ROWS = 96
TOLERANCE = 2e-4  # as for the target


def forward(run, next_ids, hidden, states, length):
    feeds = {
        "next_ids": np.array([next_ids]),
        "hidden": np.asarray(hidden, np.float32)[None],
        "past_length": np.array([length], np.int32),
    }
    out = run(feeds | states)
    return out, {f"past.0.{part}": out[f"present.0.{part}"] for part in ("key", "value")}


def prompt_of(checkpoint, ids):
    """The oracle's target over a prompt, and the token after each of its rows."""
    out = checkpoint.model.forward(ids, checkpoint.model.new_cache(), 0)
    return out, [*ids[1:], int(out["logits"][-1].argmax())]


def prompts():
    cases = [(demo(), case["prompt_ids"]) for case in greedy_cases()]
    tied = {"tie_word_embeddings": True, "linear_num_value_heads": 2}
    cases += [(tiny(seed=3), [5, 99, 3, 17, 64, 2]), (tiny(seed=4, **tied), [9, 8, 7, 1])]
    return [*cases, (tiny(seed=5, vocab_size=2), [0, 1, 1, 0])]


IDS = ["trained 1", "trained 2", "trained 3", "untied", "tied", "two words"]


@pytest.mark.parametrize(("checkpoint", "ids"), prompts(), ids=IDS)
def test_a_prompt_gives_what_the_oracle_gives(checkpoint, ids):
    graph = checkpoint.head_graph(ROWS)
    assert_complete(graph)
    run, (out, following) = Run(graph), prompt_of(checkpoint, ids)
    cache = checkpoint.head.new_cache()
    m, logits = checkpoint.head.forward(following, out["hidden"], cache, 0)
    got, states = forward(run, following, out["hidden"], run.zeros(ROWS), 0)
    np.testing.assert_allclose(got["hidden_out"][0], m, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(got["logits"][0], logits, rtol=0, atol=TOLERANCE)
    for part, want in (("key", cache[0].k), ("value", cache[0].v)):
        rows = states[f"past.0.{part}"][0, :, : len(ids)].transpose(1, 0, 2)
        np.testing.assert_allclose(rows, want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("checkpoint", "ids"), prompts(), ids=IDS)
def test_up_to_six_recursive_drafts_are_the_oracles(checkpoint, ids):
    run, (out, following) = Run(checkpoint.head_graph(ROWS)), prompt_of(checkpoint, ids)
    want, _ = oracle_drafts(checkpoint, [*ids, following[-1]], 6)
    got, states = forward(run, following, out["hidden"], run.zeros(ROWS), 0)
    drafts = [int(got["logits"][0, -1].argmax())]
    for length in range(len(ids), len(ids) + 5):
        got, states = forward(run, drafts[-1:], got["hidden_out"][0, -1:], states, length)
        drafts.append(int(got["logits"][0, -1].argmax()))
    assert drafts == want  # k of them are the first k


@pytest.mark.parametrize("case", range(3))
def test_the_pre_norm_hidden_state_is_told_from_the_right_one(case):
    """Acceptance would not tell: the final norm's weights are nearly equal. Values do."""
    checkpoint = demo()
    run = Run(checkpoint.head_graph(ROWS))
    out, following = prompt_of(checkpoint, greedy_cases()[case]["prompt_ids"])
    m, logits = checkpoint.head.forward(
        following, out["hidden"], checkpoint.head.new_cache(), 0
    )
    wrong, _ = forward(run, following, out["pre_norm"], run.zeros(ROWS), 0)
    assert np.abs(wrong["hidden_out"][0] - m).max() > 100 * TOLERANCE
    assert np.abs(wrong["logits"][0] - logits).max() > 100 * TOLERANCE


def test_the_wrong_order_before_fc_is_told_from_the_right_one():
    checkpoint = demo()
    out, following = prompt_of(checkpoint, greedy_cases()[0]["prompt_ids"])
    m, _ = checkpoint.head.forward(following, out["hidden"], checkpoint.head.new_cache(), 0)
    graph = checkpoint.head_graph(ROWS)
    joined = next(node for node in graph.graph if node.op_type == "Concat")
    first, second = joined.inputs
    joined.replace_input_with(0, second)
    joined.replace_input_with(1, first)
    run = Run(graph)
    wrong, _ = forward(run, following, out["hidden"], run.zeros(ROWS), 0)
    assert np.abs(wrong["hidden_out"][0] - m).max() > 0.1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layers": 2}, "layers = 2; only 1"),
        ({"hidden_source": "pre_norm"}, "hidden_source = 'pre_norm'; only 'post_norm'"),
        ({"feedback": "pre_norm"}, "feedback = 'pre_norm'; only 'post_norm'"),
        ({"concat": "hidden_first"}, "concat = 'hidden_first'; only 'embed_first'"),
        ({"cache": "target"}, "cache = 'target'; only 'own'"),
    ],
)
def test_a_head_of_another_kind_is_refused(change, said):
    spec = tiny().spec
    spec = dataclasses.replace(spec, head=dataclasses.replace(spec.head, **change))
    with pytest.raises(ValueError, match=said):
        build_head(spec, dtype=ir.DataType.FLOAT, cache_rows=8)


def test_a_model_without_a_head_is_refused():
    spec = dataclasses.replace(tiny().spec, head=None)
    with pytest.raises(ValueError, match="the qwen3_5_text model has no MTP head"):
        build_head(spec, dtype=ir.DataType.FLOAT, cache_rows=8)


def test_the_feed_forward_may_have_a_width_of_its_own():
    spec = tiny().spec
    spec = dataclasses.replace(spec, head=dataclasses.replace(spec.head, intermediate_size=40))
    weights = build_head(spec, dtype=ir.DataType.FLOAT, cache_rows=8).graph.initializers
    assert weights["head.layers.0.mlp.up"].shape == [40, 64]
    assert weights["head.layers.0.mlp.down"].shape == [64, 40]


def test_embedding_and_vocabulary_are_the_targets_by_name():
    for checkpoint, names in ((tiny(), {"embed", "lm_head"}), (demo(), {"embed"})):
        target = checkpoint.target_graph(8).graph.initializers
        head = checkpoint.head_graph(8).graph.initializers
        assert names <= {n for n in head if not n.startswith("head.")}
        for name in set(head) & set(target):
            assert (head[name].dtype, head[name].shape) == (
                target[name].dtype,
                target[name].shape,
            )
        assert {n for n in head if not n.startswith("head.")} == names | {
            "rotary.cos",
            "rotary.sin",
        }
