"""What is wrong with a bundle, told without reading its weights or running it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from artifacts.findings import Finding
from artifacts.types.check import check_types
from export.bundles.describe import inspect_bundle, load_graphs
from export.bundles.layout import find_layout
from export.bundles.rule import Bundle, BundleRule
from export.bundles.rules_files import FILE_RULES
from export.bundles.rules_graphs import GRAPH_RULES
from export.bundles.rules_head import HEAD_RULES

__all__ = ["RULES", "check_bundle"]

RULES: Sequence[BundleRule] = (*FILE_RULES, *GRAPH_RULES, *HEAD_RULES)
"""All rules but those about types, which ``artifacts.types.check`` describes."""


def check_bundle(folder: Path, provider: str = "cpu") -> list[Finding]:
    """All findings: types first, by graph, then files, graphs and the head.

    `provider` is ``cpu`` or ``cuda``: which kernels must exist and what is inlined.

    Raises:
        BundleError: When there is no bundle, or its graphs cannot be read.
    """
    layout = find_layout(folder)
    graphs = load_graphs(layout)
    bundle = Bundle(layout, graphs, inspect_bundle(folder), provider)
    findings = [
        finding
        for role, index in graphs.items()
        for finding in check_types(index.model, role, provider)
    ]
    for rule in RULES:
        findings += [
            Finding(rule.code, rule.severity, place, message, rule.remedy)
            for place, message in rule.run(bundle)
        ]
    return findings
