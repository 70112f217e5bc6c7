"""Benchmarks of collectives: what they measure, and the check of the results."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, TypeAlias

import numpy as np

from irc.analysis.topology_fit import Measurement
from irc.artifact.manifest import Progress
from irc.backends.ranks.combine import perform
from irc.backends.ranks.communicator import CollectiveCall, Communicator
from irc.errors import Error
from irc.ops.collective_names import REDUCING

Array: TypeAlias = np.ndarray

THREADS, PROCESSES = "threads", "processes"
HALF, SINGLE = np.dtype(np.float16), np.dtype(np.float32)  # on GPUs and on CPUs
ROOT = 0
_LARGE = 1 << 21  # bytes beyond which a check takes too long
_ROUNDS, _LEAST_SECONDS = 5, 0.02  # on CPU: number of rounds, least duration of each


@dataclass(frozen=True)
class Plan:
    """What to measure: `kinds` at `sizes` in bytes of `element`, in groups of 2 to `ranks`."""

    kinds: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: int
    element: np.dtype[Any] = HALF

    def groups(self) -> range:
        """The group sizes."""
        return range(2, self.ranks + 1)

    def cases(self, group_size: int) -> list[Case]:
        """Every kind at every size, rounded down so that all ranks have equal shards."""
        unit = group_size * self.element.itemsize
        sizes = [size // unit * unit for size in self.sizes]
        return [Case(kind, group_size, size, self.element) for kind in self.kinds for size in sizes]


@dataclass(frozen=True)
class Case:
    """One collective at one size: the elements of every rank's operand and result.

    `size` is that of the whole tensor in bytes, as in `irc.analysis.topology.sent`.
    """

    kind: str
    group_size: int
    size: int
    element: np.dtype[Any] = HALF

    @property
    def operand(self) -> int:
        """Elements of a rank's operand."""
        return self._elements // (self.group_size if self.kind in ("all_gather", "gather") else 1)

    @property
    def result(self) -> int:
        """Elements of a rank's result."""
        parts = self.group_size if self.kind in ("reduce_scatter", "scatter") else 1
        return self._elements // parts

    @property
    def _elements(self) -> int:
        return self.size // self.element.itemsize

    def call(self) -> CollectiveCall:
        """The collective call."""
        group, reduce_op = tuple(range(self.group_size)), "sum" if self.kind in REDUCING else "none"
        return CollectiveCall(self.kind, reduce_op, group, ROOT, "irc bench")

    def measured(self, us: float) -> Measurement:
        """The measurement of this case."""
        return Measurement(self.kind, self.group_size, self.size, us)


def operand_of(case: Case, rank: int) -> Array:
    """A rank's operand: small integers, whose sums are exact."""
    return ((np.arange(case.operand) * 7 + 13 * rank) % 31).astype(case.element)


def check(case: Case, rank: int, result: Array) -> None:
    """An Error where a rank's result is wrong; large results are not checked."""
    if case.size > _LARGE or (case.kind in ("reduce", "gather") and rank != ROOT):
        return
    operands = [operand_of(case, rank) for rank in range(case.group_size)]
    wanted = [np.empty(case.result, case.element) for _ in operands]
    for position in range(case.group_size):
        perform(case.call(), position, operands, wanted)
    if not np.array_equal(result, wanted[rank]):
        raise Error(
            f"{case.kind} of {case.size} bytes over {case.group_size} ranks gave rank {rank} a "
            "wrong result, so its time is not reported"
        )


def measure_threads(plan: Plan, tell: Progress) -> tuple[list[Measurement], str]:
    """Times of ranks that are threads of this process: medians of the slowest rank."""
    from irc.backends.ranks.threads import ThreadWorld

    measurements: list[Measurement] = []
    for group_size in plan.groups():
        tell(f"measuring {group_size} threads", (group_size - 2) / len(plan.groups()))
        for case in plan.cases(group_size):
            work = partial(time_on, case)
            measurements.append(case.measured(max(ThreadWorld(group_size).run(work))))
    return measurements, f"{THREADS} of {os.cpu_count()} CPU cores"


def measure_processes(
    plan: Plan, own: Communicator, tell: Progress
) -> tuple[list[Measurement], str]:
    """Times of ranks that are processes; each of them calls this and gets all times."""
    measurements: list[Measurement] = []
    slowest_of_all = CollectiveCall("all_reduce", "max", tuple(range(own.ranks)), place="irc bench")
    for group_size in plan.groups():
        tell(f"measuring {group_size} processes", (group_size - 2) / len(plan.groups()))
        for case in plan.cases(group_size):
            us = np.array([time_on(case, own) if own.rank < group_size else 0.0])
            slowest = np.empty_like(us)
            own.collective(slowest_of_all, us, slowest)
            measurements.append(case.measured(float(slowest[0])))
    return measurements, f"{PROCESSES} over MPI"


def time_on(case: Case, rank: Communicator) -> float:
    """The median microseconds of a collective on one rank, after a check of its result."""
    call, operand = case.call(), operand_of(case, rank.rank)
    result = np.full(case.result, np.nan, case.element)
    rank.collective(call, operand, result)
    check(case, rank.rank, result)
    begin = time.perf_counter()
    rank.collective(call, operand, result)
    seconds = np.array([time.perf_counter() - begin])
    slowest = np.empty_like(seconds)
    group = tuple(range(case.group_size))
    rank.collective(CollectiveCall("all_reduce", "max", group, place="irc bench"), seconds, slowest)
    repeated = max(1, int(_LEAST_SECONDS / max(float(slowest[0]), 1e-7)))
    rounds: list[float] = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        for _ in range(repeated):
            rank.collective(call, operand, result)
        rounds.append((time.perf_counter() - begin) / repeated)
    return 1e6 * median(rounds)
