"""A program of engines of which this process runs one rank."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from irc.backends.cuda.execute.gpu import check_distinct
from irc.backends.cuda.execute.program import GpuProgram
from irc.backends.ranks.communicator import Communicator
from irc.backends.ranks.ports import ShardedPorts
from irc.backends.tensorrt.runtime.execution import Warn
from irc.backends.tensorrt.runtime.gpu import EngineGpu
from irc.backends.tensorrt.runtime.plan import RankPlan
from irc.backends.tensorrt.runtime.rank import EngineRank


class EngineProgram(GpuProgram[EngineRank]):
    """`folder` and `facts` are what the backend's `emit` wrote and returned.

    `host` communicates with the other ranks, None for one rank.
    """

    def __init__(
        self,
        folder: Path,
        facts: Mapping[str, Any],
        gpu: EngineGpu,
        host: Communicator | None,
        *,
        graphs: bool,
        warn: Warn,
    ) -> None:
        plan = RankPlan.of_facts(folder, facts, 0 if host is None else host.rank)
        super().__init__(ShardedPorts(facts))
        if host is not None:
            check_distinct(gpu.driver.gpu, host)
        self.rank = EngineRank(folder, plan, gpu, host, graphs, warn)
