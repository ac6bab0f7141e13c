"""What the findings about types mean; ``artifacts.types.check`` finds them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from artifacts.findings import Severity
from export.bundles.rule import Bundle, BundleRule, Fault

__all__ = ["TYPE_RULES"]


def _found_by_the_walk(bundle: Bundle) -> Iterator[Fault]:
    del bundle
    return iter(())


TYPE_RULES: Sequence[BundleRule] = (
    BundleRule(
        code="types.clash",
        severity=Severity.ERROR,
        title="the inputs of a node have types that go together",
        explanation=(
            "ONNX Runtime refuses such a file at load and tells the first place only, without "
            "a name where it lies in the body of an operator that it inlines."
        ),
        remedy="repair brings each clash to one type with the fewest casts",
        run=_found_by_the_walk,
    ),
    BundleRule(
        code="types.value_info",
        severity=Severity.ERROR,
        title="a value has the type that is declared for it",
        explanation=(
            "Conversions change nodes and leave declarations behind; the usual checker does "
            "not compare the two, and ONNX Runtime refuses the file."
        ),
        remedy="repair drops or corrects the declaration",
        run=_found_by_the_walk,
    ),
    BundleRule(
        code="types.kernel",
        severity=Severity.ERROR,
        title="the provider has a kernel for every operator and its types",
        explanation=(
            "Types may agree and the file still not load, or run partly on the CPU: the "
            "kernels are those of the installed ONNX Runtime's own registry."
        ),
        remedy="repair --prefer carries the graph out in a type that the provider runs",
        run=_found_by_the_walk,
    ),
)
"""Severities as they are told most often; a kernel that only the CPU has is a warning."""
