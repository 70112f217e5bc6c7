"""The NCCL groups of one rank: of all ranks, and of every group that plugins name."""

from __future__ import annotations

from irc.backends.cuda.execute.gpu import every_group
from irc.backends.ranks.communicator import Communicator
from irc.backends.tensorrt.plugins import communicators
from irc.backends.tensorrt.runtime.gpu import EngineGpu
from irc.backends.tensorrt.runtime.plan import RankPlan


class Groups:
    """The groups of one rank, made by all ranks at once; each set of ranks has one.

    `world` has all ranks in order. `named` has the groups that plugins name, and `ranks` their
    ranks.
    """

    def __init__(self, plan: RankPlan, gpu: EngineGpu, host: Communicator) -> None:
        self._groups = {
            ranks: gpu.group(host, ranks, label)
            for ranks, label in _every_group(plan).items()
            if plan.rank in ranks
        }
        self.world = self._groups[tuple(range(plan.mesh.ranks))]
        self.ranks = {key: plan.others(axes) for key, axes in plan.stage.groups.items()}
        self.ranks = {key: ranks for key, ranks in self.ranks.items() if len(ranks) > 1}
        self.named = {key: self._groups[ranks] for key, ranks in self.ranks.items()}
        for key, group in self.named.items():
            communicators.register(key, plan.rank, group)

    def close(self) -> None:
        """Release the groups; every rank calls it."""
        for group in self._groups.values():
            group.close()


def _every_group(plan: RankPlan) -> dict[tuple[int, ...], str]:
    return every_group(plan.mesh, [axes for stage in plan.stages for axes in stage.groups.values()])
