"""The derived graphs as a whole: which state is committed, and what never comes through."""

import numpy as np
import pytest
from canonical import (
    CAPACITY,
    Loop,
    assert_complete,
    assert_in_place_order,
    decode_graph,
    demo,
    greedy,
    greedy_cases,
    speculative,
    tiny,
    verify_graph,
)

CHECKPOINTS = {
    "trained": demo,
    "untied, r=3": lambda: tiny(seed=2),
    "two words": lambda: tiny(seed=3, vocab_size=2),
    "two taps": lambda: tiny(seed=4, linear_conv_kernel_dim=2),
}
PROMPT = [1, 0, 1, 1, 0, 1]


@pytest.fixture(scope="module", params=CHECKPOINTS)
def loop(request):
    """k = 3 over one checkpoint; a fresh state comes from `start`."""
    checkpoint = CHECKPOINTS[request.param]()
    made = Loop(checkpoint, 3)
    made.checkpoint, made.truths = checkpoint, {}
    return made


def start(loop, prompt=PROMPT):
    """Prefilled buffers, and the greedy continuation."""
    loop.reset()
    loop.feed_prompt(prompt)
    key = tuple(prompt)
    if key not in loop.truths:
        count = 13 if len(prompt) < 20 else 6
        loop.truths[key] = greedy(loop.checkpoint.model, prompt, count)[len(prompt) :]
    return loop.truths[key]


def check_committed(loop, tokens):
    """Every state and cache row that counts is the oracle's after `tokens`."""
    cache = loop.checkpoint.model.new_cache()
    loop.checkpoint.model.forward(tokens, cache, 0)
    assert loop.buffers["length"].tolist() == [len(tokens)]
    for i, kind in enumerate(loop.checkpoint.config.layer_types):
        if kind == "linear_attention":
            got = (
                loop.buffers[f"target.{i}.conv"][0].T,
                loop.buffers[f"target.{i}.recurrent"][0],
            )
            want = cache[i].conv, cache[i].S
        else:
            names = (f"target.{i}.key", f"target.{i}.value")
            got = [loop.buffers[n][0, :, : len(tokens)].transpose(1, 0, 2) for n in names]
            want = cache[i].k, cache[i].v
        for one, other in zip(got, want, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=2e-4)


def forced(loop, truth, right):
    """k drafts of which the first `right` are the true ones and the next is wrong."""
    drafts = list(truth[: loop.k])
    words = loop.checkpoint.config.vocab_size
    for j in range(right, loop.k):
        drafts[j] = (drafts[j] + 1) % words
    return drafts


@pytest.mark.parametrize("right", range(4))
def test_every_accepted_count_commits_the_state_after_its_last_row(loop, right):
    truth = start(loop)
    emitted = loop.step(drafts=forced(loop, truth[1:], right))
    assert emitted == truth[1 : 2 + right]
    check_committed(loop, [*PROMPT, *truth[: 1 + right]])


@pytest.mark.parametrize("count", range(4))
def test_drafts_that_do_not_count_are_not_accepted_though_right(loop, count):
    truth = start(loop)
    emitted = loop.step(draft_count=count, drafts=truth[1:4])
    assert emitted == truth[1 : 2 + count]
    check_committed(loop, [*PROMPT, *truth[: 1 + count]])


SEQUENCES = {
    "no draft after a run": [(3, 3), (0, 0), (2, 3)],
    "two rejections in a row": [(0, 3), (0, 3), (3, 3)],
    "run, rejection, run": [(3, 3), (1, 3), (2, 2), (0, 1)],
}


@pytest.mark.parametrize("steps", SEQUENCES.values(), ids=SEQUENCES)
def test_steps_one_after_the_other_stay_on_the_greedy_path(loop, steps):
    truth = start(loop)
    at = 0
    for right, count in steps:
        drafts = forced(loop, truth[at + 1 :], right)
        emitted = loop.step(draft_count=count, drafts=drafts)
        assert emitted == truth[at + 1 : at + 2 + right]
        at += 1 + right
        check_committed(loop, [*PROMPT, *truth[:at]])


def test_the_last_rows_of_the_cache_can_be_accepted(loop):
    """A step may start while length + 1 + draft_count is within the capacity."""
    prompt = (PROMPT * 20)[: CAPACITY - 1 - loop.k]
    truth = start(loop, prompt)
    emitted = loop.step(drafts=truth[1:4])
    assert emitted == truth[1:5]
    assert loop.buffers["length"][0] == CAPACITY
    check_committed(loop, [*prompt, *truth[:4]])


def test_one_token_fits_with_all_drafts_as_padding(loop):
    prompt = (PROMPT * 20)[: CAPACITY - 1]
    truth = start(loop, prompt)
    assert loop.step(draft_count=0) == truth[1:2]
    check_committed(loop, [*prompt, truth[0]])


@pytest.mark.parametrize("count", range(4))
def test_padding_and_what_lies_about_leave_every_bit_that_counts(loop, count):
    """Ids behind the drafts, unused cache rows and old outputs: none of it comes through."""
    truth = start(loop)
    feeds = {name: loop.buffers[loop._buffer(name)].copy() for name in loop.verify.inputs} | {
        "draft_count": np.array([count], np.int32)
    }
    feeds["input_ids"] = np.array([truth[:4]])
    results = []
    rng = np.random.default_rng(count)
    for fill in ("true", "random", "outside", "negative"):
        now = {name: value.copy() for name, value in feeds.items()}
        ids = now["input_ids"][0, 1 + count :]
        if fill != "true":
            low, high = {"random": (0, 2), "outside": (2**40, 2**50)}.get(fill, (-(2**50), -1))
            ids[:] = rng.integers(low, high, len(ids))
            for name, value in now.items():
                if name.endswith((".key", ".value")):
                    value[:, :, len(PROMPT) :] = np.nan if fill == "outside" else 7e30
        outputs = {
            name: np.full(value.shape, np.nan, np.float32)
            if "float" in value.type
            else np.full(value.shape, -1, np.int32 if "int32" in value.type else np.int64)
            for name, value in loop.verify.outputs.items()
        }
        loop.verify.bound(now, outputs)
        results.append(outputs)
    kept = 1 + count
    assert results[0]["accepted"][0] == count
    for name, first in results[0].items():
        for other in results[1:]:
            one, two = first, other[name]
            if name in ("logits", "hidden", "best"):
                one, two = one[:, :kept], two[:, :kept]
            elif name == "result":
                one, two = one[: 2 + kept], two[: 2 + kept]
            elif name.endswith((".key", ".value")):
                one, two = one[:, :, : len(PROMPT) + kept], two[:, :, : len(PROMPT) + kept]
            assert np.isfinite(two).all(), name
            np.testing.assert_array_equal(one, two, err_msg=name)


@pytest.mark.parametrize("k", [1, 2, 3, 7])
@pytest.mark.parametrize("in_place", [False, True], ids=["copied", "in place"])
def test_a_whole_run_is_the_oracles_token_by_token_and_draft_by_draft(k, in_place):
    checkpoint, prompt = tiny(seed=6, tie_word_embeddings=True), [3, 1, 4, 1, 5]
    loop = Loop(checkpoint, k, in_place=in_place)
    want = greedy(checkpoint.model, prompt, 32)[len(prompt) :]
    _, stats = speculative(checkpoint.model, checkpoint.head, prompt, 32, k)
    for chunk in (None, 1, 2):
        tokens, accepted = loop.generate(prompt, 32, chunk)
        assert tokens == want
        assert (len(accepted), sum(accepted)) == (stats.rounds, stats.accepted)
    assert loop.generate_greedy(prompt, 32) == want


@pytest.mark.parametrize("in_place", [False, True], ids=["copied", "in place"])
def test_the_trained_checkpoint_continues_as_transformers_did_in_as_few_steps(in_place):
    loop = Loop(demo(), 3, in_place=in_place)
    rounds = 0
    for case in greedy_cases():
        tokens, accepted = loop.generate(case["prompt_ids"], 48, chunk=16)
        assert tokens == case["output_ids"]
        rounds += len(accepted)
        assert loop.generate_greedy(case["prompt_ids"], 48, chunk=16) == tokens
    assert rounds == 48  # greedy.json's own figures: 48 rounds with k = 3


def test_updating_in_place_gives_the_same_bits():
    copied, in_place = (Loop(demo(), 3, in_place=place) for place in (False, True))
    for loop in (copied, in_place):
        loop.feed_prompt(greedy_cases()[1]["prompt_ids"], chunk=11)
        for count in (3, 3, 0, 2, 3):
            loop.step(draft_count=count)
        loop.run(loop.decode)
        loop.run(loop.decode)
    length = copied.buffers["length"][0]
    for name, value in copied.buffers.items():
        other = in_place.buffers[name]
        if name.endswith((".key", ".value")):
            # the head has the rows that were drafted from; decode writes none of them
            rows = length if name.startswith("target.") else length - 6
            value, other = value[:, :, :rows], other[:, :, :rows]
        np.testing.assert_array_equal(value, other, err_msg=name)


def test_readers_of_what_is_updated_in_place_run_before_its_writer():
    for checkpoint in (demo(), tiny(seed=2)):
        target = checkpoint.target_graph(20)
        assert_in_place_order(verify_graph(target, 3, 20))
        assert_in_place_order(decode_graph(target, 20))


@pytest.mark.parametrize("k", [1, 3, 7])
def test_derived_graphs_keep_types_names_and_order(k):
    for checkpoint in (demo(), tiny(seed=2), tiny(vocab_size=2)):
        target = checkpoint.target_graph(20)
        for graph in (verify_graph(target, k, 20), decode_graph(target, 20)):
            assert_complete(graph)
            before = [node.name for node in graph.graph]
            graph.graph.sort()
            assert [node.name for node in graph.graph] == before
