"""ONNX Runtime on CPU: sessions over emitted models, caches bound in place, ranks as threads."""

from irc.backends.onnxruntime.parallel import ParallelProgram
from irc.backends.onnxruntime.program import OnnxRuntimeProgram
from irc.backends.onnxruntime.stream import OnnxRuntimeStream

__all__ = ["OnnxRuntimeProgram", "OnnxRuntimeStream", "ParallelProgram"]
