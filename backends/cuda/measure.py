"""Times of collectives between GPUs: an MPI process per GPU, NCCL in a CUDA graph."""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from irc.analysis.topology_fit import Measurement
from irc.artifact.manifest import Progress
from irc.backends.measure import Case, Plan, check, operand_of
from irc.backends.ranks.communicator import CollectiveCall, Communicator
from irc.ir.dtypes import dtype_of
from irc.ops.collective_names import REDUCING

from .device import CudaDriver, CudaStream
from .group import Group, nccl_version, open_group

_MEETING = 60.0  # seconds
_LAUNCHES = 15
_REPEATED = 20  # collectives in one graph, fewer where they are large
_LARGE = 1 << 21


def measure_gpus(plan: Plan, host: Communicator, tell: Progress) -> tuple[list[Measurement], str]:
    """Median times of the slowest rank, and which GPUs they are of; every rank calls this."""
    driver = CudaDriver(host.local_rank)
    stream = driver.stream()
    everyone = CollectiveCall("all_reduce", "max", tuple(range(host.ranks)), place="irc bench")
    measurements: list[Measurement] = []
    for group_size in plan.groups():
        tell(f"measuring {group_size} GPUs", (group_size - 2) / len(plan.groups()))
        todo = plan.cases(group_size)
        us = np.zeros(len(todo))
        if host.rank < group_size:
            group = open_group(host, range(group_size), driver, meeting=_MEETING)
            us[:] = [_time(case, group, driver, stream) for case in todo]
            group.close()
            driver.groups.clear()
        slowest = np.empty_like(us)
        host.collective(everyone, us, slowest)
        times = map(float, slowest)
        measurements += [case.measured(us) for case, us in zip(todo, times, strict=True)]
    return measurements, f"{driver.gpu.name}, NCCL {nccl_version()}"


def _time(case: Case, group: Group, driver: CudaDriver, stream: CudaStream) -> float:
    """Microseconds of one collective, after a check of its result."""
    operand = operand_of(case, group.rank)
    result = np.full(case.result, np.nan, case.element)
    source, target = driver.allocate(operand.nbytes), driver.allocate(result.nbytes)
    reduce_op = "sum" if case.kind in REDUCING else "none"
    launch = group.bind(case.kind, dtype_of(operand), operand.size, reduce_op, root=0)

    def enqueue() -> None:
        launch(source, target, stream.handle)

    stream.upload(source, operand)
    stream.upload(target, result)
    enqueue()
    stream.download(result, target)
    stream.wait("a collective")
    check(case, group.rank, result)
    repeated = max(2, _REPEATED * _LARGE // max(_LARGE, case.size))

    def enqueue_all() -> None:
        for _ in range(repeated):
            enqueue()

    graph = stream.capture(enqueue_all)
    us = median_us(stream, graph, _LAUNCHES) / repeated
    stream.drop(graph)
    driver.free(source)
    driver.free(target)
    return us


def median_us(stream: CudaStream, graph: Any, launches: int, warm: int = 3) -> float:
    """The median microseconds of a launch of a graph; the launches follow without a pause."""
    for _ in range(warm):
        stream.launch(graph)
    events = [stream.event()]
    for _ in range(launches):
        stream.launch(graph)
        events.append(stream.event())
    stream.wait("timing a graph")
    return median(1e3 * a.ms_until(b) for a, b in pairwise(events))
