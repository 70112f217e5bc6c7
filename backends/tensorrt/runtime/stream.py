"""One rank's share of a conversation: states that stay on the GPU, bound in place, and steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from irc.backends.base import Arrays, Port, state_shape
from irc.backends.cuda.driver import Array
from irc.backends.ranks.inputs import sized
from irc.backends.tensorrt.runtime.engine import Shape
from irc.backends.tensorrt.runtime.execution import Memory
from irc.backends.tensorrt.runtime.profiles import Sizes, chosen, pad, padded_sizes
from irc.backends.tensorrt.runtime.rank import EngineRank
from irc.errors import Error
from irc.ir.dims import Dim
from irc.ir.dtypes import numpy_dtype


@dataclass(frozen=True)
class DeviceArray:
    """An array in device memory."""

    address: int
    shape: Shape
    dtype: str

    @property
    def size(self) -> int:
        """Bytes."""
        return _size(self.shape, self.dtype)


def _size(shape: Shape, dtype: str) -> int:
    return prod(shape) * numpy_dtype(dtype).itemsize


class RankStream:
    """The states of one rank.

    `sizes` has the symbols in their shapes; `states` their first values, instead of zeros.
    """

    def __init__(self, rank: EngineRank, sizes: Sizes, states: Arrays | None = None) -> None:
        self._rank, self._opened = rank, dict(sizes)
        self._states: dict[str, DeviceArray] = {}
        try:
            for port in rank.stage.ports.states:
                self._allocate(port, sizes, (states or {}).get(port.name))
        except BaseException:
            self.close()  # the GPU may have too little memory for all of them
            raise
        rank.stream.wait()

    def _allocate(self, port: Port, sizes: Sizes, array: Array | None) -> None:
        shape, rank = state_shape(port, sizes), self._rank
        size = _size(shape, port.dtype)
        address = rank.driver.allocate(max(1, size))
        self._states[port.name] = DeviceArray(address, shape, port.dtype)
        if array is not None:
            rank.stream.upload(address, np.ascontiguousarray(pad(array, shape)))
            rank.stream.wait()
        elif size:
            rank.driver.zero(address, size, rank.stream.handle)  # attention reads unused positions

    def step(
        self, arrays: Mapping[str, Array], sizes: Sizes
    ) -> tuple[dict[str, DeviceArray], dict[str, int]]:
        """Enqueue a step over this rank's shards; returns its results, and the sizes that were run.

        The results stay in place until the next step. An Error where the inputs do not fit the
        states or a profile; the states have not changed then.
        """
        full = self._padded_sizes(sizes)
        self._check_capacity(arrays, full)
        return self._enqueue(arrays, full), full

    def _padded_sizes(self, sizes: Sizes) -> dict[str, int]:
        """The sizes of a run: those of the inputs, padded to the minimum of a profile.

        In a model with caches only tokens are padded: no token attends to the padding behind it,
        and the next step overwrites it.
        """
        for name, size in sizes.items():
            if self._opened.get(name, size) != size:
                raise Error(
                    f"the stream was opened for {name}={self._opened[name]}, "
                    f"but these inputs have {name}={size}"
                )
        full = {**self._opened, **sizes}
        for stage in self._rank.plan.stages:
            kept = {name for port in stage.ports.states for name in symbols_of(port)}
            plain = {name for port in stage.ports.inputs for name in symbols_of(port)}
            may_grow = plain - kept if stage.writes else set[str]()
            full = padded_sizes(stage.profiles, stage.inputs, full, may_grow)
        return full

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
        rank, stage, stream = self._rank, self._rank.stage, self._rank.stream
        number = chosen(stage.profiles, stage.inputs, full)
        execution = rank.executions[number]
        values, results = self._placed(arrays, full, execution.memory)
        # the engine may still read these states while it writes their new values elsewhere
        copies = {
            state: execution.memory.device(f"new {state}", self._states[state].size)
            for state in stage.copied
        }
        addresses = rank.fixed | {name: value.address for name, value in values.items()}
        addresses |= {stage.outputs[name]: value.address for name, value in results.items()}
        addresses |= {stage.outputs[stage.states[state]]: copies[state] for state in copies}
        # no allocation from here on: it would wait for values that other ranks have not sent
        for source, name in _pairs(rank.plan.receives):
            value = values[name]
            rank.world.receive(value.address, value.size, source, stream.handle)
        dynamic = stage.profiles[number].shapes if stage.profiles else {}
        shapes = {name: values[name].shape for name in dynamic}
        outputs = {stage.outputs[name]: value.shape for name, value in results.items()}
        execution.run(shapes, addresses, outputs)
        for state, address in copies.items():
            stream.copy(self._states[state].address, address, self._states[state].size)
        for to, name in _pairs(rank.plan.sends):
            rank.world.send(results[name].address, results[name].size, to, stream.handle)
        if execution.is_new(shapes):
            # after the sends: an engine may wait for its inputs while it is enqueued
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
            if port.name in arrays:
                address = memory.upload(port.name, pad(arrays[port.name], shape))
            else:
                address = memory.device(port.name, _size(shape, port.dtype))
            values[port.name] = DeviceArray(address, shape, port.dtype)
        results = {result: self._states[state] for state, result in stage.states.items()}
        for port in stage.ports.outputs:
            shape = sized(port.shape, full)
            address = memory.device(f"result {port.name}", _size(shape, port.dtype))
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


def symbols_of(port: Port) -> set[str]:
    """The symbols in the shape of a port."""
    return {name for dim in port.shape if isinstance(dim, Dim) for name in dim.symbols()}
