"""NCCL in numpy, between the ranks of fake_gpu.py.

A collective completes once the streams of all ranks have reached it; an aborted communicator lets
its stream continue.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import ml_dtypes
import numpy as np

from irc.backends.cuda.execute.program import GpuProgram
from irc.backends.cuda.group import ZERO_ELSEWHERE, Group
from irc.backends.ranks.communicator import CollectiveCall, Communicator
from irc.backends.ranks.threads import ThreadWorld
from irc.ops.collective_names import REDUCING, ROOTED
from tests.ranks.collectives import meant
from tests.tensorrt.fake_gpu import SOON, STREAMS, Array, Memory

NUMPY = {
    0: np.int8,
    1: np.uint8,
    2: np.int32,
    4: np.int64,
    6: np.float16,
    7: np.float32,
    8: np.float64,
    9: ml_dtypes.bfloat16,
}
REDUCE = ("sum", "prod", "max", "min")
P = TypeVar("P", bound=GpuProgram[Any])
G = TypeVar("G")
T = TypeVar("T")


@dataclass(eq=False)
class Comm:
    """One rank's communicator. `fault`: the fault of its collectives."""

    name: Any
    rank: int
    ranks: int
    handle: int
    state: int = 7
    aborted: bool = False
    fault: str = ""
    turns: dict[Any, int] = field(default_factory=dict[Any, int])


class FakeNccl:
    """The module nccl.bindings.nccl for all ranks of a test. `refuse`: errors by function."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.refuse: dict[str, str] = {}
        self.worlds: dict[Any, dict[int, Comm]] = {}
        self._lock, self._count = threading.Lock(), itertools.count(1)
        self._posts: dict[Any, dict[int, Any]] = {}

    def get_unique_id(self) -> bytes:
        return b"%0128d" % next(self._count)

    def Config(self) -> Any:
        return SimpleNamespace(blocking=1, ptr=0)

    def comm_init_rank_scalable(
        self, ranks: int, rank: int, ids: int, name: Any, config: int
    ) -> Comm:
        with self._lock:
            comm = Comm(bytes(name), rank, ranks, next(self._count))
            world = self.worlds.setdefault(comm.name, {})
            world[rank] = comm
            if len(world) == ranks and {each.ranks for each in world.values()} == {ranks}:
                for each in world.values():
                    each.state = 0
            return comm

    def comm_get_async_error(self, comm: Comm) -> int:
        return comm.state

    def comm_abort(self, comm: Comm) -> None:
        comm.aborted = True
        self.calls.append(f"abort {comm.rank}")

    def comm_finalize(self, comm: Comm) -> None:
        self.calls.append(f"finalize {comm.rank}")

    def comm_destroy(self, comm: Comm) -> None:
        self.calls.append(f"destroy {comm.rank}")

    def get_error_string(self, status: int) -> str:
        return f"result {status}"

    def get_last_error(self, comm: Comm) -> str:
        return "the fake fails"

    def send(self, source: int, size: int, kind: int, to: int, comm: Comm, stream: int) -> None:
        self._enqueue(f"send {to}", (size, kind), (comm.rank, to), comm, (source, 0), stream)

    def recv(self, target: int, size: int, kind: int, other: int, comm: Comm, stream: int) -> None:
        self._enqueue(f"recv {other}", (size, kind), (other, comm.rank), comm, (0, target), stream)

    def __getattr__(self, kind: str) -> Callable[..., None]:
        known = ("all_reduce", "all_gather", "reduce_scatter", "allto_all", "broadcast")
        if kind not in (*known, "reduce", "gather", "scatter"):
            raise AttributeError(kind)

        def post(source: int, target: int, *rest: Any) -> None:
            *numbers, comm, stream = rest
            if kind in self.refuse:
                raise RuntimeError(self.refuse[kind])
            everyone = tuple(range(comm.ranks))
            self._enqueue(kind, tuple(numbers), everyone, comm, (source, target), stream)

        return post

    def _enqueue(
        self, kind: str, numbers: Any, ranks: Any, comm: Comm, places: Any, stream: int
    ) -> None:
        memory = STREAMS[stream].memory
        posted: list[Any] = []  # of the run of a graph that is under way

        def work() -> bool:
            if comm.aborted:
                return True
            if not posted:
                operand = self._operand(memory, kind, numbers, len(ranks), places[0])
                posted.append(self.post(comm, ranks, (kind.split()[0], numbers, operand)))
            if (items := posted[0]()) is None:
                return False
            posted.clear()
            result = result_of(items, ranks.index(comm.rank), comm.fault)
            if result is not None:
                memory.array(places[1], result.shape, result.dtype)[...] = result
            return True

        STREAMS[stream].enqueue(work, *kind.split(), numbers[0])

    def _operand(self, memory: Memory, kind: str, numbers: Any, ranks: int, source: int) -> Any:
        if kind.startswith("recv"):
            return None
        times = ranks if kind in ("reduce_scatter", "allto_all", "scatter") else 1
        return memory.array(source, (numbers[0] * times,), NUMPY[numbers[1]]).copy()

    def post(self, comm: Comm, ranks: tuple[int, ...], item: Any) -> Callable[[], Any]:
        """Post an item; returns a function for the items of all ranks, or None before that."""
        with self._lock:
            turn = comm.turns[ranks] = comm.turns.get(ranks, 0) + 1
            items = self._posts.setdefault((comm.name, ranks, turn), {})
            items[comm.rank] = item
        return lambda: [items[r] for r in ranks] if len(items) == len(ranks) else None

    def meet(self, group: Group, array: Any) -> list[Any]:
        """The items of all ranks of a group, as a library that waits inside its own code."""
        comm = group.communicator
        take, deadline = self.post(comm, tuple(range(group.ranks)), array), time.monotonic() + SOON
        while (items := take()) is None:
            group.check()
            assert time.monotonic() < deadline, "a rank is missing"
            time.sleep(1e-4)
        return items


def result_of(items: Sequence[Any], position: int, fault: str = "") -> Array | None:
    """A rank's result from (operation, numbers, operand) of all; None where NCCL writes nothing."""
    kind, numbers, _ = items[0]
    if kind == "send":
        assert items[1][:2] == ("recv", numbers)
        return items[0][2] if position == 1 else None
    assert {item[:2] for item in items} == {(kind, numbers)}, items
    x = [operand for _, _, operand in items]
    x = x[::-1] if fault == "order" else x
    root = numbers[-1] if kind in ROOTED else 0
    if fault == "nothing" and kind == "all_reduce":
        return x[position]
    if kind in ZERO_ELSEWHERE and position != root:
        return None
    reduce_op = REDUCE[numbers[2]] if kind in REDUCING else "none"
    operation = "all_to_all" if kind == "allto_all" else kind
    return meant(CollectiveCall(operation, reduce_op, tuple(range(len(x))), root), x)[position]


class World(Generic[P, G]):
    """A program on all its ranks, each a thread with a GPU that `make` makes of NCCL and a number.

    `load` is called with the communicator, None for one rank, and a function that makes the GPU.
    """

    def __init__(
        self,
        ranks: int,
        make: Callable[[FakeNccl, int], G],
        load: Callable[[Communicator | None, Callable[[int], G]], P],
    ) -> None:
        self.ranks, self.world, nccl = ranks, ThreadWorld(ranks, timeout=SOON), FakeNccl()
        self.gpus: dict[int, G] = {}

        def made(rank: int) -> G:
            self.gpus[rank] = make(nccl, rank)
            return self.gpus[rank]

        self.programs = self.world.run(lambda host: load(host if ranks > 1 else None, made))

    def of_all(self, work: Callable[[P], T]) -> list[T]:
        """The result of `work` with the program of every rank."""
        return self.world.run(lambda communicator: work(self.programs[communicator.rank]))

    def close(self) -> None:
        """Release everything."""
        self.of_all(lambda program: program.close())
