"""Runs one rank's model: its segments on bound memory, and its collectives."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from onnxruntime import InferenceSession, IOBinding, OrtValue

from irc.backends.onnxruntime.buffers import place
from irc.backends.onnxruntime.segments import Collective
from irc.backends.onnxruntime.session import Part, Parts, first_line
from irc.backends.ranks.communicator import Communicator
from irc.backends.ranks.inputs import Sizes
from irc.errors import Error

Array: TypeAlias = np.ndarray[Any, Any]


class Execution:
    """A repeatable run. Every input and output is bound to an array before it.

    A value between two steps is one array, which one step writes and the next reads; it stays
    while the sizes do.
    """

    def __init__(self, parts: Parts, communicator: Communicator | None = None) -> None:
        self._between, self._communicator = parts.between, communicator
        self._readers: dict[str, list[IOBinding]] = {}
        self._writers: dict[str, IOBinding] = {}
        self._steps = [s if isinstance(s, Collective) else self._bound(s) for s in parts.steps]
        self._arrays: dict[str, Array] = {}
        self._held: dict[str, OrtValue] = {}
        self._sizes: Sizes | None = None

    def _bound(self, part: Part) -> _Segment:
        binding = part.session.io_binding()
        for name in part.inputs:
            self._readers.setdefault(name, []).append(binding)
        for name in part.outputs:
            binding.bind_output(name)  # get_outputs returns them in this order
        self._writers |= dict.fromkeys(part.outputs, binding)
        found = [(i, name) for i, name in enumerate(part.outputs) if self._unknown(name)]
        return _Segment(part.session, binding, found)

    def _unknown(self, name: str) -> bool:
        """Whether the shape is known at run time only."""
        return name in self._between and self._between[name].shape is None

    def bind(self, name: str, array: Array) -> None:
        """Bind a value of the model to this array."""
        held = OrtValue.ortvalue_from_numpy(array)
        if name in self._writers:
            self._writers[name].bind_ortvalue_output(name, held)
        self._bind_readers(name, held, array)

    def _bind_readers(self, name: str, held: OrtValue, array: Array) -> None:
        for binding in self._readers.get(name, ()):
            binding.bind_ortvalue_input(name, held)
        self._held[name], self._arrays[name] = held, array

    def run(self, sizes: Sizes) -> None:
        """Run all steps; `sizes` has the symbols in the shapes of what is bound."""
        if sizes != self._sizes:
            for name, array in place(self._between, sizes).items():
                self.bind(name, array)
            self._sizes = dict(sizes)
        for step in self._steps:
            if isinstance(step, Collective):
                self._run_collective(step)
            else:
                self._run(step)

    def _run(self, segment: _Segment) -> None:
        for _, name in segment.unknown:
            segment.binding.bind_output(name)  # the output of the last run may not fit
        try:
            segment.session.run_with_iobinding(segment.binding)
        except Exception as error:  # each failure has a class of its own, with no common base
            raise Error(f"ONNX Runtime failed: {first_line(error)}") from error
        found = segment.binding.get_outputs() if segment.unknown else []
        for i, name in segment.unknown:
            self._bind_readers(name, found[i], found[i].numpy())

    def _run_collective(self, step: Collective) -> None:
        """A collective reads where one segment wrote, and writes where another reads."""
        assert self._communicator is not None  # a model of one rank has no collectives
        operand = self._arrays[step.operand]
        if self._unknown(step.result):
            shape = step.call.result_shape(operand.shape)
            self.bind(step.result, np.empty(shape, operand.dtype))
        self._communicator.collective(step.call, operand, self._arrays[step.result])


class _Segment:
    """A session with its binding, and the outputs (position, name) of unknown shape."""

    def __init__(
        self, session: InferenceSession, binding: IOBinding, unknown: list[tuple[int, str]]
    ) -> None:
        self.session, self.binding, self.unknown = session, binding, unknown
