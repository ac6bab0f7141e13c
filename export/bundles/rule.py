"""What a rule about a bundle is, and what all of them look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from artifacts.findings import Severity
from export.bundles.describe import BundleDescription
from export.bundles.graph_index import GraphIndex
from export.bundles.layout import BundleLayout

__all__ = ["Bundle", "BundleRule", "Fault"]

Fault = tuple[str, str]
"""A place and what is wrong there."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle under check, each graph parsed once."""

    layout: BundleLayout
    graphs: Mapping[str, GraphIndex]
    """By role: ``target``, ``head``."""
    description: BundleDescription
    provider: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleRule:
    """A named check that yields the places where it fails."""

    code: str
    severity: Severity
    title: str
    """What must hold."""
    explanation: str
    """Why it must."""
    remedy: str
    run: Callable[[Bundle], Iterator[Fault]]
