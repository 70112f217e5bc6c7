"""Engines and contexts of TensorRT and TensorRT-RTX, as the runtime knows them."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from irc.backends.cuda.watch import Watchdog
from irc.backends.tensorrt.builder.library import Library
from irc.backends.tensorrt.builder.messages import SEVERE, listening, reason
from irc.backends.tensorrt.plugins import register_creators, take_failure
from irc.backends.tensorrt.plugins.adapter import DATA_TYPES
from irc.backends.tensorrt.runtime.driver import Shape, Tensor
from irc.errors import Error

_DTYPES = {name: kind for kind, name in DATA_TYPES.items()}
_CAPSULE = b"ncclComm_t"


def read_engine(library: Library, path: Path) -> GpuEngine:
    """Deserialize an engine, mapped from its file; an Error with what the library says."""
    trt = library.module
    register_creators(trt)
    with _complaints(trt) as said:
        runtime = trt.Runtime(said.logger)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            view = memoryview(data)
            engine = runtime.deserialize_cuda_engine(view)
            view.release()
    if engine is None:
        raise said.error(
            f"{library} cannot read the engine {path}; it is damaged, or for another version or "
            "GPU; compile again"
        )
    if getattr(engine, "streamable_weights_size", 0):
        # else the whole of them would have to fit the GPU
        engine.weight_streaming_budget_v2 = engine.get_weight_streaming_automatic_budget()
    return GpuEngine(library, path, runtime, engine)


class _Said:
    def __init__(self, logger: Any) -> None:
        self.logger, self.lines = logger, list[str]()

    def error(self, text: str) -> Error:
        """An Error with a failure of a plugin, or the library's first complaint."""
        failure = take_failure()
        told = f"{failure}" if failure is not None else "; ".join(self.lines[:2])
        error = Error(f"{text} ({told})" if told else text)
        error.__cause__ = failure
        return error


@contextmanager
def _complaints(trt: Any) -> Generator[_Said]:
    """Collects the errors that the library logs."""
    lines: list[str] = []

    def listen(severity: str, text: str) -> None:
        if severity in SEVERE:
            lines.append(reason(text))

    with listening(trt, listen) as logger:
        said = _Said(logger)
        said.lines = lines
        yield said


class GpuEngine:
    """See the runtime's Engine."""

    def __init__(self, library: Library, path: Path, runtime: Any, engine: Any) -> None:
        self.library, self.path, self._runtime, self._engine = library, path, runtime, engine
        self.profiles: int = engine.num_optimization_profiles
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        self.tensors: Mapping[str, Tensor] = {name: self._tensor(name) for name in names}

    def _tensor(self, name: str) -> Tensor:
        trt, engine = self.library.module, self._engine
        kind = str(engine.get_tensor_dtype(name).name)
        if engine.get_tensor_location(name) != trt.TensorLocation.DEVICE:
            raise Error(
                f"{self.path} reads {name} on the CPU, to compute shapes from; irc cannot bind it: "
                "let shapes depend on the shapes of inputs alone"
            )
        output = engine.get_tensor_mode(name) == trt.TensorIOMode.OUTPUT
        shape = tuple(int(n) for n in engine.get_tensor_shape(name))
        return Tensor(name, _DTYPES.get(kind, kind), shape, output)

    def aliased(self, output: str) -> str | None:
        """See the runtime's Engine."""
        find = getattr(self._engine, "get_aliased_input_tensor", None)
        return (find(output) or None) if find is not None else None

    def context(self, profile: int, stream: Any) -> GpuContext:
        """See the runtime's Engine."""
        trt = self.library.module
        with _complaints(trt) as said:
            # activation memory for this profile alone, not for the largest of all
            strategy = trt.ExecutionContextAllocationStrategy.ON_PROFILE_CHANGE
            context = self._engine.create_execution_context(strategy)
            if context is None or not context.set_optimization_profile_async(
                profile, int(stream.handle)
            ):
                raise said.error(f"{self.library} makes no context for profile {profile}")
        stream.wait()
        return GpuContext(self, context)


class GpuContext:
    """See the runtime's Context."""

    def __init__(self, engine: GpuEngine, context: Any) -> None:
        self._engine, self._context = engine, context
        self._trt = engine.library.module
        self._capsule: Any = None
        self._enqueue = context.execute_async_v3

    def bind(self, group: Any) -> bool:
        """See the runtime's Context."""
        make = ctypes.pythonapi.PyCapsule_New
        make.restype = ctypes.py_object
        make.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        self._capsule = make(int(group.pointer), _CAPSULE, None)
        watchdog = Watchdog([group])
        try:
            with watchdog.during("handing the communicator to TensorRT"):
                return bool(self._context.set_communicator(self._capsule))
        finally:
            watchdog.close()

    def set_shape(self, name: str, shape: Shape) -> bool:
        """See the runtime's Context."""
        return bool(self._context.set_input_shape(name, shape))

    def set_address(self, name: str, address: int) -> None:
        """See the runtime's Context."""
        if not self._context.set_tensor_address(name, address):
            raise Error(f"{self._engine.library} does not take an address for {name}")

    def shape(self, name: str) -> Shape:
        """See the runtime's Context."""
        return tuple(int(n) for n in self._context.get_tensor_shape(name))

    def capturable(self, stream: Any) -> bool:
        """See the runtime's Context."""
        known = getattr(self._context, "is_stream_capturable", None)
        return True if known is None else bool(known(int(stream.handle)))

    def enqueue(self, stream: Any) -> None:
        """See the runtime's Context."""
        with _complaints(self._trt) as said:
            if not self._enqueue(int(stream.handle)):
                raise said.error(f"{self._engine.library} could not run {self._engine.path}")
        failure = take_failure()
        if failure is not None:
            raise said.error(f"a plugin failed in {self._engine.path}") from failure
