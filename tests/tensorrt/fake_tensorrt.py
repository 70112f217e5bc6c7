"""A fake module `tensorrt` for the builder: an engine is the list of the calls.

A test copies this file as `tensorrt.py` to where the builder's process finds it. It has the names
of TensorRT 11 that TensorRT-RTX also has, and no ComputeCapability. It computes nothing.
"""

import enum
import json
import sys
from types import SimpleNamespace
from typing import Any

__version__ = "11.4.0.106"

CALLS: list[list[Any]] = []

ILogger, IProgressMonitor, IStreamWriter, IErrorRecorder = (type(each, (), {}) for each in "LPSE")
BuilderFlag = enum.Enum("BuilderFlag", "REFIT STRIP_PLAN WEIGHT_STREAMING")
ProfilingVerbosity = enum.Enum("ProfilingVerbosity", "DETAILED")
MemoryPoolType = enum.Enum("MemoryPoolType", "WORKSPACE")
NetworkDefinitionCreationFlag = enum.IntEnum("NetworkDefinitionCreationFlag", "STRONGLY_TYPED")


class Network:
    """One layer from all inputs to all outputs."""

    def __init__(self, flags: int) -> None:
        CALLS.append(["create_network", flags])
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self.num_layers = 1

    num_inputs = property(lambda self: len(self.inputs))
    num_outputs = property(lambda self: len(self.outputs))

    def get_layer(self, index: int) -> Any:
        return self

    def get_input(self, index: int) -> Any:
        return self.inputs[index]

    def get_output(self, index: int) -> Any:
        return self.outputs[index]


class OnnxParser:
    def __init__(self, network: Network, logger: Any) -> None:
        self.network = network

    def parse(self, data: bytes, path: str) -> bool:
        from onnx.onnx_ml_pb2 import ModelProto

        graph = ModelProto.FromString(data).graph
        self.network.inputs, self.network.outputs = list(graph.input), list(graph.output)
        return True


class Config:
    def __init__(self) -> None:
        self.progress_monitor: Any = None
        self.profiling_verbosity: Any = None

    def set_memory_pool_limit(self, kind: Any, limit: int) -> None:
        CALLS.append(["limit", kind.name, limit])

    def set_flag(self, flag: Any) -> None:
        CALLS.append(["flag", flag.name])

    def add_optimization_profile(self, profile: Any) -> int:
        CALLS.append(["profile", profile.shapes])
        return 0


class Builder:
    def __init__(self, logger: Any) -> None:
        self.logger = logger
        self.create_network, self.create_builder_config = Network, Config

    def create_optimization_profile(self) -> Any:
        shapes: dict[str, Any] = {}
        return SimpleNamespace(
            shapes=shapes, set_shape=lambda name, *each: shapes.update({name: each})
        )

    def build_serialized_network_to_stream(
        self, network: Network, config: Config, writer: Any
    ) -> bool:
        monitor = config.progress_monitor
        monitor.phase_start("Building engine", None, 1)
        if not monitor.step_complete("Building engine", 0):
            return False
        monitor.phase_finish("Building engine")
        self.logger.log("INFO", "Total Activation Memory: 12 bytes")
        modules = [name for name in sys.modules if name.startswith("tensorrt_rtx")]
        engine = {"calls": CALLS, "modules": modules, "detail": config.profiling_verbosity.name}
        data = b"ptrt".ljust(64, b"\0") + json.dumps(engine).encode()
        return writer.write(data) == len(data)
