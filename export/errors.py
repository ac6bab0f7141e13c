"""What can stop this room's work, as one tree.

    ExportError
    ├── BuildError          what was built is not what it must be
    ├── BundleError         a folder of another exporter is not what it must be
    └── CheckpointError     a source folder is not a checkpoint that can be built from

Each message is one sentence that names the thing, what it is, what it must be, the way out.
"""

from __future__ import annotations

__all__ = ["BuildError", "BundleError", "CheckpointError", "ExportError"]


class ExportError(Exception):
    """A build, a repair or an inspection cannot go on; the message says what to do."""


class BuildError(ExportError):
    """Source and graphs do not fit each other, or a new artifact fails its own check."""


class BundleError(ExportError):
    """A folder of another exporter is not what it must be."""


class CheckpointError(ExportError):
    """A checkpoint folder does not hold what a build needs, or holds what none can use."""
