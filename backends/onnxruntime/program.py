"""A model of one rank as a program on numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from onnxruntime import InferenceSession

from irc.backends.base import Arrays, Ports
from irc.backends.onnxruntime.model import RankModel
from irc.backends.onnxruntime.session import Part, first_line
from irc.backends.onnxruntime.stream import OnnxRuntimeStream
from irc.backends.ranks.inputs import Inputs, sized
from irc.errors import Error


class OnnxRuntimeProgram:
    """An emitted model on CPU. `folder` holds it; `facts` is what the backend's `emit` returned.

    `threads`: how many an operation may use, the physical cores by default. `low_memory`: f32
    weights stay pages of their files rather than being repacked, so that loading takes no time and
    a run about a fifth more.
    """

    def __init__(
        self,
        folder: Path,
        facts: Mapping[str, Any],
        *,
        threads: int | None = None,
        low_memory: bool = False,
    ) -> None:
        self.model = RankModel(folder, facts, threads=threads, low_memory=low_memory)
        self._inputs = Inputs("forward", [*self.ports.inputs, *self.ports.states])

    @property
    def ports(self) -> Ports:
        """What goes in, what stays, what comes out."""
        return self.model.ports

    @property
    def session(self) -> InferenceSession:
        """The session that runs the whole model."""
        (part,) = (step for step in self.model.parts.steps if isinstance(step, Part))
        return part.session

    def run(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Every argument in (states too), every result out; nothing is kept."""
        arrays, sizes = self._inputs.bind(inputs)
        for write in self.model.writes:
            capacity = sized([write.capacity], sizes)[0]
            self.model.check_room(write.needed(arrays, sizes), capacity)
        outputs = self.model.outputs
        try:
            found = self.session.run([*outputs.values()], arrays)
        except Exception as error:  # each failure has a class of its own, with no common base
            raise Error(f"ONNX Runtime failed: {first_line(error)}") from error
        return {name: np.asarray(value) for name, value in zip(outputs, found, strict=True)}

    def open(self, sizes: Mapping[str, int]) -> OnnxRuntimeStream:
        """A stream whose states are zeros; `sizes` gives the symbols in their shapes."""
        return OnnxRuntimeStream(self.model, sizes)
