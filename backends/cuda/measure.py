"""Times of collectives on the GPUs of this host: a process per GPU, NCCL under a CUDA graph."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any, TypeAlias

import numpy as np

from irc.analysis.topology_fit import Measurement
from irc.backends.measure import Case, Plan, Tell, check, operand_of
from irc.errors import Error

Connection: TypeAlias = Any  # multiprocessing has no name for what Pipe gives
Work: TypeAlias = Callable[[int, Plan, Connection], None]

PATIENCE = 120.0  # seconds that a rank may take for one group size
_GLANCE = 0.2  # seconds between looks at the other ranks
_LAUNCHES = 15
_REPEATED = 20  # collectives in one graph, fewer where they are large
_LARGE = 1 << 21


@dataclass(frozen=True)
class _Failure:
    """The last message of a rank that cannot go on."""

    reason: str


def measure_gpus(plan: Plan, tell: Tell, work: Work | None = None) -> tuple[list[Measurement], str]:
    """The medians over the GPUs of this host, those of the slowest rank, and what they are.

    `work` is what the process of each rank does, in place of measuring.
    """
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(plan.ranks)]
    workers = [
        context.Process(
            target=_work, args=(rank, plan, pipes[rank][1], work or _measure), daemon=True
        )
        for rank in range(plan.ranks)
    ]
    for worker, (_, theirs) in zip(workers, pipes, strict=True):
        worker.start()
        theirs.close()  # so that the end of the process ends the pipe
    ends = [ours for ours, _ in pipes]
    try:
        return _collect(plan, workers, ends, tell)
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


def _collect(
    plan: Plan, workers: Sequence[BaseProcess], ends: Sequence[Connection], tell: Tell
) -> tuple[list[Measurement], str]:
    about = [_receive(rank, workers, ends) for rank in range(plan.ranks)]
    found: list[Measurement] = []
    for ways in plan.groups():
        tell(f"measuring {ways} GPUs", (ways - 2) / len(plan.groups()))
        name = _receive(0, workers, ends)
        for rank in range(1, ways):
            _send(rank, name, workers, ends)
        times: list[list[float]] = [_receive(rank, workers, ends) for rank in range(ways)]
        slowest = [max(each) for each in zip(*times, strict=True)]
        todo = plan.cases(ways)
        found += [case.measured(us) for case, us in zip(todo, slowest, strict=True)]
    return found, about[0]


def _receive(rank: int, workers: Sequence[BaseProcess], ends: Sequence[Connection]) -> Any:
    """What a rank has to say; an Error where any rank failed or died, or this one stalls."""
    deadline = time.monotonic() + PATIENCE
    while not ends[rank].poll(_GLANCE):
        for other, worker in enumerate(workers):
            if worker.exitcode:
                raise _failure(other, worker, ends[other])
        if time.monotonic() > deadline:
            raise Error(f"GPU {rank} did not answer within {PATIENCE:.0f} seconds")
    try:
        answer = ends[rank].recv()
    except EOFError:
        raise _failure(rank, workers[rank], ends[rank]) from None
    if isinstance(answer, _Failure):
        raise Error(f"GPU {rank}: {answer.reason}")
    return answer


def _send(rank: int, what: Any, workers: Sequence[BaseProcess], ends: Sequence[Connection]) -> None:
    """Tell a rank something; an Error where it has ended."""
    try:
        ends[rank].send(what)
    except BrokenPipeError:
        raise _failure(rank, workers[rank], ends[rank]) from None


def _failure(rank: int, worker: BaseProcess, end: Connection) -> Error:
    """Why a rank ended: what it said last, or its exit status."""
    try:
        while not isinstance(answer := end.recv(), _Failure):
            continue
    except EOFError:
        worker.join()
        return Error(f"the process of GPU {rank} ended with status {worker.exitcode}")
    return Error(f"GPU {rank}: {answer.reason}")


def _work(rank: int, plan: Plan, parent: Connection, work: Work) -> None:
    """One rank's process."""
    try:
        work(rank, plan, parent)
    except ModuleNotFoundError as error:
        parent.send(_Failure(f"no package {error.name} here: pip install 'irc-compiler[cuda]'"))
        sys.exit(1)
    except Exception as error:
        parent.send(_Failure(f"{type(error).__name__}: {error}"))
        sys.exit(1)


def _measure(rank: int, plan: Plan, parent: Connection) -> None:
    from .group import Group, nccl_version, unique_id
    from .runtime import Stream, use_device

    name = use_device(rank)
    parent.send(f"{name}, NCCL {nccl_version()}")
    stream = Stream()
    for ways in plan.groups():
        if rank >= ways:
            continue
        if rank == 0:
            group_name = unique_id()
            parent.send(group_name)
        else:
            group_name = parent.recv()
        group = Group(group_name, rank, ways, meeting=PATIENCE / 2)
        parent.send([_time(case, group, stream) for case in plan.cases(ways)])
        group.close()


def _time(case: Case, group: Any, stream: Any) -> float:
    """Microseconds of one collective, after a check of what it gives."""
    from .runtime import DeviceArray

    source = DeviceArray(operand_of(case, group.rank))
    target = DeviceArray(np.full(case.result, np.nan, case.element))

    def enqueue() -> None:
        group.enqueue(case.kind, source, target, int(stream))

    enqueue()
    stream.wait()
    check(case, group.rank, target.read())
    repeated = max(2, _REPEATED * _LARGE // max(_LARGE, case.size))

    def work() -> None:
        for _ in range(repeated):
            enqueue()

    graph = stream.graph(work)
    us = stream.median_us(graph, _LAUNCHES) / repeated
    stream.drop(graph)
    source.free()
    target.free()
    return us
