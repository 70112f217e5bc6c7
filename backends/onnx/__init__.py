"""Emission of ONNX: a model per rank, weights as external data."""

from irc.backends.onnx.backend import OnnxBackend, backend
from irc.backends.onnx.graphsurgeon import to_graphsurgeon

__all__ = ["OnnxBackend", "backend", "to_graphsurgeon"]
