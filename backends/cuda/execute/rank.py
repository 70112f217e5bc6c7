"""One rank of a program of plans: weights, kernels, groups, and an execution per sizes."""

from __future__ import annotations

import warnings
from collections import ChainMap, OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from irc.backends.base import state_shape
from irc.backends.cuda.codegen.peer_memory import MOST_RANKS
from irc.backends.cuda.execute.cublaslt import CublasLt
from irc.backends.cuda.execute.execution import PlanExecution, Record
from irc.backends.cuda.execute.gpu import RankGpu
from irc.backends.cuda.execute.gpu_rank import GpuRank, RankFacts, symbols_of
from irc.backends.cuda.execute.launch import Kernels
from irc.backends.cuda.execute.memory import Memory, check_room, size_of
from irc.backends.cuda.execute.peers import Peers
from irc.backends.cuda.execute.steps import Steps
from irc.backends.cuda.execute.weights import DeviceWeights
from irc.backends.cuda.facts import PlanStage, sizes_of
from irc.backends.cuda.plan import Plan
from irc.backends.cuda.plan.build import Planner
from irc.backends.cuda.plan.prepare import exchanges
from irc.backends.cuda.plan.regime import Device
from irc.backends.ranks.communicator import Communicator, PeerError
from irc.backends.ranks.ports import Sizes
from irc.errors import Error
from irc.ops.collective import AllGather, AllReduce
from irc.weights.checkpoint import Reader

PLANS = 64  # that a rank keeps


class CudaRank(GpuRank[PlanStage]):
    """See GpuRank.

    `base`: the folder of checkpoint files. `products` opens the library of matrix products,
    `early`, `graphs`, `stepwise`, `record` and `alike` as in Steps, PlanExecution and GpuRank.
    """

    def __init__(
        self,
        facts: RankFacts[PlanStage],
        planner: Planner,
        base: Path,
        gpu: RankGpu,
        kernels: Kernels,
        products: Callable[[], CublasLt],
        host: Communicator | None,
        *,
        early: bool = True,
        graphs: bool = True,
        stepwise: bool = False,
        record: Record | None = None,
        alike: bool = False,
    ) -> None:
        super().__init__(facts, gpu, host)
        self.alike = alike
        self.planner, self.kernels = planner, kernels
        self._settings: dict[str, Any] = {"graphs": graphs, "stepwise": stepwise, "record": record}
        gpu.held.callback(kernels.close)
        self._memory = Memory(self.driver, self.stream)
        gpu.held.callback(self._memory.free)
        reader = Reader(planner.module, base)
        self.weights = DeviceWeights(self.driver, self.stream, reader, self.rank)
        gpu.held.callback(self.weights.free)
        self.tables: dict[str, int] = {}  # by buffer
        self._library: CublasLt | None = None
        self._open_products = products
        self._steps = Steps(self.driver, self.stream, kernels, self.group, self.products, early)
        self._executions: OrderedDict[tuple[tuple[str, int], ...], PlanExecution] = OrderedDict()
        ports = self.stage.inputs.values()
        self._symbols = {name for port in ports for name in symbols_of(port)}
        self._load()
        if host is not None:
            self._share_all(host)
        gpu.held.callback(self._forget)

    def _load(self) -> None:
        """Load the weights and kernels of the smallest sizes, which later plans mostly share."""
        module = self.planner.module
        sizes = sizes_of(module, module.functions[self.stage.function])
        least = sizes.get("least", sizes["typical"])
        plan = self.planner.plan({name: least.get(name, 1) for name in self._symbols})
        with ThreadPoolExecutor(1) as pool:
            compiled = pool.submit(self.kernels.compile, plan.kernels.values())
            self.weights.add(self.planner.weights, lambda size: self._check(size, plan))
            self.weights.uploads.free()  # later plans add few weights
        compiled.result()
        self.kernels.load(plan.kernels.values())

    def _check(self, weights: int, plan: Plan) -> None:
        """An Error where GPU memory is too small for weights, the least caches and a plan."""
        dims = self.planner.module.dims
        sizes = {name: max(1, dims[name][0]) for name in sorted(self._symbols) if name in dims}
        parts = {"weights": weights, "activations": plan.arena}
        check_room(self.driver, parts | self.caches(sizes), sizes)

    def caches(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """The bytes of all states, by what they are called in messages."""
        states = self.stage.ports.states
        total = sum(size_of(state_shape(port, sizes), port.dtype) for port in states)
        return {"caches": total} if states else {}

    def _share_all(self, host: Communicator) -> None:
        """Open the groups, and their memory where kernels may write to it."""
        self.meet("the weights and kernels")
        functions = self.planner.module.functions.values()
        wanted = [op for function in functions for op in exchanges(function)]
        self.connect(op.axes for op in wanted)
        if self.planner.fused:
            for op in wanted:
                if isinstance(op, AllReduce | AllGather) and op.group_size <= MOST_RANKS:
                    self._share(host, op.axis, op.axes)

    def _share(self, host: Communicator, axis: str, axes: tuple[str, ...]) -> None:
        """Open the memory of a group, once, where its ranks can write to each other's."""
        if f"%peers.{axis}" in self.tables or axis in self.planner.apart:
            return
        group, ranks = self.group(axes), self.facts.members(axes)
        try:
            peers = Peers(host, ranks, group, self.driver, self.stream)
            self.gpu.held.callback(peers.close)
            self.tables[f"%peers.{axis}"] = peers.table
        except PeerError:
            raise
        except Error as error:
            self.planner.apart[axis] = error.message
            if not group.rank:
                warnings.warn(
                    f"NCCL adds what ranks along {axis} have, which takes longer: {error.message}",
                    stacklevel=1,
                )

    def products(self) -> CublasLt:
        """The library of products, opened when it is needed."""
        if self._library is None:
            self._library = self._open_products()
            self.gpu.held.callback(self._library.close)
        return self._library

    def execution(self, sizes: Sizes) -> PlanExecution:
        """What runs at these sizes, planned at the first time; all ranks meet then."""
        key = tuple((name, sizes[name]) for name in sorted(self._symbols))
        execution = self._executions.get(key)
        if execution is None:
            execution = self._executions[key] = self._planned(dict(key))
            if len(self._executions) > PLANS:
                self.stream.wait()
                self._executions.pop(next(iter(self._executions))).free()
            self.meet("a plan of new sizes")
        self._executions.move_to_end(key)
        return execution

    def _planned(self, sizes: Sizes) -> PlanExecution:
        plan = self.planner.plan(sizes)
        self.weights.add(self.planner.weights)
        self.kernels.load(plan.kernels.values())
        return PlanExecution(
            plan,
            self.stage.results,
            self.driver,
            self.stream,
            self._memory,
            self._steps,
            ChainMap(self.weights.addresses, self.tables),
            **self._settings,
        )

    @property
    def plans(self) -> list[Plan]:
        """The plans that are kept, that of the latest step last."""
        return [execution.plan for execution in self._executions.values()]

    def replan(self, device: Device) -> None:
        """Make new plans from now on, for another GPU or other choices."""
        self.stream.wait()
        self._forget()
        self.planner.device = device

    def _forget(self) -> None:
        while self._executions:
            self._executions.popitem()[1].free()
