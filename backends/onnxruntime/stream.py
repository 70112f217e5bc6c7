"""A rank's model with its states between steps, bound in place: no step copies a cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from irc.backends.base import Arrays, Port, check_plain, state_shape
from irc.backends.onnxruntime.execution import Execution
from irc.backends.ranks.communicator import Communicator
from irc.backends.ranks.inputs import Inputs, Sizes, sized
from irc.errors import Error
from irc.ir.dtypes import numpy_dtype

if TYPE_CHECKING:
    from irc.backends.onnxruntime.model import RankModel

SMALLEST = 64  # positions that a growing cache starts with and grows by at least


class RankStream:
    """The states of one conversation. Input and output of a state are the same memory.

    ONNX Runtime's attention takes time for the full capacity of a cache, so where the model allows
    it, caches start a little larger than their contents and grow by a quarter (a copy each) up to
    the requested capacity. `states`: their contents at first, zeros by default.
    """

    def __init__(
        self,
        model: RankModel,
        sizes: Mapping[str, int],
        communicator: Communicator | None = None,
        states: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        self._model, self._communicator = model, communicator
        self._sizes = dict(sizes)
        ports = model.ports
        for port in ports.states:
            state_shape(port, sizes)  # an Error where a symbol has no size
        self._states = {port.name: port for port in ports.states}
        self._inputs = Inputs("forward", ports.inputs)
        self._execution = Execution(model.parts, communicator)
        self._memory: dict[str, np.ndarray] = dict(states or {})
        self._fed: dict[str, np.ndarray] = {}
        self.capacity = 0  # positions bound now, where the caches grow
        if model.grows is None:
            self._allocate(self._sizes)
        elif states is not None:
            self.capacity = self._sizes[model.grows]
            self._allocate(self._sizes)

    def step(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Run once over the plain inputs, advance the states, return the plain outputs."""
        check_plain(inputs, self._model.ports)
        arrays, sizes = self._inputs.bind(inputs)
        self.check(arrays, sizes)
        return self.advance(arrays, sizes)

    def check(self, arrays: Mapping[str, np.ndarray], sizes: Sizes) -> None:
        """An Error where inputs do not fit the states; nothing has changed then."""
        for name, size in sizes.items():
            if self._sizes.get(name, size) != size:
                raise Error(
                    f"the stream was opened for {name}={self._sizes[name]}, "
                    f"but these inputs have {name}={size}"
                )
        for write in self._model.writes:
            (limit,) = sized([write.capacity], self._sizes)
            self._model.check_room(write.needed(arrays, sizes), limit)

    def advance(self, arrays: Mapping[str, np.ndarray], sizes: Sizes) -> Arrays:
        """A step over this rank's shards of checked inputs, with their `sizes`.

        Receives values from other pipeline stages, and sends them theirs.
        """
        arrays = {**arrays, **self._received()}
        self._make_room(arrays, sizes)
        for name, array in arrays.items():
            self._feed(name, array)
        outputs = {port.name: self._output(port, sizes) for port in self._model.ports.outputs}
        grown = {self._model.grows: self.capacity} if self._model.grows is not None else {}
        self._execution.run(self._sizes | grown | sizes)
        sent: set[str] = set()
        for to, names in self._model.sends.items():
            assert self._communicator is not None
            self._communicator.send(to, {name: outputs[name] for name in names})
            sent.update(names)
        return {name: array for name, array in outputs.items() if name not in sent}

    def held(self, name: str) -> np.ndarray:
        """The present value of a state."""
        return self._memory[name]

    def share(self, other: RankStream) -> None:
        """Keep the states in the memory of another stream, which has the same ones."""
        self.capacity = other.capacity
        for name, memory in other._memory.items():
            if self._memory.get(name) is not memory:
                self._hold(name, memory)

    def _received(self) -> Arrays:
        found: Arrays = {}
        for source in self._model.receives:
            assert self._communicator is not None
            found |= self._communicator.receive(source)
        return found

    def _make_room(self, arrays: Mapping[str, np.ndarray], sizes: Sizes) -> None:
        grows = self._model.grows
        for write in self._model.writes if grows is not None else ():
            needed = write.needed(arrays, sizes)
            if grows is not None and needed > self.capacity:
                (limit,) = sized([write.capacity], self._sizes)
                wanted = max(needed, self.capacity + self.capacity // 4)
                self.capacity = min(-(-wanted // SMALLEST) * SMALLEST, limit)
                self._allocate(self._sizes | {grows: self.capacity})

    def _allocate(self, sizes: Mapping[str, int]) -> None:
        """Bind states of these sizes: zeros, and the contents of the smaller ones before."""
        for name, port in self._states.items():
            # zeros: attention reads the unfilled part, where a NaN would spread
            memory = np.zeros(state_shape(port, sizes), numpy_dtype(port.dtype))
            before = self._memory.get(name)
            if before is not None:
                memory[tuple(slice(size) for size in before.shape)] = before
            self._hold(name, memory)

    def _hold(self, name: str, memory: np.ndarray) -> None:
        """Bind a state to this memory, as input and as output."""
        self._memory[name] = memory
        self._execution.bind(name, memory)
        self._execution.bind(self._model.outputs[self._model.states[name]], memory)

    def _feed(self, name: str, array: np.ndarray) -> None:
        """Copy an input into the memory bound for it, which is kept while the shape stays."""
        bound = self._fed.get(name)
        if bound is not None and bound.shape == array.shape:
            bound[...] = array
            return
        bound = self._fed[name] = np.array(array)
        self._execution.bind(name, bound)

    def _output(self, port: Port, sizes: Sizes) -> np.ndarray:
        """Fresh memory for a result, which the caller may keep."""
        array = np.empty(sized(port.shape, sizes), numpy_dtype(port.dtype))
        self._execution.bind(self._model.outputs[port.name], array)
        return array
