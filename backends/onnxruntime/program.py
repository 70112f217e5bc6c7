"""A program on ONNX Runtime: its ranks are threads of this process, or this is one over MPI."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np

from irc.backends.base import Arrays, Ports, StateRows, check_plain
from irc.backends.onnxruntime.model import RankModel
from irc.backends.onnxruntime.session import usable_cores
from irc.backends.onnxruntime.stream import RankStream
from irc.backends.ranks.communicator import CollectiveCall, Communicator
from irc.backends.ranks.ports import Result, ShardedPorts, Sizes, contradictions_named
from irc.backends.ranks.threads import TIMEOUT, ThreadWorld
from irc.backends.recorder import Recorder
from irc.errors import Error
from irc.ir.dtypes import numpy_dtype

T = TypeVar("T")
ByRank: TypeAlias = dict[int, T]


class OnnxRuntimeProgram:
    """The emitted models on CPU; inputs and outputs are global arrays.

    `folder` holds the models; `facts` is what the backend's `emit` returned. With a `communicator`
    this process runs its rank, and every process gets the same inputs and outputs; else all ranks
    are threads. `threads`: how many the ranks of this host together may use, the physical cores by
    default. `low_memory`: f32 weights stay pages of their files rather than being repacked, so that
    loading takes no time and a run about a fifth more. `timeout`: for how many seconds threads wait
    while none of them moves. `recorder`: gets the times of all nodes.
    """

    def __init__(
        self,
        folder: Path,
        facts: Mapping[str, Any],
        communicator: Communicator | None = None,
        *,
        threads: int | None = None,
        low_memory: bool = False,
        timeout: float = TIMEOUT,
        recorder: Recorder | None = None,
    ) -> None:
        with contradictions_named(folder):
            self.sharding = ShardedPorts(facts)
        self.communicator, self.timeout = communicator, timeout
        self.ranks = len(facts["ranks"])
        if communicator is not None and communicator.ranks != self.ranks:
            raise Error(
                f"{folder} has {self.ranks} ranks, and {communicator.ranks} processes run it"
            )
        local = self.ranks if communicator is None else communicator.local_ranks
        per_rank = threads_per_rank(local, len(facts["stages"]), threads or usable_cores())
        # in threads: making sessions takes most of the time, and takes it outside of Python
        self.models: ByRank[RankModel] = self.on_ranks(
            self.new_world(),
            lambda c: RankModel(
                *(folder, facts, c.rank), threads=per_rank, low_memory=low_memory, recorder=recorder
            ),
        )

    @property
    def ports(self) -> Ports:
        """The inputs, states and outputs, as global arrays."""
        return self.sharding.ports

    def run(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Every argument in (states too), every result out; nothing is kept."""
        arrays, sizes = self.sharding.every.bind(inputs)

        def one(communicator: Communicator) -> Arrays:
            model = self.models[communicator.rank]
            shards = self.sharding.shards(model.rank, model.taken, arrays)
            return model.run(shards, sizes, communicator)

        by_rank = self.on_ranks(self.new_world(), one)
        return self.joined(self.sharding.results, by_rank, sizes)

    def open(self, sizes: Mapping[str, int]) -> OnnxRuntimeStream:
        """A stream whose states are zeros; `sizes` gives the symbols in their shapes."""
        return OnnxRuntimeStream(self, sizes)

    def new_world(self) -> ThreadWorld | None:
        """Threads for the ranks; None where this process is one rank."""
        return ThreadWorld(self.ranks, self.timeout) if self.communicator is None else None

    def on_ranks(self, world: ThreadWorld | None, work: Callable[[Communicator], T]) -> ByRank[T]:
        """What `work` returns on the ranks of this process."""
        if self.communicator is not None:
            return {self.communicator.rank: work(self.communicator)}
        assert world is not None
        return dict(enumerate(world.run(work)))

    def joined(self, names: Iterable[str], by_rank: ByRank[Arrays], sizes: Sizes) -> Arrays:
        """Global results from those of the ranks of this process."""
        if self.communicator is None:
            return self.sharding.global_results(
                [by_rank[rank] for rank in range(self.ranks)], sizes
            )
        (own,) = by_rank.values()
        return {name: self._joined(name, own.get(name), sizes) for name in names}

    def _joined(self, name: str, own: np.ndarray | None, sizes: Sizes) -> np.ndarray:
        """One global result, bit for bit the same in every process.

        A result that is replicated is broadcast too: processors of different kinds may round
        differently, and the tokens chosen by it must not differ.
        """
        result = self.sharding.results[name]
        sources = self.sharding.sources(result)
        sent = {
            source: self._broadcast(name, source, own, result, sizes)
            for source in dict.fromkeys(sources.values())
        }
        parts = {maker: sent[source] for maker, source in sources.items()}
        return self.sharding.join(result, parts, sizes)

    def _broadcast(
        self, name: str, source: int, own: np.ndarray | None, result: Result, sizes: Sizes
    ) -> np.ndarray:
        assert self.communicator is not None
        shape = self.sharding.shard_shape(result, sizes)
        out = np.empty(shape, numpy_dtype(result.port.computed or result.port.dtype))
        operand = out if own is None else np.asarray(own, order="C")
        group = tuple(range(self.ranks))
        call = CollectiveCall("broadcast", "none", group, source, f"the result {name}")
        self.communicator.collective(call, operand, out)
        return out


class OnnxRuntimeStream:
    """The states of one conversation, on the ranks of this process.

    After a failure of a rank it cannot be used any more.
    """

    def __init__(self, program: OnnxRuntimeProgram, sizes: Mapping[str, int]) -> None:
        self._program, self._world = program, program.new_world()
        self.rows = StateRows.of(program.ports.states, sizes)
        self._names = [port.name for port in program.ports.outputs]
        self._states = frozenset(port.name for port in program.ports.states)
        self.ranks: ByRank[RankStream] = {
            rank: RankStream(model, sizes, self._communicator(rank))
            for rank, model in program.models.items()
        }

    def _communicator(self, rank: int) -> Communicator | None:
        world = self._world
        return self._program.communicator if world is None else world.communicator(rank)

    def step(self, inputs: Mapping[str, np.ndarray], first: int = 0) -> Arrays:
        """See Stream."""
        program, sharding = self._program, self._program.sharding
        if not self._states.isdisjoint(inputs):
            check_plain(inputs, sharding.ports)
        arrays, sizes = sharding.plain.bind(inputs)
        rows = self.rows.chosen(sizes, first)
        parts = {
            rank: sharding.shards(rank, model.taken, arrays)
            for rank, model in program.models.items()
        }
        needed = {rank: stream.check(parts[rank], sizes) for rank, stream in self.ranks.items()}
        by_rank = program.on_ranks(
            self._world, lambda c: self.ranks[c.rank].advance(parts[c.rank], needed[c.rank], rows)
        )
        return program.joined(self._names, by_rank, sizes)

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See Stream."""
        self.rows.check(sources, targets)
        for stream in self.ranks.values():
            for array in stream.memory.values():
                array[list(targets)] = array[list(sources)]

    def clear_rows(self, rows: Sequence[int]) -> None:
        """See Stream."""
        self.rows.check(rows)
        for stream in self.ranks.values():
            for array in stream.memory.values():
                array[list(rows)] = 0


def threads_per_rank(ranks: int, stages: int, cores: int) -> int:
    """How many threads the operations of each rank of a host use; pipeline stages take turns."""
    return max(1, cores // max(1, ranks // stages))
