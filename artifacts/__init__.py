"""The contract between a build and a run: what an artifact is, on disk and in types.

Knows neither graph builders nor sessions. `artifacts.rules` alone (the static checks) reads
ONNX and is imported by its full name, so that a runner loads no graph package.
"""

from artifacts.fallback import DerivedTensor, Fallback
from artifacts.findings import Finding, Severity
from artifacts.manifest import (
    SAMPLED_RANKS,
    Buffer,
    Graph,
    Manifest,
    PassRecord,
    Port,
    Source,
    Target,
    Weights,
    WeightTensor,
)
from artifacts.parse import Fields, ParseError, read_json
from artifacts.spec import AttentionSpec, GdnSpec, HeadSpec, LayerKind, ModelSpec

__all__ = [
    "AttentionSpec",
    "Buffer",
    "DerivedTensor",
    "Fallback",
    "Fields",
    "Finding",
    "GdnSpec",
    "Graph",
    "HeadSpec",
    "LayerKind",
    "Manifest",
    "ModelSpec",
    "ParseError",
    "PassRecord",
    "Port",
    "SAMPLED_RANKS",
    "Severity",
    "Source",
    "Target",
    "WeightTensor",
    "Weights",
    "read_json",
]
