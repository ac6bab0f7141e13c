"""Operators of our own for ONNX Runtime's CUDA provider, built from source where nvcc is."""
