"""One rank's states of a conversation, which stay on the GPU, and its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from irc.backends.base import Arrays, state_shape
from irc.backends.cuda.driver import Array
from irc.backends.cuda.execute.feed import Feed
from irc.backends.cuda.execute.gpu_rank import Execution, GpuRank
from irc.backends.cuda.execute.memory import (
    DeviceArray,
    Shape,
    as_stored,
    check_room,
    packed_offsets,
    size_of,
)
from irc.backends.cuda.plan.core import ALIGNMENT
from irc.backends.ranks.ports import Sizes, sized
from irc.errors import Error

# what follows a step over inputs and results
MakeFeed: TypeAlias = Callable[[Mapping[str, DeviceArray], Mapping[str, DeviceArray]], Feed]


class RankStream:
    """The states of one rank.

    `sizes` has the symbols in their shapes; `states` their first values, instead of zeros.
    """

    def __init__(
        self, rank: GpuRank[Any], sizes: Mapping[str, int], states: Arrays | None = None
    ) -> None:
        self._rank, self._opened = rank, dict(sizes)
        rank.driver.make_current()  # the thread of a server is not the one that loaded
        self.inputs: dict[str, DeviceArray] = {}  # of the last step, which stay in place
        self._again: Callable[[], dict[str, DeviceArray]] | None = None
        ports = {port.name: port for port in rank.stage.ports.states}
        shapes = {name: state_shape(port, sizes) for name, port in ports.items()}
        nbytes = {name: size_of(shapes[name], port.dtype) for name, port in ports.items()}
        offsets, total = packed_offsets(nbytes)
        self._size = max(1, total)
        if ports:
            check_room(rank.driver, {"caches": self._size}, sizes)
        self._address = rank.driver.allocate(self._size) if ports else 0
        self._states = {
            name: DeviceArray(self._address + offsets[name], shapes[name], port.dtype)
            for name, port in ports.items()
        }
        try:
            self._fill(states or {})
        except BaseException:
            self.close()
            raise

    def _fill(self, arrays: Arrays) -> None:
        """Write the first values; attention reads unused positions, which must be numbers."""
        rank, uploads = self._rank, list[Array]()
        if self._address:
            rank.driver.zero(self._address, self._size, rank.stream.handle)
        for name, array in arrays.items():
            state = self._states[name]
            uploads.append(as_stored(pad(array, state.shape), state.dtype))
            rank.stream.upload(state.address, uploads[-1])
        rank.stream.wait()

    def step(
        self,
        arrays: Mapping[str, Array],
        sizes: Sizes,
        rows: slice | None = None,
        feed: MakeFeed | None = None,
    ) -> tuple[dict[str, DeviceArray], Sizes]:
        """Enqueue a step over this rank's shards; returns its results, and the sizes that were run.

        `rows` are those of the states that it runs, by default all; `feed` makes what follows this
        step and its repetitions. The results stay in place until the next step. An Error where the
        inputs do not fit the capacity or a profile; the states have not changed then.
        """
        if self._states and not self._address:
            raise Error("expected an open stream, found a closed one; open another")
        self._rank.driver.make_current()
        full = self._rank.padded({**self._opened, **sizes})
        self._check_capacity(arrays, full)
        return self._enqueue(arrays, full, rows, feed), full

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Enqueue the copies, by way of other memory, since a row may be both source and target."""
        stream = self._rank.stream
        self._rank.driver.make_current()
        for state in self._states.values():
            size = state.size // state.shape[0]
            staged = self._rank.shared.device("copied rows", size * len(sources))
            for n, row in enumerate(sources):
                stream.copy(staged + n * size, state.address + row * size, size)
            for n, row in enumerate(targets):
                stream.copy(state.address + row * size, staged + n * size, size)

    def clear_rows(self, rows: Sequence[int]) -> None:
        """Enqueue filling rows with zeros."""
        rank = self._rank
        rank.driver.make_current()
        for state in self._states.values():
            size = state.size // state.shape[0]
            for row in rows:
                rank.driver.zero(state.address + row * size, size, rank.stream.handle)

    def _check_capacity(self, arrays: Mapping[str, Array], full: Sizes) -> None:
        for write in self._rank.stage.writes:
            (capacity,) = sized([write.capacity], {**full, **self._opened})
            needed = write.needed(arrays, dict(full))
            if needed > capacity:
                raise Error(
                    f"this run fills the caches up to position {needed}, and their capacity is "
                    f"{capacity}; open the stream with a larger capacity, or compile with one"
                )

    def _enqueue(
        self, arrays: Mapping[str, Array], full: Sizes, rows: slice | None, feed: MakeFeed | None
    ) -> dict[str, DeviceArray]:
        rank = self._rank
        execution = rank.execution(full)
        self._memory, self._user = execution.memory, object()
        self._memory.user = self._user
        states = self._states
        if rows is not None:
            states = {name: _part(state, rows) for name, state in states.items()}
        # kernels expect arrays at multiples of ALIGNMENT: rows at others are copied there
        moved = {name: state for name, state in states.items() if state.address % ALIGNMENT}
        states = states | {
            name: replace(state, address=execution.memory.device(f"rows of {name}", state.size))
            for name, state in moved.items()
        }
        values, results = self._placed(arrays, full, states)
        self.inputs = {port.name: values[port.name] for port in rank.stage.ports.inputs}

        behind = feed(self.inputs, results) if feed else None

        def again() -> dict[str, DeviceArray]:
            for name, state in moved.items():
                rank.stream.copy(states[name].address, state.address, state.size)
            self._run(execution, values, results, behind)
            for name, state in moved.items():
                rank.stream.copy(state.address, states[name].address, state.size)
            return results

        self._again = again
        return again()

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
        feed: Feed | None,
    ) -> None:
        rank, stream, world = self._rank, self._rank.stream, self._rank.world
        run = execution.prepared(values, results, feed)
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

    def _placed(
        self, arrays: Mapping[str, Array], full: Sizes, states: Mapping[str, DeviceArray]
    ) -> tuple[dict[str, DeviceArray], dict[str, DeviceArray]]:
        """(arguments, results) in device memory; those of `arrays` are being uploaded."""
        stage, memory = self._rank.stage, self._memory
        values = dict(states)
        for port in stage.ports.inputs:
            shape = sized(port.shape, full)
            array = arrays.get(port.name)
            if array is None or memory.has(port.name, array, shape):
                address = memory.device(port.name, size_of(shape, port.dtype))
            else:
                address = memory.upload(port.name, as_stored(pad(array, shape), port.dtype))
                memory.keep(port.name, array, shape)
            values[port.name] = DeviceArray(address, shape, port.dtype)
        results = {result: states[state] for state, result in stage.states.items()}
        for port in stage.ports.outputs:
            shape = sized(port.shape, full)
            address = memory.device(f"result {port.name}", size_of(shape, port.dtype))
            results[port.name] = DeviceArray(address, shape, port.dtype)
        return values, results

    def close(self) -> None:
        """Free the states; the next stream of equal sizes gets their memory, and its graphs."""
        try:
            self._rank.stream.wait()
        finally:
            address, self._address = self._address, 0
            if address:
                self._rank.driver.keep(address, self._size)


def _pairs(named: Mapping[int, Iterable[str]]) -> Iterator[tuple[int, str]]:
    return ((rank, name) for rank, names in named.items() for name in names)


def _part(state: DeviceArray, rows: slice) -> DeviceArray:
    """Rows of a state in place."""
    count, *row = state.shape
    shape = (rows.stop - rows.start, *row)
    return replace(state, address=state.address + rows.start * (state.size // count), shape=shape)


def pad(array: Array, shape: Shape) -> Array:
    """`array` padded with zeros up to a shape."""
    if array.shape == shape:
        return array
    return np.pad(array, [(0, n - m) for m, n in zip(array.shape, shape, strict=True)])


def trim(array: Array, shape: Sequence[Any]) -> Array:
    """`array` without its padding."""
    return array if array.shape == shape else array[tuple(map(slice, shape))]
