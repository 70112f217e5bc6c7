"""One rank of a program: its engine on its GPU, with weights, contexts and groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from irc.backends.cuda.execute.gpu import connect
from irc.backends.cuda.execute.memory import DeviceArray, Memory
from irc.backends.cuda.execute.stream import symbols_of
from irc.backends.cuda.group import Group
from irc.backends.ranks.communicator import Communicator
from irc.backends.ranks.ports import Sizes
from irc.backends.tensorrt.runtime.engine import Engine
from irc.backends.tensorrt.runtime.execution import Execution, Warn
from irc.backends.tensorrt.runtime.gpu import EngineGpu
from irc.backends.tensorrt.runtime.groups import Groups
from irc.backends.tensorrt.runtime.plan import Binding, RankPlan, read_bindings
from irc.backends.tensorrt.runtime.profiles import chosen, padded_sizes
from irc.backends.tensorrt.runtime.weights import Weights
from irc.errors import Error


class EngineRank:
    """Everything of one rank that conversations share.

    `host` communicates with the other ranks, None for one rank. `executions` has one per profile,
    made by all ranks in the same order; `fixed` the addresses of weights and scalars; `shared`
    memory for results that other ranks have.
    """

    def __init__(
        self,
        folder: Path,
        plan: RankPlan,
        gpu: EngineGpu,
        host: Communicator | None,
        graphs: bool,
        warn: Warn,
    ) -> None:
        self.plan, self.rank, self.taken = plan, plan.rank, plan.taken
        self.gpu, self.driver, self.stage, self._host = gpu, gpu.driver, plan.stage, host
        driver = self.driver
        check_gpu(plan, gpu)
        bindings = read_bindings(plan.bindings, folder, plan.base) if plan.bindings else []
        self.stream = driver.stream()
        engine = Engine(gpu.library, plan.engine)
        _check_engine(plan, engine, bindings)
        self.weights = Weights(driver, self.stream, bindings)
        self.groups = None
        self.receives, self.sends = plan.receives, plan.sends
        if host is not None:
            self.meet("the weights")
            self.groups = Groups(plan, gpu, host)
            world = self.groups.world
            connect(plan.rank, world, self.receives, self.sends, driver, self.stream)
        self._scalars = Memory(driver, self.stream)
        self.fixed = self.weights.addresses | self._upload_scalars()
        self.executions = [
            Execution(gpu, engine, number, self.stream, graphs, warn)
            for number in range(engine.profiles)
        ]
        self.meet("the contexts")
        self.shared = Memory(driver, self.stream)

    @property
    def world(self) -> Group | None:
        """The group of all ranks; None for one rank."""
        return None if self.groups is None else self.groups.world

    def padded(self, sizes: Sizes) -> Sizes:
        """The sizes of a run: those of the inputs, padded to the minimum of a profile.

        In a model with caches only tokens are padded: no token attends to the padding behind it,
        and the next step overwrites it.
        """
        for stage in self.plan.stages:
            kept = {name for port in stage.ports.states for name in symbols_of(port)}
            plain = {name for port in stage.ports.inputs for name in symbols_of(port)}
            may_grow = plain - kept if stage.writes else set[str]()
            sizes = dict(padded_sizes(stage.profiles, stage.inputs, sizes, may_grow))
        return sizes

    def execution(self, sizes: Sizes) -> StageRun:
        """What runs at these sizes."""
        number = chosen(self.stage.profiles, self.stage.inputs, sizes)
        return StageRun(self, number)

    def meet(self, what: str) -> None:
        """Wait until all ranks have come this far, without a deadline: GPUs have one of seconds."""
        if self._host is not None:
            self._host.agree(f"{what} being ready", "yes")

    def _upload_scalars(self) -> dict[str, int]:
        """The addresses of the inputs with the position of this rank along mesh axes."""
        found: dict[str, int] = {}
        for name, axes in self.stage.scalars.items():
            value = np.array(self.plan.mesh.index(self.rank, axes), np.int32)
            found[name] = self._scalars.upload(name, value)
        self.stream.wait("the upload of scalars")
        return found

    def close(self) -> None:
        """Release device memory and groups; every rank calls it."""
        self.stream.wait()
        for execution in self.executions:
            execution.free()
        for memory in (self._scalars, self.shared, self.weights):
            memory.free()
        if self.groups is not None:
            self.groups.close()
        self.gpu.close()


class StageRun:
    """See Execution in cuda/execute/stream.py: the engine under one of its profiles."""

    def __init__(self, rank: EngineRank, number: int) -> None:
        self._rank, self._execution = rank, rank.executions[number]
        self.memory = self._execution.memory
        stage = rank.stage
        self._dynamic = stage.profiles[number].shapes if stage.profiles else {}

    def prepared(
        self, values: Mapping[str, DeviceArray], results: Mapping[str, DeviceArray]
    ) -> Callable[[], bool]:
        """A function that enqueues a run; whether the library may have compiled kernels in it."""
        rank, stage, execution = self._rank, self._rank.stage, self._execution
        # the engine may still read these states while it writes their new values elsewhere
        copies = {
            state: self.memory.device(f"new {state}", values[state].size) for state in stage.copied
        }
        addresses = rank.fixed | {name: value.address for name, value in values.items()}
        addresses |= {stage.outputs[name]: value.address for name, value in results.items()}
        addresses |= {stage.outputs[stage.states[state]]: copies[state] for state in copies}
        shapes = {name: values[name].shape for name in self._dynamic}
        outputs = {stage.outputs[name]: value.shape for name, value in results.items()}

        def run() -> bool:
            execution.run(shapes, addresses, outputs)
            for state, address in copies.items():
                rank.stream.copy(values[state].address, address, values[state].size)
            return execution.is_new(shapes)

        return run


def check_gpu(plan: RankPlan, engine_gpu: EngineGpu) -> None:
    """An Error where the engine file is not for this library and this GPU."""
    target, gpu, library = plan.target, engine_gpu.driver.gpu, engine_gpu.library
    version = library.version
    if target.version != library.release:
        built = ".".join(map(str, target.version))
        raise Error(
            f"{plan.engine} was built by {target.flavour} {built}, and {version} is installed; "
            "engines run on one version: compile again, or install the other"
        )
    if target.architectures and gpu.capability not in target.architectures:
        built = ", ".join(f"sm_{each}" for each in target.architectures)
        raise Error(
            f"the engines are built for {built}, and this GPU is {gpu}; compile again on this "
            f"machine, or for the target {target.flavour}/sm_{gpu.capability}"
        )


def _check_engine(plan: RankPlan, engine: Engine, bindings: list[Binding]) -> None:
    """An Error where engine and manifest do not belong together."""
    stage = plan.stage
    expected = {each.name: f"input {each.dtype}{list(each.shape)}" for each in bindings}
    expected |= {port.name: f"input {port.dtype}[" for port in stage.inputs.values()}
    expected |= dict.fromkeys(stage.scalars, "input i32[]")
    expected |= dict.fromkeys(stage.outputs.values(), "output ")
    found = {name: str(tensor) for name, tensor in engine.tensors.items()}
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
