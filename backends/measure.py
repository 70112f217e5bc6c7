"""What a benchmark of collectives measures, on whatever the ranks are, and how it is checked."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, TypeAlias

import numpy as np

from irc.analysis.topology_fit import Measurement
from irc.backends.communicator import Communicator, Exchange
from irc.collectives import REDUCING
from irc.errors import Error

Array: TypeAlias = np.ndarray
Tell: TypeAlias = Callable[[str, float], None]

THREADS, PROCESSES = "threads", "processes"
HALF, SINGLE = np.dtype(np.float16), np.dtype(np.float32)  # what GPUs and CPUs send here
ROOT = 0
_LARGE = 1 << 21  # bytes beyond which a check takes longer than it is worth
_ROUNDS, _LEAST_SECONDS = 5, 0.02  # of CPU ranks: as many rounds, each of so long at least


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

    def cases(self, ways: int) -> list[Case]:
        """Every kind at every size, which is rounded down so that all ranks have equal parts."""
        unit = ways * self.element.itemsize
        sizes = [size // unit * unit for size in self.sizes]
        return [Case(kind, ways, size, self.element) for kind in self.kinds for size in sizes]


@dataclass(frozen=True)
class Case:
    """One collective at one size: what every rank gives and gets, in elements.

    `size` is that of the whole tensor in bytes, as in `irc.analysis.topology.sent`.
    """

    kind: str
    ways: int
    size: int
    element: np.dtype[Any] = HALF

    @property
    def operand(self) -> int:
        """Elements that a rank gives."""
        return self._elements // (self.ways if self.kind in ("all_gather", "gather") else 1)

    @property
    def result(self) -> int:
        """Elements that a rank gets."""
        parts = self.ways if self.kind in ("reduce_scatter", "scatter") else 1
        return self._elements // parts

    @property
    def _elements(self) -> int:
        return self.size // self.element.itemsize

    def exchange(self) -> Exchange:
        """The collective as communicators take it."""
        reduce_op = "sum" if self.kind in REDUCING else "none"
        return Exchange(self.kind, reduce_op, tuple(range(self.ways)), ROOT, "irc bench")

    def measured(self, us: float) -> Measurement:
        """The finding."""
        return Measurement(self.kind, self.ways, self.size, us)


def operand_of(case: Case, rank: int) -> Array:
    """What a rank gives: small integers, whose sums are exact."""
    return ((np.arange(case.operand) * 7 + 13 * rank) % 31).astype(case.element)


def check(case: Case, rank: int, result: Array) -> None:
    """An Error where a rank got something else than the collective means; of large ones none."""
    if case.size > _LARGE or (case.kind in ("reduce", "gather") and rank != ROOT):
        return
    given = [operand_of(case, each) for each in range(case.ways)]
    part = slice(rank * case.operand // case.ways, (rank + 1) * case.operand // case.ways)
    match case.kind:
        case "all_reduce" | "reduce":
            wanted = np.sum(given, axis=0)
        case "all_gather" | "gather":
            wanted = np.concatenate(given)
        case "reduce_scatter":
            wanted = np.sum(given, axis=0)[part]
        case "all_to_all":
            wanted = np.concatenate([each[part] for each in given])
        case "scatter":
            wanted = given[ROOT][part]
        case _:
            wanted = given[ROOT]
    if not np.array_equal(result, wanted):
        raise Error(
            f"{case.kind} of {case.size} bytes over {case.ways} ranks gave rank {rank} "
            "something else than it means, so its time says nothing"
        )


def measure_threads(plan: Plan, tell: Tell) -> tuple[list[Measurement], str]:
    """The medians of ranks that are threads of this process, those of the slowest rank."""
    from irc.backends.onnxruntime.threads import ThreadWorld

    found: list[Measurement] = []
    for ways in plan.groups():
        tell(f"measuring {ways} threads", (ways - 2) / len(plan.groups()))
        for case in plan.cases(ways):
            work = partial(time_on, case)
            found.append(case.measured(max(ThreadWorld(ways).run(work))))
    return found, f"{THREADS} of {os.cpu_count()} CPU cores"


def measure_processes(plan: Plan, own: Communicator, tell: Tell) -> tuple[list[Measurement], str]:
    """The same of ranks that are processes; each of them calls this and gets all findings."""
    found: list[Measurement] = []
    everybody = Exchange("all_reduce", "max", tuple(range(own.ranks)), place="irc bench")
    for ways in plan.groups():
        tell(f"measuring {ways} processes", (ways - 2) / len(plan.groups()))
        for case in plan.cases(ways):
            us = np.array([time_on(case, own) if own.rank < ways else 0.0])
            slowest = np.empty_like(us)
            own.exchange(everybody, us, slowest)
            found.append(case.measured(float(slowest[0])))
    return found, f"{PROCESSES} over MPI"


def time_on(case: Case, rank: Communicator) -> float:
    """The median microseconds of a collective on one rank, after a check of what it gives."""
    what, operand = case.exchange(), operand_of(case, rank.rank)
    result = np.full(case.result, np.nan, case.element)
    rank.exchange(what, operand, result)
    check(case, rank.rank, result)
    begin = time.perf_counter()
    rank.exchange(what, operand, result)
    seconds = np.array([time.perf_counter() - begin])
    slowest = np.empty_like(seconds)
    group = tuple(range(case.ways))
    rank.exchange(Exchange("all_reduce", "max", group, place="irc bench"), seconds, slowest)
    repeated = max(1, int(_LEAST_SECONDS / max(float(slowest[0]), 1e-7)))
    rounds: list[float] = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        for _ in range(repeated):
            rank.exchange(what, operand, result)
        rounds.append((time.perf_counter() - begin) / repeated)
    return 1e6 * median(rounds)
