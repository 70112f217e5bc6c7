"""One rank of a program on its GPU: what it runs, its stream and memory, its NCCL groups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from irc.backends.base import Port, Ports
from irc.backends.cuda.execute.feed import Feed
from irc.backends.cuda.execute.gpu import RankGpu
from irc.backends.cuda.execute.memory import DeviceArray, Memory
from irc.backends.cuda.group import Group
from irc.backends.cuda.watch import Marks
from irc.backends.ranks.communicator import Communicator
from irc.backends.ranks.ports import Sizes, Write
from irc.errors import Error
from irc.ir.dims import Dim
from irc.ir.mesh import Mesh
from irc.ir.types import Axes


@dataclass(frozen=True)
class Stage:
    """What all ranks of a pipeline stage share. `states`: the result of every state."""

    ports: Ports
    writes: Sequence[Write]
    states: Mapping[str, str]

    @property
    def inputs(self) -> dict[str, Port]:
        """Plain inputs and states by name."""
        return {port.name: port for port in (*self.ports.inputs, *self.ports.states)}


S = TypeVar("S", bound=Stage)


@dataclass(frozen=True)
class RankFacts(Generic[S]):
    """What one rank of a mesh runs.

    `receives` and `sends` name values of other stages by the rank they come from and go to.
    """

    rank: int
    mesh: Mesh
    stage: S
    receives: Mapping[int, Sequence[str]]
    sends: Mapping[int, Sequence[str]]

    @property
    def taken(self) -> list[str]:
        """The inputs that the caller provides, and no other stage."""
        received = {name for names in self.receives.values() for name in names}
        return [name for name in self.stage.inputs if name not in received]

    def members(self, axes: Axes) -> tuple[int, ...]:
        """The ranks of this rank's group along mesh axes, itself included."""
        return next(tuple(group) for group in self.mesh.groups(axes) if self.rank in group)


class Execution(Protocol):
    """What a rank runs at some sizes. `memory` has inputs and results, until the next step."""

    @property
    def memory(self) -> Memory: ...

    def prepared(
        self,
        values: Mapping[str, DeviceArray],
        results: Mapping[str, DeviceArray],
        feed: Feed | None = None,
    ) -> Callable[[], bool]:
        """A function that enqueues a run over arguments and results, and `feed` behind it; it
        allocates nothing.

        It returns whether all ranks have to meet after it, as in a run that took long.
        """
        ...


class GpuRank(ABC, Generic[S]):
    """One rank of a program on its GPU; all ranks call the same methods in the same order.

    `host` communicates with the other ranks, None for one rank. `taken` are the inputs that the
    caller provides; `shared` is memory for results that other ranks have. What a rank acquires is
    released by `gpu`. `alike`: whether all ranks compute the same bits of what they all compute.
    """

    alike = False

    def __init__(self, facts: RankFacts[S], gpu: RankGpu, host: Communicator | None) -> None:
        self.facts, self.rank, self.stage, self.taken = facts, facts.rank, facts.stage, facts.taken
        self.gpu, self.driver, self.host = gpu, gpu.driver, host
        self.stream = self.driver.stream()
        gpu.held.callback(self.stream.close)
        self.shared = Memory(self.driver, self.stream)
        gpu.held.callback(self.shared.free)
        self._groups: dict[tuple[int, ...], Group] = {}  # by their ranks

    @abstractmethod
    def execution(self, sizes: Sizes) -> Execution:
        """What runs at these sizes; compiled and loaded."""

    def padded(self, sizes: Sizes) -> Sizes:
        """The sizes of a run, which are those of the inputs or larger ones."""
        return sizes

    def connect(self, wanted: Iterable[Axes]) -> None:
        """Open the NCCL groups of all ranks, and of those along the `wanted` axes; every rank of a
        program of several calls it."""
        assert self.host is not None
        mesh = self.facts.mesh
        labels = {tuple(range(mesh.ranks)): "all ranks"}
        for axes in dict.fromkeys(wanted):
            for ranks in mesh.groups(axes):
                if len(ranks) > 1:
                    labels.setdefault(tuple(ranks), f"the group {'.'.join(axes)}")
        self._mark(self.host)
        for ranks, label in labels.items():  # in the same order on all ranks
            if self.rank in ranks:
                self._groups[ranks] = self.gpu.group(self.host, ranks, label)
        self._transfer()

    def _mark(self, host: Communicator) -> None:
        """Let all ranks see how far the stream of this one is."""
        self.driver.marks = Marks(self.shared, self.stream)
        self.gpu.held.callback(host.report, lambda: 0)
        host.report(self.driver.marks.passed)

    def _transfer(self) -> None:
        """Send a number wherever values will be sent: NCCL connects two ranks at their first send,
        and waits for both."""
        world, stream, memory = self.world, self.stream, self.shared
        assert world is not None
        own = memory.upload("own", np.array([self.rank], np.int32))
        for source in self.facts.receives:
            host = memory.host("received", (1,), np.int32)
            received = memory.device("received", host.nbytes)
            world.receive(received, host.nbytes, source, stream.handle)
            stream.download(host, received)
            stream.wait("the first transfer between stages")
            if host[0] != source:
                raise Error(
                    f"expected rank {self.rank} to receive the number of rank {source}, found "
                    f"{host[0]}: NCCL does not transfer data correctly here"
                )
        for to in self.facts.sends:
            world.send(own, 4, to, stream.handle)
        stream.wait("the first transfer between stages")

    @property
    def world(self) -> Group | None:
        """The group of all ranks; None for one rank."""
        return self._groups.get(tuple(range(self.facts.mesh.ranks)))

    def group(self, axes: Axes) -> Group:
        """The group of this rank along mesh axes, of several ranks."""
        return self._groups[self.facts.members(axes)]

    def meet(self, what: str) -> None:
        """Wait until all ranks have come this far, without a deadline: GPUs have one of seconds."""
        if self.host is not None:
            self.host.agree(f"{what} being ready", "yes")

    def close(self) -> None:
        """Release device memory and groups; every rank calls it, last."""
        try:
            self.stream.wait()
        finally:
            self.gpu.close()


def symbols_of(port: Port) -> set[str]:
    """The symbols in the shape of a port."""
    return {name for dim in port.shape if isinstance(dim, Dim) for name in dim.symbols()}
