"""Bundles that other exporters wrote: found, described, without reading weights."""

from export.bundles.describe import BundleDescription, inspect_bundle
from export.bundles.layout import BundleLayout, Exporter, find_layout
from export.bundles.render import render
from export.errors import BundleError

__all__ = [
    "BundleDescription",
    "BundleError",
    "BundleLayout",
    "Exporter",
    "find_layout",
    "inspect_bundle",
    "render",
]
