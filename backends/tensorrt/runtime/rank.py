"""One rank of a program: its engine on its GPU, with weights, contexts and communicators."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from irc.backends.communicator import Communicator
from irc.backends.tensorrt.builder import header
from irc.backends.tensorrt.runtime.driver import Driver, Engine, Group
from irc.backends.tensorrt.runtime.execution import Execution, Memory, Warn
from irc.backends.tensorrt.runtime.groups import Groups
from irc.backends.tensorrt.runtime.plan import Binding, RankPlan, read_bindings
from irc.backends.tensorrt.runtime.weights import Weights, check_bindings
from irc.backends.tensorrt.target import Target
from irc.errors import Error
from irc.mesh import Mesh


class EngineRank:
    """Everything of one rank that stays while conversations come and go.

    `folder` holds the artifact, `host` talks to the other ranks' processes (None for one rank).
    `executions` has one per profile, made by all ranks in the same order; `fixed` the addresses of
    weights and scalars.
    """

    def __init__(
        self,
        folder: Path,
        plan: RankPlan,
        driver: Driver,
        host: Communicator | None,
        graphs: bool,
        warn: Warn,
    ) -> None:
        self.plan, self.rank, self.taken = plan, plan.rank, plan.taken
        self.driver, self.stage = driver, plan.stage
        check_gpu(plan, driver)
        bindings = read_bindings(plan.bindings, folder, plan.base) if plan.bindings else []
        self.stream = driver.stream()
        engine = driver.engine(plan.engine)
        _check_engine(plan, engine, bindings)
        self.weights = Weights(driver, self.stream, bindings)
        self._host = host
        self.groups = None
        if host is not None:
            self.meet("the weights")
            self.groups = Groups(plan, driver, host)
            self.groups.connect(plan, driver, self.stream)
        self._scalars = Memory(driver, self.stream)
        self.fixed = self.weights.addresses | self._positions(plan.mesh)
        self.executions = [
            Execution(driver, engine, number, self.stream, graphs, warn)
            for number in range(engine.profiles)
        ]
        if self.groups is not None:
            self.meet("the contexts")
            group = self.groups.of_engine
            for execution in self.executions:
                if group is not None:
                    execution.bind(group)
        self.shared = Memory(driver, self.stream)  # of results that other ranks make

    @property
    def world(self) -> Group:
        """The group of all ranks, where there are several."""
        assert self.groups is not None
        return self.groups.world

    def meet(self, what: str) -> None:
        """Wait until all ranks have come so far, however long that takes: GPUs wait for each other
        for seconds only."""
        if self._host is not None:
            self._host.agree(f"{what} being ready", "yes")

    def _positions(self, mesh: Mesh) -> dict[str, int]:
        """The addresses of the inputs that say where this rank stands."""
        found: dict[str, int] = {}
        for name, axes in self.stage.scalars.items():
            value = np.array(mesh.index(self.rank, axes), np.int32)
            found[name] = self._scalars.upload(name, value)
        self.stream.wait()
        return found

    def close(self) -> None:
        """Give up the GPU's memory and the communicators; every rank calls it."""
        self.stream.wait()
        for execution in self.executions:
            execution.free()
        for memory in (self._scalars, self.shared):
            memory.free()
        self.weights.free()
        if self.groups is not None:
            self.groups.close()
        self.driver.close()


def check_gpu(plan: RankPlan, driver: Driver) -> None:
    """An Error where the engine file is not for this library and this GPU."""
    target, gpu = plan.target, driver.gpu
    version = ".".join(map(str, driver.library))
    found = header.check(plan.engine, version, target.flavour)
    if target.version != driver.library[:2]:
        raise Error(
            f"{plan.engine} was built by {target.flavour} {_dotted(target.version)}, and {version} "
            f"is installed; engines belong to one version: compile again, or install the other"
        )
    if found is not None:
        header.check_gpu(found, plan.engine, gpu.capability)
    if target.architectures and gpu.capability not in target.architectures:
        raise Error(
            f"the engines are built for {_chips(target)}, and this GPU is {gpu}; compile again on "
            f"this machine, or for the target {target.flavour}/sm_{gpu.capability}"
        )


def _check_engine(plan: RankPlan, engine: Engine, bindings: list[Binding]) -> None:
    """An Error where engine and manifest do not belong together."""
    stage, tensors = plan.stage, engine.tensors
    if engine.profiles != max(1, len(stage.profiles)):
        raise Error(
            f"{plan.engine} has {engine.profiles} profiles, and the manifest says "
            f"{len(stage.profiles)}; compile again"
        )
    check_bindings(bindings, tensors)
    bound = {each.name for each in bindings}
    known = bound | set(stage.inputs) | set(stage.scalars)
    for name in (*known, *stage.outputs.values()):
        if name not in tensors:
            raise Error(f"{plan.engine} has no tensor {name}, which it must have; compile again")
    for name, tensor in tensors.items():
        if not tensor.output and name not in known:
            raise Error(f"{plan.engine} has an input {name} that nothing gives; compile again")
    for port in stage.inputs.values():
        if tensors[port.name].dtype != port.dtype:
            raise Error(
                f"the engine's input {port.name} is {tensors[port.name].dtype}, and the manifest "
                f"says {port.dtype}; compile again"
            )
    _check_states(plan, engine)


def _check_states(plan: RankPlan, engine: Engine) -> None:
    for state, result in plan.stage.states.items():
        output = plan.stage.outputs[result]
        aliased = engine.aliased(output)
        if aliased not in (None, state):
            raise Error(
                f"the engine keeps its output {output} in the memory of {aliased}, and the "
                f"manifest says {state}; compile again"
            )


def _chips(target: Target) -> str:
    return ", ".join(f"sm_{each}" for each in target.architectures)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
