"""A program of several ranks, which are threads of this process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from irc.backends.base import Arrays, Ports, check_plain
from irc.backends.communicator import Communicator
from irc.backends.onnxruntime.model import RankModel
from irc.backends.onnxruntime.session import usable_cores
from irc.backends.onnxruntime.stream import OnnxRuntimeStream
from irc.backends.onnxruntime.threads import TIMEOUT, ThreadWorld
from irc.backends.ranks.spread import Spread


class ParallelProgram:
    """The emitted models of all ranks on CPU; what goes in and out is whole.

    `folder` holds them; `facts` is what the backend's `emit` returned. `threads`: how many all
    ranks together may use, the physical cores by default. `low_memory`: as in OnnxRuntimeProgram.
    `timeout`: for how many seconds ranks wait while none of them moves.
    """

    def __init__(
        self,
        folder: Path,
        facts: Mapping[str, Any],
        *,
        threads: int | None = None,
        low_memory: bool = False,
        timeout: float = TIMEOUT,
    ) -> None:
        self.spread, self.timeout = Spread(facts), timeout
        each = threads_per_rank(facts, threads or usable_cores())
        ranks = len(facts["ranks"])
        # in threads: making sessions takes most of the time, and takes it outside of Python
        self.models: list[RankModel] = ThreadWorld(ranks).run(
            lambda c: RankModel(folder, facts, c.rank, threads=each, low_memory=low_memory)
        )

    @property
    def ports(self) -> Ports:
        """What goes in, what stays, what comes out; whole over all ranks."""
        return self.spread.ports

    def run(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Every argument in (states too), every result out; nothing is kept."""
        arrays, sizes = self.spread.every.bind(inputs)

        def one(communicator: Communicator) -> Arrays:
            model = self.models[communicator.rank]
            return model.run(self.spread.part(model, arrays), sizes, communicator)

        world = ThreadWorld(len(self.models), self.timeout)
        return self.spread.whole(world.run(one), sizes)

    def open(self, sizes: Mapping[str, int]) -> ParallelStream:
        """A stream whose states are zeros; `sizes` gives the symbols in their shapes."""
        return ParallelStream(self, sizes)


class ParallelStream:
    """The states of one conversation, every rank's own. After a failure it is good for nothing."""

    def __init__(self, program: ParallelProgram, sizes: Mapping[str, int]) -> None:
        self._spread, self._models = program.spread, program.models
        self._world = ThreadWorld(len(program.models), program.timeout)
        self._streams = [
            OnnxRuntimeStream(model, sizes, self._world.communicator(model.rank))
            for model in program.models
        ]

    def step(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Run once over the plain inputs, advance the states, return the plain outputs."""
        spread = self._spread
        check_plain(inputs, spread.ports)
        arrays, sizes = spread.plain.bind(inputs)
        parts = [spread.part(model, arrays) for model in self._models]
        for stream, part in zip(self._streams, parts, strict=True):
            stream.check(part, sizes)
        found = self._world.run(lambda c: self._streams[c.rank].advance(parts[c.rank], sizes))
        return spread.whole(found, sizes)

    def share(self, other: ParallelStream) -> None:
        """Keep the states in the memory of another stream, which has the same ones."""
        for own, each in zip(self._streams, other._streams, strict=True):
            own.share(each)


def threads_per_rank(facts: Mapping[str, Any], cores: int) -> int:
    """How many threads a rank's operations use; pipeline stages take turns."""
    together = len(facts["ranks"]) // len(facts["stages"])
    return max(1, cores // together)
