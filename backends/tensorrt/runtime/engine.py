"""Engines of TensorRT and TensorRT-RTX: deserialized and checked, with the library's errors."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from irc.backends.cuda.driver import Gpu, Stream
from irc.backends.ranks.communicator import PeerError
from irc.backends.tensorrt.builder.library import Library, make_error_recorder, silent_logger
from irc.backends.tensorrt.plugins import register_creators, take_failure
from irc.backends.tensorrt.plugins.adapter import DATA_TYPES
from irc.backends.tensorrt.runtime.plan import RankPlan
from irc.errors import Error

Shape: TypeAlias = tuple[int, ...]
_DTYPES = {name: kind for kind, name in DATA_TYPES.items()}


class Engine:
    """An engine, mapped from its file; an Error with the library's reasons if it is refused."""

    def __init__(self, library: Library, path: Path) -> None:
        self.library, self.path = library, path
        trt = library.module
        register_creators(trt)
        self._recorder = make_error_recorder(trt)
        self._runtime = trt.Runtime(silent_logger(trt))  # it must outlive the engine
        self._runtime.error_recorder = self._recorder
        try:
            with (
                path.open("rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
                memoryview(data) as view,
            ):
                engine = self._engine = self._runtime.deserialize_cuda_engine(view)
                reasons = self._invalidity(view) if engine is None else []
        except (OSError, ValueError) as error:  # a file that is missing, or empty
            raise Error(f"cannot read the engine {path}: {error}; compile again") from None
        if engine is None:
            raise self.error(
                f"{library} cannot read the engine {path}; it is damaged, or for another version "
                "or GPU; compile again",
                reasons=reasons,
            )
        engine.error_recorder = self._recorder
        if getattr(engine, "streamable_weights_size", 0):
            # the default budget would need all weights to fit the GPU
            engine.weight_streaming_budget_v2 = engine.get_weight_streaming_automatic_budget()
        self.profiles: int = engine.num_optimization_profiles
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        self.tensors = {name: self._described(name) for name in names}

    def _described(self, name: str) -> str:
        """An input or output, as in "input bf16[-1, 8]", where a dynamic dimension is -1."""
        trt, engine = self.library.module, self._engine
        kind = str(engine.get_tensor_dtype(name).name)
        if engine.get_tensor_location(name) != trt.TensorLocation.DEVICE:
            raise Error(
                f"{self.path} reads {name} on the CPU, to compute shapes from its values; irc "
                "cannot bind it: let shapes depend on the shapes of inputs alone"
            )
        is_output = engine.get_tensor_mode(name) == trt.TensorIOMode.OUTPUT
        shape = [int(n) for n in engine.get_tensor_shape(name)]
        return f"{'output' if is_output else 'input'} {_DTYPES.get(kind, kind)}{shape}"

    def aliased(self, output: str) -> str | None:
        """The input whose memory an output must share."""
        find = getattr(self._engine, "get_aliased_input_tensor", None)
        return (find(output) or None) if find is not None else None

    def context(self, profile: int, stream: Stream) -> Any:
        """The library's IExecutionContext, under a profile."""
        trt = self.library.module
        # activation memory for this profile alone, not for the largest of all
        strategy = trt.ExecutionContextAllocationStrategy.ON_PROFILE_CHANGE
        self._recorder.clear()
        context = self._engine.create_execution_context(strategy)
        if context is None or not context.set_optimization_profile_async(profile, stream.handle):
            raise self.error(f"{self.library} creates no context for profile {profile}")
        context.error_recorder = self._recorder
        stream.wait("the creation of a context")
        return context

    def error(
        self, text: str, failure: BaseException | None = None, reasons: Sequence[str] = ()
    ) -> Error:
        """An Error with the failure of a plugin, or else the reasons that the library recorded."""
        failure = failure or take_failure()
        if isinstance(failure, PeerError):
            return failure
        reasons = reasons or self._recorder.texts
        self._recorder.clear()
        details = f"{failure}" if failure is not None else "; ".join(reasons[:2])
        error = Error(f"{text} ({details})" if details else text)
        error.__cause__ = failure
        return error

    def _invalidity(self, data: memoryview) -> list[str]:
        """Why TensorRT-RTX refuses an engine, as in "VERSION_MISMATCH"."""
        if not hasattr(self._runtime, "get_engine_validity"):
            return []
        _, bits = self._runtime.get_engine_validity(data)
        known = self.library.module.EngineInvalidityDiagnostics.__members__
        return [name for name, bit in known.items() if bits & int(bit)]


def check_gpu(plan: RankPlan, gpu: Gpu, library: Library) -> None:
    """An Error where the engine file is not for this library and this GPU."""
    target = plan.target
    if target.version != library.release:
        built = ".".join(map(str, target.version))
        raise Error(
            f"{plan.engine} was built by {target.flavour} {built}, and {library.version} is "
            "installed; engines run on one version: compile again, or install the other"
        )
    if target.architectures and gpu.capability not in target.architectures:
        built = ", ".join(f"sm_{architecture}" for architecture in target.architectures)
        raise Error(
            f"the engines are built for {built}, and this GPU is {gpu}; compile again on this "
            f"machine, or for the target {target.flavour}/sm_{gpu.capability}"
        )


def check_engine(plan: RankPlan, engine: Engine) -> None:
    """An Error where engine and manifest do not belong together."""
    stage = plan.stage
    expected = {
        name: f"input {port.dtype}{list(port.shape)}" for name, port in plan.bindings.items()
    }
    expected |= {name: f"input {port.dtype}[" for name, port in stage.inputs.items()}
    expected |= dict.fromkeys(stage.scalars, "input i32[]")
    expected |= dict.fromkeys(stage.outputs.values(), "output ")
    found = dict(engine.tensors)
    for state, result in stage.states.items():
        if aliased := engine.aliased(stage.outputs[result]):
            expected[f"the memory of {stage.outputs[result]}"] = state
            found[f"the memory of {stage.outputs[result]}"] = aliased
    expected["the number of profiles"] = str(max(1, len(stage.profiles)))
    found["the number of profiles"] = str(engine.profiles)
    for name in expected | found:
        want, have = expected.get(name, "none"), found.get(name, "none")
        if have != want and not (want[-1] in "[ " and have.startswith(want)):
            raise Error(
                f"{plan.engine}: the manifest says {name} is {want.rstrip('[ ')}, and the engine "
                f"says {have}; they are of different compilations: compile again"
            )
