"""One rank of a program: its engine on its GPU, with weights, and a context per profile."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, TypeAlias

import numpy as np

from irc.backends.cuda.execute.gpu import RankGpu
from irc.backends.cuda.execute.gpu_rank import GpuRank
from irc.backends.cuda.execute.memory import DeviceArray, Memory
from irc.backends.cuda.execute.weights import FileWeights
from irc.backends.cuda.watch import watched
from irc.backends.ranks.communicator import Communicator, PeerError
from irc.backends.ranks.ports import Sizes
from irc.backends.tensorrt.builder.library import Library
from irc.backends.tensorrt.plugins import communicators, take_failure
from irc.backends.tensorrt.runtime.engine import Engine, Shape, check_engine, check_gpu
from irc.backends.tensorrt.runtime.plan import RankPlan, StagePlan
from irc.errors import Error

Warn: TypeAlias = Callable[[str], None]
_Shapes: TypeAlias = tuple[tuple[str, Shape], ...]
_Key: TypeAlias = tuple[_Shapes, tuple[tuple[str, int], ...]]


class EngineRank(GpuRank[StagePlan]):
    """See GpuRank.

    `fixed` has the addresses of weights and scalars; `named` the groups that plugins name, of
    several ranks. `graphs`: run what repeats as a CUDA graph.
    """

    def __init__(
        self,
        plan: RankPlan,
        gpu: RankGpu,
        library: Library,
        host: Communicator | None,
        graphs: bool,
        warn: Warn,
    ) -> None:
        super().__init__(plan, gpu, host)
        self._stages = plan.stages
        check_gpu(plan, gpu.driver.gpu, library)
        self.engine = Engine(library, plan.engine)
        check_engine(plan, self.engine)
        self.weights = FileWeights(self.driver, self.stream)
        gpu.held.callback(self.weights.free)
        self.weights.add_ranges({name: each.range for name, each in plan.bindings.items()})
        if host is not None:
            self.meet("the weights")
            self.connect(axes for stage in plan.stages for axes in stage.groups.values())
        named = {key: axes for key, axes in self.stage.groups.items() if plan.members(axes)[1:]}
        self.named = {key: self.group(axes) for key, axes in named.items()}
        self._scalars = Memory(self.driver, self.stream)
        gpu.held.callback(self._scalars.free)
        self.fixed = self.weights.addresses | self._upload_scalars()
        self._executions = [  # made by all ranks in the same order
            EngineExecution(self, number, graphs, warn) for number in range(self.engine.profiles)
        ]
        self.meet("the contexts")

    def padded(self, sizes: Sizes) -> Sizes:
        """The sizes of a run: those of the inputs, padded to the minimum of a profile."""
        for stage in self._stages:
            sizes = stage.padded(sizes)
        return sizes

    def execution(self, sizes: Sizes) -> EngineExecution:
        """What runs at these sizes."""
        return self._executions[self.stage.profile(sizes)]

    def _upload_scalars(self) -> dict[str, int]:
        """The addresses of the inputs with the position of this rank along mesh axes."""
        addresses: dict[str, int] = {}
        for name, axes in self.stage.scalars.items():
            value = np.array(self.facts.mesh.index(self.rank, axes), np.int32)
            addresses[name] = self._scalars.upload(name, value)
        self.stream.wait("the upload of scalars")
        return addresses


class EngineExecution:
    """See Execution: an engine under one profile, in memory that stays while other profiles run.

    Shapes and addresses are set when they change, and repeats become a CUDA graph.
    """

    def __init__(self, rank: EngineRank, profile: int, graphs: bool, warn: Warn) -> None:
        self._rank, self._engine, self._stream = rank, rank.engine, rank.stream
        self._graphs, self._warn = graphs, warn
        self._context = rank.engine.context(profile, rank.stream)
        self.memory = Memory(rank.driver, rank.stream)
        rank.gpu.held.callback(self.free)
        profiles = rank.stage.profiles
        self._dynamic = list(profiles[profile].shapes) if profiles else []
        self._shapes: dict[str, Shape] = {}
        self._addresses: dict[str, int] = {}
        self._last: _Key | None = None
        self._captured: tuple[_Key, Any] | None = None
        self._seen: set[_Shapes] = set()

    def prepared(
        self,
        values: Mapping[str, DeviceArray],
        results: Mapping[str, DeviceArray],
        feed: object = None,
    ) -> Callable[[], bool]:
        """A function that enqueues a run, which nothing follows; whether the library may have
        compiled kernels in it."""
        assert feed is None
        stage, stream = self._rank.stage, self._stream
        # the engine may still read these states while it writes their new values elsewhere
        copies = {
            state: self.memory.device(f"new {state}", values[state].size) for state in stage.copied
        }
        addresses = self._rank.fixed | {name: value.address for name, value in values.items()}
        addresses |= {stage.outputs[name]: value.address for name, value in results.items()}
        addresses |= {stage.outputs[stage.states[state]]: copies[state] for state in copies}
        shapes = {name: values[name].shape for name in self._dynamic}
        outputs = {stage.outputs[name]: value.shape for name, value in results.items()}

        def run() -> bool:
            self._run(shapes, addresses, outputs)
            for state, address in copies.items():
                stream.copy(values[state].address, address, values[state].size)
            if self._rank.driver.marks is not None:
                self._rank.driver.marks.enqueue()
            key = tuple(shapes.items())
            is_new = key not in self._seen
            self._seen.add(key)
            return is_new

        return run

    def _run(
        self,
        shapes: Mapping[str, Shape],
        addresses: Mapping[str, int],
        results: Mapping[str, Shape],
    ) -> None:
        """Enqueue a run.

        `shapes` are those of inputs with dynamic shapes, `addresses` those of all tensors, and
        `results` the shapes that the outputs must have. The library chooses its kernels in the
        first run of shapes and addresses; the second one in a row is captured, and launched later.
        """
        key = (tuple(shapes.items()), tuple(addresses.items()))
        if self._captured is not None:
            if self._captured[0] == key:
                self._stream.launch(self._captured[1])
                return
            self._forget()
        repeated = key == self._last
        self._set(shapes, addresses)
        if not repeated:
            self._check_results(results)
            self._last = key
        if not (self._graphs and repeated and self._capture(key)):
            self._enqueue()

    def _enqueue(self) -> None:
        """It may take long: the library may compile kernels for new shapes."""
        engine, groups = self._engine, self._rank.driver.groups
        waiting = watched(groups, "the step", math.inf) if groups else nullcontext()
        with waiting, communicators.use(self._rank.named):
            if not self._context.execute_async_v3(self._stream.handle):
                raise engine.error(f"{engine.library} could not run {engine.path}")
        if failure := take_failure():
            raise engine.error(f"a plugin failed in {engine.path}", failure)

    def _check_results(self, results: Mapping[str, Shape]) -> None:
        for name, shape in results.items():
            found = tuple(int(n) for n in self._context.get_tensor_shape(name))
            if found != shape:
                raise Error(
                    f"expected {name} with shape {list(shape)} as in the manifest, found "
                    f"{list(found)} in the engine; they are of different compilations: "
                    "compile again"
                )

    def _capture(self, key: _Key) -> bool:
        reason = "the engine says that this work cannot be captured"
        capturable = getattr(self._context, "is_stream_capturable", lambda stream: True)
        if capturable(self._stream.handle):
            try:
                graph = self._stream.capture(self._enqueue)
                self._captured = key, graph
                self._stream.launch(graph)
                return True
            except PeerError:
                raise
            except Error as error:
                reason = str(error)
        self._graphs = False
        self._warn(f"steps run without a CUDA graph, which takes longer: {reason}")
        return False

    def _set(self, shapes: Mapping[str, Shape], addresses: Mapping[str, int]) -> None:
        for name, shape in shapes.items():
            if self._shapes.get(name) == shape:
                continue
            if not self._context.set_input_shape(name, shape):
                raise Error(
                    f"the engine refuses the shape {list(shape)} of its input {name}, which the "
                    "manifest allows; they are of different compilations: compile again"
                )
            self._shapes[name] = shape
        for name, address in addresses.items():
            if self._addresses.get(name) != address:
                if not self._context.set_tensor_address(name, address):
                    raise Error(f"{self._engine.library} refuses an address for {name}")
                self._addresses[name] = address

    def _forget(self) -> None:
        """Drop the graph; one that runs still ends."""
        if self._captured is not None:
            self._stream.drop(self._captured[1])
        self._captured = self._last = None

    def free(self) -> None:
        """Free memory and graph; no run follows."""
        self._forget()
        self.memory.free()
