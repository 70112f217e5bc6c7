"""A program with its states between steps, bound in place: no step copies a cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from onnxruntime import OrtValue

from irc.backends.base import Arrays, Port, check_plain, state_shape
from irc.backends.onnxruntime.inputs import Inputs, Sizes, sized
from irc.backends.onnxruntime.session import first_line
from irc.dtypes import numpy_dtype
from irc.errors import Error

if TYPE_CHECKING:
    from irc.backends.onnxruntime.program import OnnxRuntimeProgram

SMALLEST = 64  # positions that a growing cache starts with and grows by at least


class OnnxRuntimeStream:
    """The states of one conversation. Input and output of a state are the same memory.

    ONNX Runtime's attention takes time for the whole capacity of a cache, filled or not, so where
    the model allows it, caches are bound with little more than they hold and grow by a quarter
    (a copy each) up to the capacity asked for.
    """

    def __init__(self, program: OnnxRuntimeProgram, sizes: Mapping[str, int]) -> None:
        self._program = program
        self._asked = dict(sizes)
        ports = program.ports
        for port in ports.states:
            state_shape(port, sizes)  # an Error where a symbol has no size
        self._states = {port.name: port for port in ports.states}
        self._inputs = Inputs("forward", ports.inputs)
        self._binding = program.session.io_binding()
        self._memory: dict[str, np.ndarray] = {}
        self._held: dict[str, OrtValue] = {}
        self._fed: dict[str, np.ndarray] = {}
        self.capacity = 0  # positions bound now, where the caches grow
        if program.grows is None:
            self._allocate(self._asked)

    def step(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Run once over the plain inputs, advance the states, return the plain outputs."""
        check_plain(inputs, self._program.ports)
        arrays, sizes = self._inputs.bind(inputs)
        self._check_sizes(sizes)
        self._make_room(arrays, sizes)
        for name, array in arrays.items():
            self._feed(name, array)
        outputs = {p.name: self._output(p, sizes) for p in self._program.ports.outputs}
        try:
            self._program.session.run_with_iobinding(self._binding)
        except Exception as error:  # each failure has a class of its own, with no common base
            raise Error(f"ONNX Runtime failed: {first_line(error)}") from error
        return outputs

    def _check_sizes(self, sizes: Sizes) -> None:
        """Symbols of the states keep the size they were opened with."""
        for name, size in sizes.items():
            if self._asked.get(name, size) != size:
                raise Error(
                    f"the stream was opened for {name}={self._asked[name]}, "
                    f"but these inputs have {name}={size}"
                )

    def _make_room(self, arrays: Mapping[str, np.ndarray], sizes: Sizes) -> None:
        for write in self._program.writes:
            needed = write.needed(arrays, sizes)
            (limit,) = sized([write.capacity], self._asked)
            self._program.check_room(needed, limit)
            if self._program.grows is not None and needed > self.capacity:
                wanted = max(needed, self.capacity + self.capacity // 4)
                self.capacity = min(-(-wanted // SMALLEST) * SMALLEST, limit)
                self._allocate(self._asked | {self._program.grows: self.capacity})

    def _allocate(self, sizes: Mapping[str, int]) -> None:
        """States of these sizes: zeros, with what the smaller ones held before."""
        for name, port in self._states.items():
            # zeros, not empty: attention reads the unfilled part, where a NaN would spread
            memory = np.zeros(state_shape(port, sizes), numpy_dtype(port.dtype))
            before = self._memory.get(name)
            if before is not None:
                memory[tuple(slice(size) for size in before.shape)] = before
            self._memory[name] = memory
            held = self._held[name] = OrtValue.ortvalue_from_numpy(memory)
            self._binding.bind_ortvalue_input(name, held)
            self._binding.bind_ortvalue_output(self._program.state_outputs[name], held)

    def _feed(self, name: str, array: np.ndarray) -> None:
        """Copy an input into the memory bound for it, which is kept while the shape stays."""
        bound = self._fed.get(name)
        if bound is not None and bound.shape == array.shape:
            bound[...] = array
            return
        bound = self._fed[name] = np.array(array)
        self._held[name] = OrtValue.ortvalue_from_numpy(bound)
        self._binding.bind_ortvalue_input(name, self._held[name])

    def _output(self, port: Port, sizes: Sizes) -> np.ndarray:
        """Fresh memory for a result, which the caller may keep."""
        array = np.empty(sized(port.shape, sizes), numpy_dtype(port.dtype))
        held = self._held[f"output {port.name}"] = OrtValue.ortvalue_from_numpy(array)
        self._binding.bind_ortvalue_output(port.name, held)
        return array
