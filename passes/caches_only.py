"""A head that drafts nothing and only takes rows in."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from passes.counted import CountedPass

__all__ = ["CachesOnlyPass"]


class CachesOnlyPass(CountedPass):
    """Keep of a head what fills its cache.

        before   logits, hidden_out, present.0.* = head(next_ids, hidden, past.0.*)
        after    present.0.* = head(next_ids, hidden, past.0.*)

    LM head, feed-forward and output projection fall away; what is left reads a small part of
    the head's weights, so rows that the head has missed are cheap to take in at once.
    """

    def rewrite(self, model: ir.Model) -> int:
        """See the class."""
        outputs = model.graph.outputs
        kept = [value for value in outputs if (value.name or "").startswith("present.")]
        dropped = len(outputs) - len(kept)
        if dropped:
            outputs[:] = kept
            RemoveUnusedNodesPass()(model)
        return dropped
