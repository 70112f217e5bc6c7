"""Emission of ONNX: a model per rank, weights as external data."""

from irc.backends.onnx.backend import OnnxBackend, backend

__all__ = ["OnnxBackend", "backend"]
