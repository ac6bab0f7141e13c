"""Element types through whole ONNX models, and the kernels that a provider has for them.

Reads ONNX, so it is imported by its full name, as `artifacts.rules` is, never by a runner.
"""
