"""ONNX Runtime on CPU: sessions over emitted models, caches bound in place, one rank or several."""

from irc.backends.onnxruntime.program import OnnxRuntimeProgram, OnnxRuntimeStream

__all__ = ["OnnxRuntimeProgram", "OnnxRuntimeStream"]
