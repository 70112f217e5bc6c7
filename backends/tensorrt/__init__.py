"""Engines: TensorRT 11 and TensorRT-RTX from one graph and through one code path."""
