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


class Severity(enum.Enum):
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)


class ILogger:
    Severity = Severity


class DataType(enum.Enum):
    HALF, FLOAT = range(2)


class BuilderFlag(enum.Enum):
    REFIT, STRIP_PLAN, WEIGHT_STREAMING = range(3)


class ProfilingVerbosity(enum.Enum):
    DETAILED = 0


class MemoryPoolType(enum.Enum):
    WORKSPACE = 0


class NetworkDefinitionCreationFlag(enum.IntEnum):
    STRONGLY_TYPED = 1


class IProgressMonitor:
    pass


class IStreamWriter:
    pass


class IErrorRecorder:
    pass


class Tensor:
    def __init__(self, value: Any) -> None:
        self.name = value.name
        kinds = {1: DataType.FLOAT, 10: DataType.HALF}
        self.dtype = kinds[value.type.tensor_type.elem_type]
        dims = value.type.tensor_type.shape.dim
        self.shape = tuple(-1 if d.dim_param else d.dim_value for d in dims)


class Network:
    def __init__(self, flags: int) -> None:
        CALLS.append(["create_network", flags])
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.get_input = lambda i: self.inputs[i]
        self.get_output = lambda i: self.outputs[i]

    num_layers = 1

    def get_layer(self, index: int) -> Any:
        """One layer from all inputs to all outputs."""
        counts = {"num_inputs": self.num_inputs, "num_outputs": self.num_outputs}
        return SimpleNamespace(get_input=self.get_input, get_output=self.get_output, **counts)

    num_inputs = property(lambda self: len(self.inputs))
    num_outputs = property(lambda self: len(self.outputs))


class OnnxParser:
    def __init__(self, network: Network, logger: Any) -> None:
        self.network = network

    def parse(self, data: bytes, path: str) -> bool:
        from onnx.onnx_ml_pb2 import ModelProto

        proto: Any = ModelProto()
        proto.ParseFromString(data)
        self.network.inputs = [Tensor(each) for each in proto.graph.input]
        self.network.outputs = [Tensor(each) for each in proto.graph.output]
        return True


class TimingCache:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def serialize(self) -> bytes:
        return self.data + b"measured "


class Config:
    def __init__(self) -> None:
        self.timing: TimingCache | None = None
        self.progress_monitor: Any = None
        self.profiling_verbosity: Any = None

    def set_memory_pool_limit(self, kind: MemoryPoolType, limit: int) -> None:
        CALLS.append(["limit", kind.name, limit])

    def set_flag(self, flag: BuilderFlag) -> None:
        CALLS.append(["flag", flag.name])

    def create_timing_cache(self, data: bytes) -> TimingCache:
        return TimingCache(data)

    def set_timing_cache(self, cache: TimingCache, ignore_mismatch: bool) -> bool:
        if cache.data.startswith(b"another GPU"):
            return False
        CALLS.append(["timing", cache.data.decode()])
        self.timing = cache
        return True

    def get_timing_cache(self) -> Any:
        return self.timing

    def add_optimization_profile(self, profile: "Profile") -> int:
        CALLS.append(["profile", profile.shapes])
        return 0


class Profile:
    def __init__(self) -> None:
        self.shapes: dict[str, Any] = {}

    def set_shape(self, name: str, *shapes: Any) -> None:
        self.shapes[name] = shapes


class Builder:
    def __init__(self, logger: Any) -> None:
        self.logger = logger

    def create_network(self, flags: int = 0) -> Network:
        return Network(flags)

    def create_builder_config(self) -> Config:
        return Config()

    def create_optimization_profile(self) -> Profile:
        return Profile()

    def build_serialized_network_to_stream(
        self, network: Network, config: Config, writer: Any
    ) -> bool:
        monitor = config.progress_monitor
        monitor.phase_start("Building engine", None, 1)
        if not monitor.step_complete("Building engine", 0):
            return False
        monitor.phase_finish("Building engine")
        self.logger.log(Severity.INFO, "Total Activation Memory: 12 bytes")
        modules = [name for name in sys.modules if name.startswith("tensorrt_rtx")]
        engine = {"calls": CALLS, "modules": modules, "detail": config.profiling_verbosity.name}
        data = b"ptrt".ljust(64, b"\0") + json.dumps(engine).encode()
        return writer.write(data) == len(data)
