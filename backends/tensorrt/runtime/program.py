"""A program of engines of which this process runs one rank; what goes in and out is whole."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from irc.backends.base import Arrays, Ports, check_plain
from irc.backends.communicator import Communicator, Exchange
from irc.backends.ranks.inputs import Sizes, sized
from irc.backends.ranks.spread import Result, Spread
from irc.backends.tensorrt.runtime.driver import Array, Driver, Launch
from irc.backends.tensorrt.runtime.execution import Warn
from irc.backends.tensorrt.runtime.plan import RankPlan
from irc.backends.tensorrt.runtime.profiles import trim
from irc.backends.tensorrt.runtime.rank import EngineRank
from irc.backends.tensorrt.runtime.stream import Held, RankStream
from irc.dtypes import numpy_dtype
from irc.errors import Error

_IDENTITY = 64  # bytes of what names a GPU


class EngineProgram:
    """See Program. `folder` and `facts` are what the backend's `emit` wrote and returned.

    `host` talks to the processes of the other ranks, None where there are none; all call the same
    methods with the same inputs, and get the same results.
    """

    def __init__(
        self,
        folder: Path,
        facts: Mapping[str, Any],
        driver: Driver,
        host: Communicator | None,
        *,
        graphs: bool,
        warn: Warn,
    ) -> None:
        self.plan = RankPlan.of_facts(folder, facts, 0 if host is None else host.rank)
        self.spread = Spread(facts)
        if host is not None:
            _check_distinct(driver, host)
        self.rank = EngineRank(folder, self.plan, driver, host, graphs, warn)
        self._broadcasts: dict[tuple[int, int], Launch] = {}

    @property
    def ports(self) -> Ports:
        """What goes in, what stays, what comes out; whole over all ranks."""
        return self.spread.ports

    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        """Every argument in (states too), every result out; nothing is kept."""
        arrays, sizes = self.spread.every.bind(inputs)
        part = self.spread.part(self.rank, arrays)
        states = {port.name: part[port.name] for port in self.rank.stage.ports.states}
        stream = RankStream(self.rank, sizes, states)
        try:
            full = stream.whole_sizes(sizes)
            stream.check(part, full)
            held = stream.advance(part, full)
            return self.whole(self.spread.results, held, sizes, full)
        finally:
            stream.close()

    def open(self, sizes: Mapping[str, int]) -> EngineStream:
        """A stream whose states are zeros; `sizes` gives the symbols in their shapes."""
        return EngineStream(self, RankStream(self.rank, sizes))

    def whole(
        self, names: Iterable[str], held: Mapping[str, Held], sizes: Sizes, full: Sizes
    ) -> Arrays:
        """Results from what the ranks have of them; bit for bit the same in every process.

        Also where all ranks have the whole of one: GPUs of different kinds may round differently,
        and the tokens chosen by it must not differ. `full` are the sizes that were run.
        """
        staged = {name: self._fetched(name, held, full) for name in names}
        self.rank.stream.wait()
        found: Arrays = {}
        for name, parts in staged.items():
            result = self.spread.results[name]
            array = self.spread.joined(result, parts, full)
            found[name] = np.array(trim(array, sized(result.port.shape, sizes)))
        return found

    def _fetched(self, name: str, held: Mapping[str, Held], sizes: Sizes) -> dict[int, Array]:
        """Enqueue copies of the parts of a result; by the ranks that have them."""
        result, rank = self.spread.results[name], self.rank
        sources = self.spread.sources(result)
        found: dict[int, Array] = {}
        for source in dict.fromkeys(sources.values()):
            shape, dtype = self._part_shape(result, sizes), numpy_dtype(result.port.dtype)
            key = f"{name} of {source}"
            host = rank.shared.host(key, shape, dtype)
            size = host.nbytes
            mine = rank.groups is None or source == rank.rank
            address = held[name].address if mine else rank.shared.device(key, size)
            if rank.groups is not None and size:
                self._broadcast(size, source)(address, address, rank.stream.handle)
            rank.stream.download(host, address)
            found[source] = host
        return {maker: found[source] for maker, source in sources.items()}

    def _part_shape(self, result: Result, sizes: Sizes) -> tuple[int, ...]:
        """The shape of a rank's part, rounded up."""
        dims, mesh = sized(result.port.shape, sizes), self.spread.mesh
        return tuple(-(-n // mesh.ways(axes)) for n, axes in zip(dims, result.axes, strict=True))

    def _broadcast(self, size: int, maker: int) -> Launch:
        assert self.rank.groups is not None
        key = size, maker
        if key not in self._broadcasts:
            world = self.rank.groups.world
            self._broadcasts[key] = world.bind("broadcast", "u8", size, "none", maker)
        return self._broadcasts[key]

    def abort(self) -> None:
        """Give up what other ranks are waited for; any thread may say so."""
        if self.rank.groups is not None:
            self.rank.groups.abort()

    def close(self) -> None:
        """Give up the GPU; every rank calls it, and uses nothing of this any more."""
        self.rank.close()


class EngineStream:
    """The states of one conversation, of which this process has its rank's."""

    def __init__(self, program: EngineProgram, stream: RankStream) -> None:
        self._program, self._stream = program, stream
        self._names = [port.name for port in program.ports.outputs]
        self._finalizer = weakref.finalize(self, stream.close)
        self._finalizer.atexit = False

    def step(self, inputs: Mapping[str, Array]) -> Arrays:
        """Run once over the plain inputs, advance the states, return the plain outputs."""
        program = self._program
        check_plain(inputs, program.ports)
        arrays, sizes = program.spread.plain.bind(inputs)
        part = program.spread.part(program.rank, arrays)
        full = self._stream.whole_sizes(sizes)
        self._stream.check(part, full)
        held = self._stream.advance(part, full)
        return program.whole(self._names, held, sizes, full)

    def close(self) -> None:
        """Give up the states."""
        self._finalizer()


def _check_distinct(driver: Driver, host: Communicator) -> None:
    """An Error where two ranks would use one GPU."""
    mine = np.zeros(_IDENTITY, np.uint8)
    name = driver.gpu.identity.encode()[:_IDENTITY]
    mine[: len(name)] = np.frombuffer(name, np.uint8)
    every = np.empty(_IDENTITY * host.ranks, np.uint8)
    group = tuple(range(host.ranks))
    host.exchange(Exchange("all_gather", "none", group, 0, "the GPUs"), mine, every)
    seen: dict[bytes, int] = {}
    for rank, each in enumerate(every.reshape(host.ranks, _IDENTITY)):
        other = seen.setdefault(each.tobytes(), rank)
        if other != rank:
            raise Error(
                f"ranks {other} and {rank} use the same GPU ({driver.gpu.name}); every rank needs "
                "one of its own: start as many processes per host as that has GPUs"
            )
