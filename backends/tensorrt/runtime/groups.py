"""The communicators of one rank: of all ranks, of its stage, and of every group plugins name."""

from __future__ import annotations

import numpy as np

from irc.backends.communicator import Communicator
from irc.backends.onnx.stages import stage_axes
from irc.backends.tensorrt.runtime.driver import Driver, Group, Stream
from irc.backends.tensorrt.runtime.execution import Memory
from irc.backends.tensorrt.runtime.plan import RankPlan
from irc.errors import Error

_NAME = "name"


class Groups:
    """Made by all ranks at once; groups of the same ranks share one communicator.

    `world` has all ranks in order. `of_engine` is what the engine's own collectives use, None where
    it has none. `named` has the groups that the stage's plugins name.
    """

    def __init__(self, plan: RankPlan, driver: Driver, host: Communicator) -> None:
        self._made: dict[tuple[int, ...], Group] = {}
        self.ranks: dict[str, tuple[int, ...]] = {}
        for ranks, label in _every(plan).items():
            if plan.rank in ranks:
                name = _shared_name(ranks, plan.rank, driver, host)
                self._made[ranks] = driver.group(name, ranks.index(plan.rank), len(ranks), label)
        self.world = self._made[tuple(range(plan.mesh.ranks))]
        stage = plan.stage_ranks()
        self.of_engine = self._made[stage] if plan.stage.native and len(stage) > 1 else None
        self.named: dict[str, Group] = {}
        for key, axes in plan.stage.groups.items():
            ranks = plan.others(axes)
            if len(ranks) > 1:
                self.named[key], self.ranks[key] = self._made[ranks], ranks
                driver.register(key, plan.rank, self.named[key])

    def connect(self, plan: RankPlan, driver: Driver, stream: Stream) -> None:
        """Hand a number over wherever values will be; NCCL connects two ranks when they first talk,
        and waits for both."""
        memory = Memory(driver, stream)
        mine = memory.upload("mine", np.array([plan.rank], np.int32))
        for source in plan.receives:
            host = memory.host("theirs", (1,), np.int32)
            theirs = memory.device("theirs", host.nbytes)
            self.world.receive(theirs, host.nbytes, source, stream.handle)
            stream.download(host, theirs)
            stream.wait()
            if host[0] != source:
                raise Error(
                    f"what rank {source} hands over does not reach rank {plan.rank}: it sent its "
                    f"number, and {host[0]} came; NCCL is not to be trusted here"
                )
        for to in plan.sends:
            self.world.send(mine, 4, to, stream.handle)
        stream.wait()
        memory.free()

    def abort(self) -> None:
        """Give up at once, also what is under way."""
        for group in self._made.values():
            group.abort()

    def close(self) -> None:
        """Give up; every rank calls it."""
        for group in self._made.values():
            group.close()


def _every(plan: RankPlan) -> dict[tuple[int, ...], str]:
    """The ranks of every group of the run, in the same order on all ranks, with a name."""
    found = {tuple(range(plan.mesh.ranks)): "all ranks"}
    axes = stage_axes(plan.mesh)
    wanted: list[tuple[str, ...]] = []
    for stage in plan.stages:
        wanted += [axes] if stage.native and axes else []
        wanted += stage.groups.values()
    for each in dict.fromkeys(wanted):
        for ranks in plan.mesh.groups(each):
            if len(ranks) > 1:
                found.setdefault(tuple(ranks), f"the group {'.'.join(each)}")
    return found


def _shared_name(ranks: tuple[int, ...], rank: int, driver: Driver, host: Communicator) -> bytes:
    if rank != ranks[0]:
        return host.receive(ranks[0])[_NAME].tobytes()
    name = driver.group_name()
    for other in ranks[1:]:
        host.send(other, {_NAME: np.frombuffer(name, np.uint8)})
    return name
