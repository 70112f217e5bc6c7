"""Emission of ONNX: a model per rank, weights as external data."""

from importlib import import_module

from irc.backends.onnx.backend import OnnxBackend
from irc.backends.onnx.emitter import TABLE, Emitter, Flat

for _part in ("attention", "collective", "elementwise", "matrix", "quantized", "reduce", "shape"):
    import_module(f"irc.backends.onnx.lower_{_part}")  # each fills its part of TABLE

backend = OnnxBackend()

__all__ = ["TABLE", "Emitter", "Flat", "OnnxBackend", "backend"]
