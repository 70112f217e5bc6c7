"""One rank's states of a conversation, which stay on the GPU, and its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from irc.backends.base import Arrays, Port, state_shape
from irc.backends.cuda.driver import Array
from irc.backends.cuda.execute.gpu_rank import Execution, GpuRank
from irc.backends.cuda.execute.memory import DeviceArray, Memory, Shape, as_stored, size_of
from irc.backends.ranks.ports import Sizes, sized
from irc.errors import Error


class RankStream:
    """The states of one rank.

    `sizes` has the symbols in their shapes; `states` their first values, instead of zeros.
    """

    def __init__(
        self, rank: GpuRank[Any], sizes: Mapping[str, int], states: Arrays | None = None
    ) -> None:
        self._rank, self._opened = rank, dict(sizes)
        self._states: dict[str, DeviceArray] = {}
        self.inputs: dict[str, DeviceArray] = {}  # of the last step, which stay in place
        self._again: Callable[[], dict[str, DeviceArray]] | None = None
        try:
            for port in rank.stage.ports.states:
                self._allocate(port, sizes, (states or {}).get(port.name))
        except BaseException:
            self.close()  # the GPU may have too little memory for all of them
            raise
        rank.stream.wait()

    def _allocate(self, port: Port, sizes: Mapping[str, int], array: Array | None) -> None:
        shape, rank = state_shape(port, sizes), self._rank
        size = size_of(shape, port.dtype)
        address = rank.driver.allocate(max(1, size))
        self._states[port.name] = DeviceArray(address, shape, port.dtype)
        if array is not None:
            rank.stream.upload(address, as_stored(pad(array, shape), port.dtype))
            rank.stream.wait()
        elif size:
            rank.driver.zero(address, size, rank.stream.handle)  # attention reads unused positions

    def step(
        self, arrays: Mapping[str, Array], sizes: Sizes
    ) -> tuple[dict[str, DeviceArray], Sizes]:
        """Enqueue a step over this rank's shards; returns its results, and the sizes that were run.

        The results stay in place until the next step. An Error where the inputs do not fit the
        states or a profile; the states have not changed then.
        """
        for name, size in sizes.items():
            if self._opened.get(name, size) != size:
                raise Error(
                    f"the stream was opened for {name}={self._opened[name]}, "
                    f"but these inputs have {name}={size}"
                )
        full = self._rank.padded({**self._opened, **sizes})
        self._check_capacity(arrays, full)
        return self._enqueue(arrays, full), full

    def _check_capacity(self, arrays: Mapping[str, Array], full: Sizes) -> None:
        for write in self._rank.stage.writes:
            (capacity,) = sized([write.capacity], {**full, **self._opened})
            needed = write.needed(arrays, dict(full))
            if needed > capacity:
                raise Error(
                    f"this run fills the caches up to position {needed}, and their capacity is "
                    f"{capacity}; open the stream with a larger capacity, or compile with one"
                )

    def _enqueue(self, arrays: Mapping[str, Array], full: Sizes) -> dict[str, DeviceArray]:
        rank = self._rank
        execution = rank.execution(full)
        self._memory, self._user = execution.memory, object()
        self._memory.user = self._user
        values, results = self._placed(arrays, full, execution.memory)
        self.inputs = {port.name: values[port.name] for port in rank.stage.ports.inputs}
        self._again = lambda: self._run(execution, values, results)
        return self._again()

    def again(self) -> dict[str, DeviceArray]:
        """Enqueue another step at the same sizes, over what lies in `inputs` then.

        The caller knows that the states have room for it. An Error where another stream of the
        program has run meanwhile.
        """
        assert self._again is not None
        if self._memory.user is not self._user:
            raise Error(
                "expected steps that follow each other, found one of another stream between them, "
                "which has overwritten their inputs; take all tokens of one text before the next"
            )
        return self._again()

    def _run(
        self,
        execution: Execution,
        values: Mapping[str, DeviceArray],
        results: dict[str, DeviceArray],
    ) -> dict[str, DeviceArray]:
        rank, stream, world = self._rank, self._rank.stream, self._rank.world
        run = execution.prepared(values, results)
        # no allocation from here on: it would wait for values that other ranks have not sent
        for source, name in _pairs(rank.facts.receives):
            assert world is not None
            value = values[name]
            world.receive(value.address, value.size, source, stream.handle)
        must_meet = run()
        for to, name in _pairs(rank.facts.sends):
            assert world is not None
            world.send(results[name].address, results[name].size, to, stream.handle)
        if must_meet:
            # after the sends: it may have waited for its inputs while it was enqueued
            rank.meet("a step of new sizes")
        return results

    def _placed(
        self, arrays: Mapping[str, Array], full: Sizes, memory: Memory
    ) -> tuple[dict[str, DeviceArray], dict[str, DeviceArray]]:
        """(arguments, results) in device memory; those of `arrays` are being uploaded."""
        stage = self._rank.stage
        values = dict(self._states)
        for port in stage.ports.inputs:
            shape = sized(port.shape, full)
            array = arrays.get(port.name)
            if array is None or memory.has(port.name, array, shape):
                address = memory.device(port.name, size_of(shape, port.dtype))
            else:
                address = memory.upload(port.name, as_stored(pad(array, shape), port.dtype))
                memory.keep(port.name, array, shape)
            values[port.name] = DeviceArray(address, shape, port.dtype)
        results = {result: self._states[state] for state, result in stage.states.items()}
        for port in stage.ports.outputs:
            shape = sized(port.shape, full)
            address = memory.device(f"result {port.name}", size_of(shape, port.dtype))
            results[port.name] = DeviceArray(address, shape, port.dtype)
        return values, results

    def close(self) -> None:
        """Free the states."""
        self._rank.stream.wait()
        for state in self._states.values():
            self._rank.driver.free(state.address)
        self._states.clear()


def _pairs(named: Mapping[int, Iterable[str]]) -> Iterator[tuple[int, str]]:
    return ((rank, name) for rank, names in named.items() for name in names)


def pad(array: Array, shape: Shape) -> Array:
    """`array` padded with zeros up to a shape."""
    if array.shape == shape:
        return array
    return np.pad(array, [(0, n - m) for m, n in zip(array.shape, shape, strict=True)])


def trim(array: Array, shape: Sequence[Any]) -> Array:
    """`array` without its padding."""
    return array if array.shape == shape else array[tuple(map(slice, shape))]
