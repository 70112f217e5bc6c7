"""A program of which this process runs one rank on its GPU; inputs and results are global."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

import numpy as np

from irc.backends.base import Arrays, Ports, StateRows, check_plain
from irc.backends.cuda.driver import Array, Event, Launch, Stream
from irc.backends.cuda.execute.gpu_rank import GpuRank
from irc.backends.cuda.execute.memory import DeviceArray, as_array, host_like
from irc.backends.cuda.execute.stream import RankStream, trim
from irc.backends.ranks.ports import ShardedPorts, Sizes, sized
from irc.errors import Error

R = TypeVar("R", bound=GpuRank[Any])


class GpuProgram(Generic[R]):
    """See Program. All ranks call the same methods with the same inputs, and get the same results.

    `rank` is what this process runs.
    """

    def __init__(self, sharding: ShardedPorts, rank: R) -> None:
        self.sharding, self.rank = sharding, rank
        self._broadcasts: dict[tuple[int, int], Launch] = {}

    @property
    def ports(self) -> Ports:
        """The global inputs, states and outputs."""
        return self.sharding.ports

    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        """Run once from all arguments, states included; returns all results and keeps nothing."""
        arrays, sizes = self.sharding.every.bind(inputs)
        shards = self.sharding.shards(self.rank.rank, self.rank.taken, arrays)
        states = {port.name: shards[port.name] for port in self.rank.stage.ports.states}
        stream = RankStream(self.rank, sizes, states)
        try:
            results, full = stream.step(shards, sizes)
            return self.gather(self.sharding.results, results, sizes, full)
        finally:
            _close(stream)

    def plain_shards(self, inputs: Mapping[str, Array]) -> tuple[Arrays, Sizes]:
        """This rank's shards of the plain inputs, and the sizes of all symbols."""
        arrays, sizes = self.sharding.plain.bind(inputs)
        return self.sharding.shards(self.rank.rank, self.rank.taken, arrays), sizes

    def open(self, sizes: Mapping[str, int]) -> GpuStream:
        """A stream whose states are zeros; `sizes` has the symbols in their shapes."""
        return GpuStream(self, RankStream(self.rank, sizes), sizes)

    def gather(
        self, names: Iterable[str], results: Mapping[str, DeviceArray], sizes: Sizes, full: Sizes
    ) -> Arrays:
        """Global results from the ranks' shards; bit for bit the same in every process. `full` are
        the sizes that were run."""
        downloads = {name: self._downloads(name, results, full) for name in names}
        self.wait(self.rank.stream)
        return self.joined(downloads, sizes, full)

    def wait(self, done: Stream | Event) -> None:
        """Wait for the stream of this rank, or for a place in it."""
        done.wait()

    def is_local(self, name: str) -> bool:
        """Whether all ranks compute the same bits of a result: not ranks of different kinds, which
        may round differently, though all have to choose the same token."""
        result = self.sharding.results[name]
        everyone = len(self.sharding.ranks_with(result)) == self.sharding.mesh.ranks
        alone = self.rank.world is None
        return alone or (self.rank.alike and everyone and not result.is_sharded)

    def joined(
        self, downloads: Mapping[str, Mapping[int, Array]], sizes: Sizes, full: Sizes
    ) -> Arrays:
        """Global results whose shards have been downloaded, by the ranks that have them."""
        results: Arrays = {}
        for name, hosts in downloads.items():
            result = self.sharding.results[name]
            shape, dtype = self.sharding.shard_shape(result, full), result.port.dtype
            shards = {maker: as_array(host, shape, dtype) for maker, host in hosts.items()}
            array = self.sharding.join(result, shards, full)
            results[name] = np.array(trim(array, sized(result.port.shape, sizes)))
        return results

    def _downloads(
        self, name: str, results: Mapping[str, DeviceArray], sizes: Sizes
    ) -> dict[int, Array]:
        """Enqueue downloads of all shards of a result; the host memory by the ranks that have
        them."""
        result, rank, is_local = self.sharding.results[name], self.rank, self.is_local(name)
        sources = self.sharding.sources(result)
        shape, dtype = host_like(self.sharding.shard_shape(result, sizes), result.port.dtype)
        shards: dict[int, Array] = {}
        for source in dict.fromkeys(sources.values()):
            key = f"{name} of {source}"
            host = shards[source] = rank.shared.host(key, shape, dtype)
            own = is_local or source == rank.rank
            address = results[name].address if own else rank.shared.device(key, host.nbytes)
            if not is_local and host.nbytes:
                self.broadcast(host.nbytes, source)(address, address, rank.stream.handle)
            rank.stream.download(host, address)
        return {maker: shards[source] for maker, source in sources.items()}

    def broadcast(self, size: int, root: int) -> Launch:
        """What sends bytes from a rank to all others."""
        assert self.rank.world is not None
        key = size, root
        if key not in self._broadcasts:
            self._broadcasts[key] = self.rank.world.bind("broadcast", "u8", size, "none", root)
        return self._broadcasts[key]

    def close(self) -> None:
        """Release the GPU; every rank calls it, last."""
        self.rank.close()


class GpuStream:
    """The states of one conversation, of which this process has those of its rank."""

    def __init__(
        self, program: GpuProgram[Any], stream: RankStream, sizes: Mapping[str, int]
    ) -> None:
        self._program, self._stream = program, stream
        self.rows = StateRows.of(program.ports.states, sizes)
        self._names = [port.name for port in program.ports.outputs]
        self._finalizer = weakref.finalize(self, _close, stream)
        self._finalizer.atexit = False

    def step(self, inputs: Mapping[str, Array], first: int = 0) -> Arrays:
        """See Stream."""
        program = self._program
        check_plain(inputs, program.ports)
        shards, sizes = program.plain_shards(inputs)
        results, full = self._stream.step(shards, sizes, self.rows.chosen(sizes, first))
        return program.gather(self._names, results, sizes, full)

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See Stream."""
        self.rows.check(sources, targets)
        self._stream.copy_rows(sources, targets)

    def clear_rows(self, rows: Sequence[int]) -> None:
        """See Stream."""
        self.rows.check(rows)
        self._stream.clear_rows(rows)

    def close(self) -> None:
        """Free the states."""
        self._finalizer()


def _close(stream: RankStream) -> None:
    with suppress(Error):  # of a GPU that has failed, which a step has said
        stream.close()
