"""A program of several ranks, of which this process runs one; the others are processes, too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from irc.backends.base import Arrays, Ports, check_plain
from irc.backends.communicator import Communicator, Exchange
from irc.backends.onnxruntime.model import RankModel
from irc.backends.onnxruntime.parallel import threads_per_rank
from irc.backends.onnxruntime.session import usable_cores
from irc.backends.onnxruntime.stream import OnnxRuntimeStream
from irc.backends.ranks.inputs import Sizes, sized
from irc.backends.ranks.spread import Result, Spread
from irc.dtypes import numpy_dtype
from irc.errors import Error
from irc.mesh import Mesh


class DistributedProgram:
    """One rank's model on CPU; what goes in and out is whole, and the same in every process.

    `folder` and `facts` are as ParallelProgram has them, `communicator` is this rank's.
    `threads`: how many the ranks of this host together may use, the physical cores by default.
    """

    def __init__(
        self,
        folder: Path,
        facts: Mapping[str, Any],
        communicator: Communicator,
        *,
        threads: int | None = None,
        low_memory: bool = False,
    ) -> None:
        ranks = len(facts["ranks"])
        if communicator.ranks != ranks:
            raise Error(f"{folder} has {ranks} ranks, and {communicator.ranks} processes run it")
        self.spread, self._communicator = Spread(facts), communicator
        # those of all hosts together
        cores = (threads or usable_cores()) * ranks // communicator.neighbours
        each = threads_per_rank(facts, cores)
        self._model = RankModel(
            folder, facts, communicator.rank, threads=each, low_memory=low_memory
        )

    @property
    def ports(self) -> Ports:
        """What goes in, what stays, what comes out; whole over all ranks."""
        return self.spread.ports

    def run(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Every argument in (states too), every result out; nothing is kept."""
        arrays, sizes = self.spread.every.bind(inputs)
        part = self.spread.part(self._model, arrays)
        found = self._model.run(part, sizes, self._communicator)
        return self.whole(self.spread.results, found, sizes)

    def open(self, sizes: Mapping[str, int]) -> DistributedStream:
        """A stream whose states are zeros; `sizes` gives the symbols in their shapes."""
        return DistributedStream(self, self._model, sizes, self._communicator)

    def whole(self, names: Iterable[str], own: Arrays, sizes: Sizes) -> Arrays:
        """Results from what the ranks have of them; bit for bit the same in every process.

        Also where all ranks have the whole of one: processors of different kinds may round
        differently, and the tokens chosen by it must not differ.
        """
        return {name: self._joined(name, own.get(name), sizes) for name in names}

    def _joined(self, name: str, own: np.ndarray | None, sizes: Sizes) -> np.ndarray:
        result = self.spread.results[name]
        sources = self.spread.sources(result)
        sent = {
            source: self._broadcast(name, source, own, result, sizes)
            for source in dict.fromkeys(sources.values())
        }
        parts = {maker: sent[source] for maker, source in sources.items()}
        return self.spread.joined(result, parts, sizes)

    def _broadcast(
        self, name: str, maker: int, own: np.ndarray | None, result: Result, sizes: Sizes
    ) -> np.ndarray:
        shape = _part_shape(result, self.spread.mesh, sizes)
        out = np.empty(shape, numpy_dtype(result.port.dtype))
        operand = out if own is None else np.asarray(own, order="C")
        group = tuple(range(self._communicator.ranks))
        place = f"the result {name}"
        self._communicator.exchange(
            Exchange("broadcast", "none", group, maker, place), operand, out
        )
        return out


def _part_shape(result: Result, mesh: Mesh, sizes: Sizes) -> tuple[int, ...]:
    """The shape of a rank's part, rounded up."""
    whole = sized(result.port.shape, sizes)
    return tuple(-(-n // mesh.ways(axes)) for n, axes in zip(whole, result.axes, strict=True))


class DistributedStream:
    """The states of one conversation, of which this process has its rank's."""

    def __init__(
        self,
        program: DistributedProgram,
        model: RankModel,
        sizes: Mapping[str, int],
        communicator: Communicator,
    ) -> None:
        self._program, self._model = program, model
        self._stream = OnnxRuntimeStream(model, sizes, communicator)
        self._names = [port.name for port in program.ports.outputs]

    def step(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Run once over the plain inputs, advance the states, return the plain outputs."""
        spread = self._program.spread
        check_plain(inputs, spread.ports)
        arrays, sizes = spread.plain.bind(inputs)
        part = spread.part(self._model, arrays)
        self._stream.check(part, sizes)
        return self._program.whole(self._names, self._stream.advance(part, sizes), sizes)

    def share(self, other: DistributedStream) -> None:
        """Keep the states in the memory of another stream, which has the same ones."""
        self._stream.share(other._stream)
