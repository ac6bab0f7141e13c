"""Bundles of other exporters as a `ModelSpec` and canonical weights, told by structure."""

from export.importing.bundle import import_bundle

__all__ = ["import_bundle"]
