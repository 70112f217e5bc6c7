"""One rank of a program of plans: weights, kernels, groups, and an execution per sizes."""

from __future__ import annotations

import warnings
from collections import ChainMap, OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from irc.backends.base import state_shape
from irc.backends.cuda.codegen.peer_memory import MOST_RANKS
from irc.backends.cuda.execute.execution import PlanExecution
from irc.backends.cuda.execute.gpu import RankGpu
from irc.backends.cuda.execute.gpu_rank import GpuRank, RankFacts, symbols_of
from irc.backends.cuda.execute.launch import Kernels
from irc.backends.cuda.execute.memory import Memory, check_room, size_of
from irc.backends.cuda.execute.peers import Peers
from irc.backends.cuda.execute.steps import Products, Steps
from irc.backends.cuda.execute.weights import DeviceWeights
from irc.backends.cuda.facts import PlanStage, sizes_of
from irc.backends.cuda.plan import LibraryCall, Plan
from irc.backends.ranks.communicator import Communicator, PeerError
from irc.backends.ranks.ports import Sizes
from irc.errors import Error
from irc.ir.core import Module, Weight
from irc.ops.collective import AllGather, AllReduce, Exchange
from irc.weights.checkpoint import Reader

PLANS = 64  # that a rank keeps


class Planner(Protocol):
    """See Planner in plan/build.py."""

    module: Module
    weights: dict[str, Weight]
    fused: bool
    apart: dict[str, str]

    def plan(self, sizes: Mapping[str, int]) -> Plan: ...


class CudaRank(GpuRank[PlanStage]):
    """See GpuRank.

    `base`: the folder of checkpoint files. `products` opens the library of matrix products,
    `early`, `graphs` and `stepwise` as in Steps and PlanExecution.
    """

    def __init__(
        self,
        facts: RankFacts[PlanStage],
        planner: Planner,
        base: Path,
        gpu: RankGpu,
        kernels: Kernels,
        products: Callable[[CudaRank], Products],
        host: Communicator | None,
        *,
        early: bool = True,
        graphs: bool = True,
        stepwise: bool = False,
    ) -> None:
        super().__init__(facts, gpu, host)
        self._planner, self.kernels = planner, kernels
        self._settings = {"graphs": graphs, "stepwise": stepwise}
        self._memory = Memory(self.driver, self.stream)
        reader = Reader(planner.module, base)
        self.weights = DeviceWeights(self.driver, self.stream, reader, self.rank)
        self._peers: list[Peers] = []
        self.tables: dict[str, int] = {}  # by buffer
        self._library: Products | None = None
        self._open_products = products
        self._steps = Steps(self.driver, self.stream, kernels, self.group, self._products, early)
        self._executions: OrderedDict[tuple[tuple[str, int], ...], PlanExecution] = OrderedDict()
        ports = self.stage.inputs.values()
        self._symbols = {name for port in ports for name in symbols_of(port)}
        try:
            self._load()
            if host is not None:
                self._share_all(host)
        except BaseException:
            with suppress(Error):  # of a GPU that has failed
                self.weights.free()
            raise

    def _load(self) -> None:
        """Load the weights and kernels of the smallest sizes, which later plans mostly share."""
        module = self._planner.module
        sizes = sizes_of(module, module.functions[self.stage.function])
        least = sizes.get("least", sizes["typical"])
        plan = self._planner.plan({name: least.get(name, 1) for name in self._symbols})
        with ThreadPoolExecutor(1) as pool:
            compiled = pool.submit(self.kernels.compile, plan.kernels.values())
            self.weights.add(self._planner.weights, lambda size: self._check(size, plan))
        compiled.result()
        self.kernels.load(plan.kernels.values())

    def _check(self, weights: int, plan: Plan) -> None:
        """An Error where GPU memory is too small for weights, the least caches and a plan."""
        dims = self._planner.module.dims
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
        functions = self._planner.module.functions.values()
        wanted = [op for function in functions for op in function if isinstance(op, Exchange)]
        self.connect(op.axes for op in wanted)
        if self._planner.fused:
            for op in wanted:
                if isinstance(op, AllReduce | AllGather) and op.group_size <= MOST_RANKS:
                    self._share(host, op.axis, op.axes)

    def _share(self, host: Communicator, axis: str, axes: tuple[str, ...]) -> None:
        """Open the memory of a group, once, where its ranks can write to each other's."""
        if f"%peers.{axis}" in self.tables or axis in self._planner.apart:
            return
        group, ranks = self.group(axes), self.facts.members(axes)
        try:
            self._peers.append(Peers(host, ranks, group, self.driver, self.stream))
            self.tables[f"%peers.{axis}"] = self._peers[-1].table
        except PeerError:
            raise
        except Error as error:
            self._planner.apart[axis] = error.message
            if not group.rank:
                warnings.warn(
                    f"NCCL adds what ranks along {axis} have, which takes longer: {error.message}",
                    stacklevel=1,
                )

    def _products(self) -> Products:
        if self._library is None:
            self._library = self._open_products(self)
        return self._library

    def execution(self, sizes: Sizes) -> PlanExecution:
        """What runs at these sizes, planned at the first time; all ranks meet then."""
        key = tuple((name, sizes[name]) for name in sorted(self._symbols))
        found = self._executions.get(key)
        if found is None:
            found = self._executions[key] = self._planned(dict(key))
            if len(self._executions) > PLANS:
                self.stream.wait()
                self._executions.pop(next(iter(self._executions))).free()
            self.meet("a plan of new sizes")
        self._executions.move_to_end(key)
        return found

    def _planned(self, sizes: Sizes) -> PlanExecution:
        plan = self._planner.plan(sizes)
        self.weights.add(self._planner.weights)
        self.kernels.load(plan.kernels.values())
        calls = [s for s in plan.steps if isinstance(s, LibraryCall) and s.library == "cublaslt"]
        if calls or self.host is not None:  # ranks agree on algorithms, whoever has calls
            self._products().prepare(calls)
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

    def free(self) -> None:
        """Free executions, weights and memory, the library and the memory of groups."""
        for execution in self._executions.values():
            execution.free()
        for memory in (self._memory, self.weights):
            memory.free()
        if self._library is not None:
            self._library.close()
        for peers in self._peers:
            peers.close()
