"""The ONNX graph of a module for TensorRT, and the library's error for it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import onnx

from irc.backends.onnx.per_rank import Template
from irc.backends.onnx.storage import Storage
from irc.backends.ranks.inputs import sized
from irc.backends.tensorrt.lowering.emitter import TensorRTEmitter
from irc.backends.tensorrt.target import Target
from irc.ir.core import Module
from irc.ir.dims import Dim
from irc.weights.checkpoint import Reader

RTX = Target.parse("tensorrt-rtx-1.7")


def emitted(
    module: Module, target: Target = RTX, collectives: Any = "native", outside: bool = True
) -> onnx.ModelProto:
    """The model of a module without weights in files; of several ranks, the model they share."""
    storage = Storage(Reader(module, None), module.mesh)
    ranks = range(module.mesh.ranks)
    emitter = TensorRTEmitter(module, module.main, storage, ranks, target, collectives, outside)
    emitter.emit()
    template = Template(emitter, storage)
    return template.shared() if outside else template.model(0)


class Network:
    """Parses and builds in this process, for tests of many graphs."""

    def __init__(self) -> None:
        trt: Any = import_module("tensorrt_rtx")
        messages: list[str] = []

        class Logger(trt.ILogger):
            def log(self, severity: Any, message: str) -> None:
                if severity <= trt.Logger.WARNING and "cudaError" not in message:
                    messages.append(message)

        self._trt, self._messages, self._logger = trt, messages, Logger()

    def problem(self, model: onnx.ModelProto, module: Module) -> str:
        """The error of the library, also for an engine without one of the inputs, or ""."""
        trt = self._trt
        self._messages.clear()
        builder = trt.Builder(self._logger)
        network = builder.create_network(0)
        parser = trt.OnnxParser(network, self._logger)
        if not parser.parse(model.SerializeToString()):
            return "; ".join(parser.get_error(i).desc() for i in range(parser.num_errors))
        config = builder.create_builder_config()
        config.num_compute_capabilities = len(RTX.architectures)
        for i, each in enumerate(RTX.architectures):
            config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{each}"), i)
        profile = builder.create_optimization_profile()
        for arg in module.main.args:
            if any(isinstance(dim, Dim) for dim in arg.type.shape):
                shapes = [tuple(_size(d, n) for d in arg.type.shape) for n in (1, 2, 4)]
                profile.set_shape(str(arg.name), *shapes)
        config.add_optimization_profile(profile)
        engine = builder.build_serialized_network(network, config)
        unused = [each for each in self._messages if "Unused Input" in each]
        return "; ".join(unused if engine is not None else self._messages)


def _size(dim: Any, count: int) -> int:
    """A dimension where every symbol is `count`."""
    return sized((dim,), dict.fromkeys(dim.symbols(), count))[0] if isinstance(dim, Dim) else dim
