"""A rank's model with its states between steps, bound in place: no step copies a cache."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from irc.backends.base import Arrays, state_shape
from irc.backends.onnxruntime.execution import Bindings
from irc.backends.onnxruntime.model import RankModel
from irc.backends.ranks.communicator import Communicator
from irc.backends.ranks.ports import Sizes, sized
from irc.errors import Error
from irc.ir.dtypes import numpy_dtype

SMALLEST = 64  # positions that a growing cache starts with and grows by at least


class RankStream:
    """The states of one conversation. Input and output of a growing state are the same memory.

    ONNX Runtime's attention takes time for the full capacity of a cache, so where the model allows
    it, caches start a little larger than their contents and grow by a quarter (a copy each) up to
    the requested capacity.
    """

    def __init__(
        self, model: RankModel, sizes: Mapping[str, int], communicator: Communicator | None = None
    ) -> None:
        self._model, self._communicator, self._sizes = model, communicator, dict(sizes)
        for port in model.ports.states:
            state_shape(port, sizes)  # an Error where a symbol has no size
        self._memory: Arrays = {}
        self._bindings: Bindings = {}
        self.capacity = 0  # positions bound now, where the caches grow
        if model.grows is None:
            self._allocate(self._sizes)

    def check(self, arrays: Mapping[str, np.ndarray], sizes: Sizes) -> None:
        """An Error where inputs do not fit the states; nothing has changed then."""
        for name, size in sizes.items():
            if self._sizes.get(name, size) != size:
                raise Error(
                    f"the stream was opened for {name}={self._sizes[name]}, "
                    f"but these inputs have {name}={size}"
                )
        self._model.check(arrays, sizes, self._sizes)

    def advance(self, arrays: Mapping[str, np.ndarray], sizes: Sizes) -> Arrays:
        """A step over this rank's shards of checked inputs, with their `sizes`."""
        self._make_room(arrays, sizes)
        return self._model.execute(arrays, self._memory, self._communicator, self._bindings)

    def held(self, name: str) -> np.ndarray:
        """The present value of a state."""
        return self._memory[name]

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
        """Memory for states of these sizes: zeros, and the contents of the smaller ones before."""
        for port in self._model.ports.states:
            # zeros: attention reads the unfilled part, where a NaN would spread
            kind = numpy_dtype(port.computed or port.dtype)
            memory = np.zeros(state_shape(port, sizes), kind)
            before = self._memory.get(port.name)
            if before is not None:
                memory[tuple(slice(size) for size in before.shape)] = before
            self._memory[port.name] = memory
