"""TensorRT in numpy: engines that interpret the module of their artifact on a fake or real GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import numpy as np

from irc.analysis.stages import stages_of
from irc.backends.cuda.group import Group
from irc.backends.reference.execute import Executor
from irc.backends.reference.inputs import bind_inputs
from irc.backends.reference.weights import Weights
from irc.backends.tensorrt.plugins import communicators
from irc.backends.tensorrt.plugins.adapter import DATA_TYPES
from irc.backends.tensorrt.runtime.engine import Shape
from irc.errors import Error
from irc.ir.core import Function, Value, Weight
from irc.ir.dims import Dim
from irc.ir.dtypes import numpy_dtype
from irc.ops.collective import Collective
from irc.text import parse_module
from tests.tensorrt.fake_gpu import STREAMS, Array, FakeDriver
from tests.tensorrt.fake_nccl import FakeNccl

MARK = b"\0fake engine\0"


class Artifact:
    """An artifact's folder, as the engines of all ranks of a test read it."""

    def __init__(self, folder: Path, facts: Mapping[str, Any]) -> None:
        self.folder, self.facts = folder, facts
        path = folder / "module.irc"
        self.module = parse_module(path.read_text(), str(path))
        base = facts.get("base") or folder
        self.stages = stages_of(self.module)
        self.weights = Weights(self.module, base)


class Device(Protocol):
    """The GPU of an engine, a fake or a real one."""

    memory: Any
    groups: list[Group]

    def enqueue(self, work: Callable[[], None], stream: int, *call: Any) -> None:
        """Run work in the order of a stream."""
        ...

    def meet(self, group: Group, array: Array) -> list[Array]:
        """The arrays of all ranks of a group."""
        ...


class FakeDevice:
    """See Device."""

    def __init__(self, driver: FakeDriver, nccl: FakeNccl) -> None:
        self.memory, self.groups, self.meet = driver.memory, driver.groups, nccl.meet

    def enqueue(self, work: Callable[[], None], stream: int, *call: Any) -> None:
        STREAMS[stream].enqueue(work, *call)


class ILogger:
    """See TensorRT."""


class IErrorRecorder:
    """See TensorRT."""


class EngineInvalidityDiagnostics(IntEnum):
    """See TensorRT-RTX."""

    VERSION_MISMATCH, UNSUPPORTED_CC, MALFORMED_ENGINE = 1, 2, 32


class FakeTensorRT:
    """The module tensorrt_rtx on one rank; tests set faults of its engines.

    `skew` is added to every result. It takes a file apart as it was written by runtime_world.py.
    """

    __name__ = "fake_tensorrt"
    ILogger, IErrorRecorder = ILogger, IErrorRecorder
    EngineInvalidityDiagnostics = EngineInvalidityDiagnostics
    TensorLocation = TensorIOMode = SimpleNamespace(DEVICE="device", OUTPUT="output")
    ExecutionContextAllocationStrategy = SimpleNamespace(ON_PROFILE_CHANGE="on profile change")
    can_capture, skew = True, 0.0

    def __init__(self, artifact: Artifact, rank: int, device: Device) -> None:
        self.artifact, self.rank, self.device = artifact, rank, device
        self.contexts: list[Context] = []

    def get_plugin_registry(self) -> Any:
        return SimpleNamespace(get_creator=lambda *names: self)

    def Runtime(self, logger: Any) -> Any:
        return SimpleNamespace(
            deserialize_cuda_engine=lambda data: self._engine(bytes(data)),
            get_engine_validity=lambda data: (2, EngineInvalidityDiagnostics.MALFORMED_ENGINE),
        )

    def _engine(self, data: bytes) -> Engine | None:
        if not data.startswith(MARK + b"{") or not data.endswith(b"}"):
            return None
        return Engine(self, json.loads(data.partition(MARK)[2]))


class Tensor(NamedTuple):
    """An input or output of an engine; a dynamic dimension is -1."""

    dtype: str
    shape: Shape
    output: bool


class Engine:
    """An ICudaEngine: a stage of the module. `own` is the content of the engine's file."""

    def __init__(self, trt: FakeTensorRT, own: Any) -> None:
        self.trt, self.artifact = trt, trt.artifact
        self.stage = self.artifact.stages[own["stage"]]
        self.facts = self.artifact.facts["stages"][own["stage"]]
        self.function: Function = self.stage.function
        self.num_optimization_profiles = own.get("profiles", max(1, len(self.facts["profiles"])))
        self.outputs = {each["result"]: each["output"] for each in self.facts["results"]}
        self.tensors: dict[str, Tensor] = {}
        for arg in self.function.args:
            self._add(str(arg.name), arg.type.dtype, arg.type.shape, False)
        values = zip(self.function.result_names(), self.function.returned, strict=True)
        for name, value in values:
            self._add(self.outputs[name], value.type.dtype, value.type.shape, True)
        for name in self.facts["scalars"]:
            self._add(name, "i32", (), False)
        for name, each in own.get("weights", {}).items():
            self._add(name, each["dtype"], each["shape"], False)
        self.num_io_tensors = len(self.tensors)

    def _add(self, name: str, dtype: str, shape: Sequence[Any], output: bool) -> None:
        dims = tuple(-1 if isinstance(dim, Dim) else int(dim) for dim in shape)
        self.tensors[name] = Tensor(dtype, dims, output)

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_dtype(self, name: str) -> Any:
        dtype = self.tensors[name].dtype
        return SimpleNamespace(name=DATA_TYPES.get(dtype, dtype))

    def get_tensor_location(self, name: str) -> str:
        return "device"

    def get_tensor_mode(self, name: str) -> str:
        return "output" if self.tensors[name].output else "input"

    def get_tensor_shape(self, name: str) -> Shape:
        return self.tensors[name].shape

    def get_aliased_input_tensor(self, output: str) -> str | None:
        found = [e.get("state") for e in self.facts["results"] if e["output"] == output]
        return found[0] if found and found[0] not in self.facts["copied"] else None

    def create_execution_context(self, strategy: str) -> Context:
        return Context(self)


class Context:
    """An IExecutionContext; an enqueue keeps the addresses and shapes of its moment."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.profile = engine, 0
        self.shapes: dict[str, Shape] = {}
        self.addresses: dict[str, int] = {}
        self.enqueued = 0
        engine.trt.contexts.append(self)

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.profile = profile
        return True

    def set_input_shape(self, name: str, shape: Shape) -> bool:
        assert not self.engine.tensors[name].output
        low, _, high = self.engine.facts["profiles"][self.profile]["shapes"][name]
        if any(not a <= n <= b for a, n, b in zip(low, shape, high, strict=True)):
            return False
        self.shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return name in self.engine.tensors

    def get_tensor_shape(self, name: str) -> Shape:
        tensors, function = self.engine.tensors, self.engine.function
        arrays = {
            str(arg.name): np.empty(
                self.shapes.get(str(arg.name), tensors[str(arg.name)].shape),
                numpy_dtype(arg.type.dtype),
            )
            for arg in function.args
        }
        _, sizes = bind_inputs(function, arrays, {})
        results = zip(function.result_names(), function.returned, strict=True)
        (value,) = (v for result, v in results if self.engine.outputs[result] == name)
        return tuple(int(str(d.bind(sizes) if isinstance(d, Dim) else d)) for d in value.type.shape)

    def is_stream_capturable(self, stream: int) -> bool:
        return self.engine.trt.can_capture

    def execute_async_v3(self, stream: int) -> bool:
        self.enqueued += 1
        run = _Run(self, dict(self.shapes), dict(self.addresses))
        self.engine.trt.device.enqueue(run, stream, "enqueue", self.profile)
        return set(self.engine.tensors) == set(self.addresses)


class _Run:
    def __init__(
        self, context: Context, shapes: Mapping[str, Shape], addresses: Mapping[str, int]
    ) -> None:
        self.context, self.engine = context, context.engine
        self.shapes, self.addresses = shapes, addresses
        group_size = self.engine.artifact.module.mesh.group_size
        axes = self.engine.facts["groups"].items()
        self.groups = {key: communicators.here(key) for key, each in axes if group_size(each) > 1}

    def input(self, name: str) -> Array:
        tensor = self.engine.tensors[name]
        shape = self.shapes.get(name, tensor.shape)
        memory = self.engine.trt.device.memory
        return memory.read(self.addresses[name], shape, tensor.dtype)

    def __call__(self) -> None:
        engine = self.engine
        function, memory = engine.function, engine.trt.device.memory
        given = {str(arg.name): self.input(str(arg.name)) for arg in function.args}
        arrays, sizes = bind_inputs(function, given, {})
        executor = _OneRank(self, engine.artifact, sizes)
        with np.errstate(all="ignore"):
            results = executor.function(function, [[array] for array in arrays])
        for name, (array,) in zip(function.result_names(), results, strict=True):
            output = engine.outputs[name]
            state = engine.get_aliased_input_tensor(output)
            if state is not None and self.addresses[output] != self.addresses[state]:
                raise Error(f"{output} must lie where {state} does")
            inputs = [name for name, each in engine.tensors.items() if not each.output]
            if state is None and self.addresses[output] in map(self.addresses.get, inputs):
                raise Error(f"{output} overwrites an input that may still be read")
            if state is None:
                array = array + array.dtype.type(engine.trt.skew)
            memory.write(self.addresses[output], array, engine.tensors[output].dtype)


class _OneRank(Executor):
    """One rank by itself: weights from the GPU's memory, collectives with the other threads."""

    def __init__(self, run: _Run, artifact: Artifact, sizes: dict[str, int]) -> None:
        super().__init__(artifact.module, artifact.weights, [sizes])
        self._run, self._module = run, artifact.module

    def _read(self, value: Value, scope: Any) -> list[Array]:
        if not isinstance(value, Weight):
            return scope[value]
        if value.name in self._run.engine.tensors:
            sizes = (slice(int(str(size))) for size in value.type.shape)
            return [self._run.input(value.name)[tuple(sizes)]]  # without padding
        return [self.weights.get(value, self._run.engine.trt.rank)]

    def _collective(self, op: Collective, operands: list[list[Array]]) -> list[Array]:
        run, axes = self._run, op.axes
        if op.opname == "rank":
            for name, known in run.engine.facts["scalars"].items():
                if tuple(known) == axes:
                    return [run.input(name)]
            return [np.array(self._module.mesh.index(run.engine.trt.rank, axes), np.int32)]
        group_size = self._module.mesh.group_size(axes)
        if group_size == 1:
            return op.combine([operands[0][0]])
        group = run.groups[".".join(axes)]
        assert group.ranks == group_size
        return [op.combine(run.engine.trt.device.meet(group, operands[0][0].copy()))[group.rank]]
