"""What the head leaves in its cache, without the rest of it."""

import numpy as np
import pytest
from canonical import Run, assert_complete, demo, tiny
from golden import unchanged

from passes.caches_only import CachesOnlyPass

ROWS = 48


@pytest.mark.parametrize("checkpoint", [tiny(seed=2), demo()], ids=["random", "trained"])
def test_the_cache_is_that_of_the_whole_head_bit_for_bit(checkpoint):
    whole, part = checkpoint.head_graph(ROWS), checkpoint.head_graph(ROWS)
    removed = CachesOnlyPass()
    removed(part)
    assert removed.changes == 2  # logits and hidden_out
    assert_complete(part)
    assert len(part.graph) < len(whole.graph)
    rng = np.random.default_rng(1)
    feeds = {
        "next_ids": rng.integers(0, checkpoint.config.vocab_size, (1, 9)),
        "hidden": rng.standard_normal((1, 9, checkpoint.config.hidden_size), np.float32),
        "past_length": np.array([5], np.int32),
    }
    for name in ("past.0.key", "past.0.value"):
        shape = next(v.shape for v in whole.graph.inputs if v.name == name)
        sizes = [ROWS if not isinstance(n, int) else n for n in shape]
        feeds[name] = rng.standard_normal(sizes, np.float32)
    want, got = Run(whole)(feeds), Run(part)(feeds)
    assert got.keys() == {"present.0.key", "present.0.value"}
    for name, values in got.items():
        np.testing.assert_array_equal(values, want[name], err_msg=name)


def test_lm_head_and_feed_forward_are_gone_and_a_second_call_changes_nothing():
    model = tiny().head_graph(ROWS)
    CachesOnlyPass()(model)
    left = " ".join(model.graph.initializers)
    for gone in ("lm_head", "mlp", "attention.o", "head.norm"):
        assert gone not in left
    for kept in ("embed", "head.fc", "attention.k", "attention.v"):
        assert kept in left
    assert unchanged(CachesOnlyPass(), model)
