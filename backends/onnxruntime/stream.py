"""A rank's model with its states between steps, bound in place: no step copies a cache."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from irc.backends.base import Arrays, state_shape
from irc.backends.onnxruntime.execution import States
from irc.backends.onnxruntime.model import RankModel
from irc.backends.ranks.communicator import Communicator
from irc.backends.ranks.ports import Sizes
from irc.ir.dtypes import numpy_dtype

PARTS = 8  # ranges of rows whose bindings are kept
SMALLEST = 64  # positions that a growing cache starts with and grows by at least


class RankStream:
    """The states of one conversation. Input and output of a growing state are the same memory.

    ONNX Runtime's Attention takes time for the full capacity of a cache, so where the model allows
    it, caches start a little larger than their contents and grow by a quarter (a copy each) up to
    the requested capacity.
    """

    def __init__(
        self, model: RankModel, sizes: Mapping[str, int], communicator: Communicator | None = None
    ) -> None:
        self._model, self._communicator, self._sizes = model, communicator, dict(sizes)
        for port in model.ports.states:
            state_shape(port, sizes)  # an Error where a symbol has no size
        self.memory: Arrays = {}  # the present value of every state
        self._parts: dict[tuple[int, int], States] = {}  # by the rows of a call
        self.capacity = 0  # positions bound now, where the caches grow
        if model.grows is None:
            self._allocate(self._sizes)

    def check(self, arrays: Mapping[str, np.ndarray], sizes: Sizes) -> int:
        """The number of positions that the caches need for inputs; an Error where they do not fit
        the capacity. Nothing has changed then."""
        return self._model.check(arrays, sizes, self._sizes)

    def advance(
        self, arrays: Mapping[str, np.ndarray], needed: int, rows: slice | None = None
    ) -> Arrays:
        """A step over this rank's shards of checked inputs, which need so many positions.

        `rows` are those of the states that it runs, by default all.
        """
        if needed > self.capacity and self._model.grows is not None:
            self._grow(self._model.grows, needed)
        states = self._part(rows)
        results = self._model.execute(arrays, states, self._communicator)
        for name in self._model.fixed:  # their new values are other arrays
            if rows is not None:
                self.memory[name][rows] = states.read[name]
            else:
                self.memory[name] = states.read[name]
        return results

    def _part(self, rows: slice | None) -> States:
        """The states of these rows, as views of the memory."""
        key = (rows.start, rows.stop) if rows is not None else (0, 0)
        states = self._parts.get(key)
        if states is None:
            if len(self._parts) == PARTS:
                self._parts.clear()
            views = {name: self.memory[name][rows or ...] for name in self.memory}
            states = self._parts[key] = self._model.states_in(views)
        for name in self._model.fixed:
            states.read[name] = self.memory[name][rows or ...]
        return states

    def _grow(self, symbol: str, needed: int) -> None:
        limit = self._sizes[symbol]
        wanted = max(needed, self.capacity + self.capacity // 4)
        self.capacity = min(-(-wanted // SMALLEST) * SMALLEST, limit)
        self._allocate(self._sizes | {symbol: self.capacity})

    def _allocate(self, sizes: Mapping[str, int]) -> None:
        """Memory for states of these sizes: zeros, and the contents of the smaller ones before."""
        self._parts.clear()
        for port in self._model.ports.states:
            # zeros: attention reads the unfilled part, where a NaN would spread
            kind = numpy_dtype(port.computed or port.dtype)
            memory = np.zeros(state_shape(port, sizes), kind)
            before = self.memory.get(port.name)
            if before is not None:
                memory[tuple(slice(size) for size in before.shape)] = before
            self.memory[port.name] = memory
