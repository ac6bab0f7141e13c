"""DraftPass: catch up with the verified rows, then guess."""

import functools
import itertools

import numpy as np
import onnx_ir as ir
import pytest
from canonical import Run, assert_complete, demo, draft_graph, oracle_drafts, tiny
from golden import assert_graph, parse
from onnx_ir.passes import PreconditionError

from passes.draft import DraftPass

HEAD = """
head (int64[1,S] next_ids, float[1,S,2] hidden, int32[1] past_length,
      float[1,C,2] "past.0.key")
    => (float[1,S,3] logits, float[1,S,2] hidden_out, float[1,C,2] "present.0.key")
<float[3,2] embed = {1, 2, 3, 4, 5, 6}, float[1,S,2] e, float[1,S,2] h, float[1,1,1] t>
{
    e = Gather(embed, next_ids)
    hidden_out = Add(e, hidden)
    f = Cast<to=1>(past_length)
    "present.0.key" = Add("past.0.key", f)
    logits = com.microsoft.FusedMatMul<transB=1>(hidden_out, embed)
}
"""
DRAFT = """
draft (int64[1,3] best, float[1,3,2] hidden, int64[1] accepted, int32[1] length,
       float[1,C,2] "past.0.key")
    => (int64[1,3] ids, float[1,C,2] "present.0.key", float[1,C,2] "present.0.key.2")
<float[3,2] embed = {1, 2, 3, 4, 5, 6}>
{
    one = Constant<value = int32[1] {1}>()
    a = Cast<to=6>(accepted)
    b = Sub(length, a)
    start = Sub(b, one)
    rows = Constant<value = int64[3] {0, 1, 2}>()
    row = Min(rows, accepted)
    tokens = Gather<axis=1>(best, row)
    states = Gather<axis=1>(hidden, row)
    e = Gather(embed, tokens)
    out = Add(e, states)
    f = Cast<to=1>(start)
    "present.0.key" = Add("past.0.key", f)
    state = Gather<axis=1>(out, accepted)
    newest = Gather<axis=1>(best, accepted)
    logits = com.microsoft.FusedMatMul<transB=1>(state, embed)
    first = ArgMax<axis=2, keepdims=0>(logits)
    e2 = Gather(embed, first)
    state2 = Add(e2, state)
    f2 = Cast<to=1>(length)
    "present.0.key.2" = Add("past.0.key", f2)
    logits2 = com.microsoft.FusedMatMul<transB=1>(state2, embed)
    second = ArgMax<axis=2, keepdims=0>(logits2)
    ids = Concat<axis=1>(newest, first, second)
}
"""


def test_a_head_becomes_a_catch_up_and_k_guesses():
    head, pass_ = parse(HEAD), DraftPass(2)
    result = pass_(head)
    assert result.modified
    assert pass_.changes == 2
    assert_graph(result.model, DRAFT)
    assert_complete(result.model)
    assert_graph(head, HEAD)  # left as it was


def test_the_same_head_gives_the_same_graph():
    head = tiny().head_graph(20)
    first, second = (
        ir.to_proto(DraftPass(3)(head).model).SerializeToString(deterministic=True)
        for _ in range(2)
    )
    assert first == second


@pytest.mark.parametrize("k", [0, -1])
def test_a_draft_without_a_guess_is_refused(k):
    with pytest.raises(ValueError, match=f"k = {k}: a draft graph makes at least one guess"):
        DraftPass(k)


REFUSED = {
    "no hidden_out": (
        HEAD.replace("hidden_out", "state"),
        "no output 'hidden_out'; there are",
    ),
    "no logits": (HEAD.replace("logits", "scores"), "no output 'logits'; there are"),
    "no next_ids": (
        HEAD.replace("next_ids", "ids"),
        "has the inputs ids, hidden, past_length",
    ),
    "no cache": (HEAD.replace('"past.0.key"', "key"), "has the inputs next_ids, hidden, past"),
    "no present": (HEAD.replace("present.0.key", "now"), r"no output 'present\.0\.key'"),
    "logits from elsewhere": (
        HEAD.replace("(hidden_out, embed)", "(e, embed)"),
        "does not make logits from hidden_out by one node",
    ),
}


@pytest.mark.parametrize(("text", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_head_is_refused_by_what_it_lacks(text, said):
    with pytest.raises(PreconditionError, match=said):
        DraftPass(2)(parse(text))


def test_a_draft_graph_is_no_head():
    with pytest.raises(PreconditionError, match="no output 'hidden_out'"):
        DraftPass(2)(DraftPass(2)(parse(HEAD)).model)


# The derived graph: one cache for every copy of the head, and the oracle's tokens.

ROWS = 64
PROMPTS = {
    "trained": (demo, [333, 2482, 65, 76, 85, 264, 10, 1009, 330, 272, 528]),
    "untied": (lambda: tiny(seed=3), [5, 99, 3, 17, 64, 2, 11, 8, 101, 45, 6]),
    "two words": (lambda: tiny(seed=5, vocab_size=2), [0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 0]),
}


class Case:
    """A checkpoint, tokens, and what the oracle drafts after them."""

    def __init__(self, checkpoint, tokens):
        self.checkpoint, self.tokens = checkpoint, tokens
        model = checkpoint.model
        self.hidden = model.forward(tokens[:-1], model.new_cache(), 0)["hidden"]
        self.drafts, rows = oracle_drafts(checkpoint, tokens, 6)
        self.cache = dict(zip(("key", "value"), rows, strict=True))


@functools.cache
def case_named(name):
    make, tokens = PROMPTS[name]
    return Case(make(), tokens)


def drafted(run, case, k, accepted, cache, garbage):
    """One draft after a forward that accepted so many rows; gives ids [k + 1]."""
    tokens, hidden = case.tokens, case.hidden
    first = len(tokens) - 2 - accepted
    feeds = {
        "best": np.full((1, k + 1), garbage),
        "hidden": np.full((1, k + 1, hidden.shape[1]), np.nan, np.float32),
        "accepted": np.array([accepted]),
        "length": np.array([len(tokens) - 1], np.int32),
    }
    feeds["best"][0, : accepted + 1] = tokens[first + 1 :]
    feeds["hidden"][0, : accepted + 1] = hidden[first:]
    ids = np.full((1, k + 1), -1)
    caches = {
        name: cache[name.split(".")[2]] for name in run.outputs if name.startswith("present.")
    }
    feeds |= {f"past.0.{part}": cache[part] for part in ("key", "value")}
    run.bound(feeds, {"ids": ids, **caches})
    return ids[0].tolist()


def cache_before(case, rows):
    """The head's cache with the true first `rows` rows and NaN behind them."""
    cache = {}
    for part, array in case.cache.items():
        cache[part] = np.full((1, array.shape[1], ROWS, array.shape[2]), np.nan, np.float32)
        cache[part][0, :, :rows] = array[:rows].transpose(1, 0, 2)
    return cache


@pytest.mark.parametrize("k", [1, 3, 6])
@pytest.mark.parametrize("name", PROMPTS)
def test_all_copies_on_one_cache_give_the_oracles_drafts_and_rows(name, k):
    case = case_named(name)
    graph = draft_graph(case.checkpoint.head_graph(ROWS), k, ROWS)
    assert_complete(graph)
    run = Run(graph)
    rows = len(case.tokens) - 1
    for accepted, garbage in itertools.product(range(k + 1), (0, 2**40, -1)):
        cache = cache_before(case, rows - accepted - 1)
        ids = drafted(run, case, k, accepted, cache, garbage)
        assert ids == [case.tokens[-1], *case.drafts[:k]]
        for part, array in case.cache.items():
            got = cache[part][0, :, :rows].transpose(1, 0, 2)
            np.testing.assert_allclose(got, array, rtol=0, atol=2e-4)


def test_each_copy_has_a_cache_output_of_its_own():
    run = Run(draft_graph(tiny().head_graph(ROWS), 3, ROWS))
    presents = [name for name in run.outputs if name.startswith("present.")]
    assert presents == [
        f"present.0.{part}{suffix}" for suffix in ("", ".2", ".3") for part in ("key", "value")
    ]


@pytest.mark.parametrize("k", [1, 3])
def test_catch_up_at_the_last_rows_of_the_cache_stays_inside(k):
    """C = capacity + M: the guesses of a step that still may start have room."""
    case = Case(tiny(seed=3), np.random.default_rng(0).integers(0, 128, ROWS - k - 1).tolist())
    run = Run(draft_graph(case.checkpoint.head_graph(ROWS), k, ROWS))
    cache = cache_before(case, len(case.tokens) - 2)
    ids = drafted(run, case, k, 0, cache, 2**40)
    assert ids == [case.tokens[-1], *case.drafts[:k]]


def test_every_copy_waits_for_the_guess_before():
    """No two copies may run at once: each reads what the one before has written."""
    graph = draft_graph(tiny().head_graph(ROWS), 4, ROWS).graph
    attention = [node for node in graph if node.op_type == "GroupQueryAttention"]
    assert len(attention) == 4
    for before, after in itertools.pairwise(attention):
        ancestors, todo = {after}, [after]
        while todo:
            for value in todo.pop().inputs:
                node = None if value is None else value.producer()
                if node is not None and node not in ancestors:
                    ancestors.add(node)
                    todo.append(node)
        assert before in ancestors
