"""Function bodies that a file brings along: those of operators stay calls, others go in."""

from __future__ import annotations

import onnx
import onnx.inliner

from artifacts.types.table import signature
from export.bundles.graph_index import GraphIndex
from export.errors import BundleError

__all__ = ["inlined"]

NEWEST = 100
"""A version of the default operators that is above all others."""


def inlined(index: GraphIndex) -> GraphIndex:
    """The graph with every function written out but those named as ONNX Runtime's operators.

    For the latter ONNX Runtime takes its kernel where it has one, so the call says what is
    meant.
    """
    model = index.model
    names = [
        (f.domain, f.name)
        for f in model.functions
        if signature(f.name, f.domain, NEWEST) is None
    ]
    if not names:
        return index
    try:
        return GraphIndex(onnx.inliner.inline_selected_functions(model, names))
    except (RuntimeError, ValueError) as e:
        raise BundleError(f"the function {names[0][1]} cannot be written out: {e}") from e
