"""The version of this project; pyproject.toml reads it from here."""

__all__ = ["PRODUCER", "__version__"]

__version__ = "0.1.0"
PRODUCER = f"onnx-mtp {__version__}"
