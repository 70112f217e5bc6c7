"""One rank's part of a conversation: caches that stay on the GPU, bound in place, and steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from irc.backends.base import Arrays, Port, state_shape
from irc.backends.ranks.inputs import sized
from irc.backends.tensorrt.runtime.driver import Array, Shape
from irc.backends.tensorrt.runtime.execution import Memory
from irc.backends.tensorrt.runtime.profiles import Sizes, chosen, fill, filled_sizes
from irc.backends.tensorrt.runtime.rank import EngineRank
from irc.dims import Dim
from irc.dtypes import numpy_dtype
from irc.errors import Error


@dataclass(frozen=True)
class Held:
    """A value on the GPU."""

    address: int
    shape: Shape
    dtype: str

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.shape) * numpy_dtype(self.dtype).itemsize


class RankStream:
    """The states of one rank. `sizes` gives the symbols in their shapes, `states` what they hold
    at first, instead of zeros."""

    def __init__(self, rank: EngineRank, sizes: Sizes, states: Arrays | None = None) -> None:
        self._rank, self._asked = rank, dict(sizes)
        self._states: dict[str, Held] = {}
        try:
            for port in rank.stage.ports.states:
                self._states[port.name] = self._begun(port, sizes, (states or {}).get(port.name))
        except BaseException:
            self.close()  # of several caches one may not have found room
            raise
        rank.stream.wait()

    def _begun(self, port: Port, sizes: Sizes, array: Array | None) -> Held:
        shape = state_shape(port, sizes)
        held = Held(0, shape, port.dtype)
        rank = self._rank
        held = Held(rank.driver.allocate(max(1, held.size)), shape, port.dtype)
        if array is None:
            rank.stream.zero(held.address, held.size)  # attention reads the unfilled part
        else:
            rank.stream.upload(held.address, np.ascontiguousarray(fill(array, shape)))
            rank.stream.wait()
        return held

    def whole_sizes(self, sizes: Sizes) -> dict[str, int]:
        """The sizes that a run has, which may be more than those of the inputs: what is missing
        to a profile's least is filled up with zeros.

        Tokens are, in a model with caches: the added ones come behind all others, where no other
        sees them and the next step overwrites them. An Error where inputs do not fit the states.
        """
        for name, size in sizes.items():
            if self._asked.get(name, size) != size:
                raise Error(
                    f"the stream was opened for {name}={self._asked[name]}, "
                    f"but these inputs have {name}={size}"
                )
        full = {**self._asked, **sizes}
        for stage in self._rank.plan.stages:
            kept = {name for port in stage.ports.states for name in _symbols(port)}
            plain = {name for port in stage.ports.inputs for name in _symbols(port)}
            full = filled_sizes(
                stage.profiles, stage.inputs, full, plain - kept if stage.writes else set()
            )
        return full

    def check(self, arrays: Mapping[str, Array], full: Sizes) -> None:
        """An Error where the caches have no room for a run; nothing has changed then."""
        for write in self._rank.stage.writes:
            (limit,) = sized([write.capacity], {**full, **self._asked})
            needed = write.needed(arrays, dict(full))
            if needed > limit:
                raise Error(
                    f"this run fills the caches up to position {needed}, but they have room for "
                    f"{limit}; open the stream with a larger capacity, or compile with one"
                )

    def advance(self, arrays: Mapping[str, Array], full: Sizes) -> dict[str, Held]:
        """Enqueue a step over this rank's part of checked inputs; its results by name.

        What other stages send is waited for by the GPU, what they need is sent by it. The results
        stay where they are until the next step.
        """
        rank, stage = self._rank, self._rank.stage
        number = chosen(stage.profiles, stage.inputs, full)
        execution = rank.executions[number]
        values, results = self._placed(arrays, full, execution.memory)
        # a network that makes a state anew may still read the old one while it writes
        anew = {
            state: execution.memory.device(f"new {state}", self._states[state].size)
            for state in stage.copied
        }
        addresses = rank.fixed | {name: value.address for name, value in values.items()}
        addresses |= {stage.outputs[name]: held.address for name, held in results.items()}
        addresses |= {stage.outputs[stage.states[state]]: anew[state] for state in anew}
        # all memory is there now: to make some would wait for what other ranks have not sent yet
        for source, name in _pairs(rank.plan.receives):
            held = values[name]
            rank.world.receive(held.address, held.size, source, rank.stream.handle)
        least = stage.profiles[number].least if stage.profiles else {}
        shapes = {name: values[name].shape for name in least}
        execution.run(
            shapes,
            addresses,
            {stage.outputs[name]: held.shape for name, held in results.items()},
        )
        for state, address in anew.items():
            held = self._states[state]
            rank.stream.copy(held.address, address, held.size)
        for to, name in _pairs(rank.plan.sends):
            rank.world.send(results[name].address, results[name].size, to, rank.stream.handle)
        if execution.is_new(shapes):
            # behind the sends: an engine may wait for its inputs while it is put on the stream
            rank.meet("a step of new sizes")
        return results

    def _placed(
        self, arrays: Mapping[str, Array], full: Sizes, memory: Memory
    ) -> tuple[dict[str, Held], dict[str, Held]]:
        """Where all arguments and results are; those that the caller gives are on their way."""
        stage = self._rank.stage
        values = dict(self._states)
        for port in stage.ports.inputs:
            held = Held(0, sized(port.shape, full), port.dtype)
            if port.name in arrays:
                place = memory.upload(port.name, fill(arrays[port.name], held.shape))
            else:
                place = memory.device(port.name, held.size)
            values[port.name] = Held(place, held.shape, port.dtype)
        results = {result: self._states[state] for state, result in stage.states.items()}
        for port in stage.ports.outputs:
            held = Held(0, sized(port.shape, full), port.dtype)
            place = memory.device(f"result {port.name}", held.size)
            results[port.name] = Held(place, held.shape, port.dtype)
        return values, results

    def close(self) -> None:
        """Give up the states."""
        self._rank.stream.wait()
        for held in self._states.values():
            self._rank.driver.free(held.address)
        self._states.clear()


def _pairs(named: Mapping[int, Iterable[str]]) -> Iterator[tuple[int, str]]:
    return ((rank, name) for rank, names in named.items() for name in names)


def _symbols(port: Port) -> set[str]:
    return {name for dim in port.shape if isinstance(dim, Dim) for name in dim.symbols()}
