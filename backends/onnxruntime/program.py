"""A loaded model as a program on numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from irc.backends.base import Arrays, Ports
from irc.backends.onnxruntime.inputs import Inputs, Sizes, port_of, sized
from irc.backends.onnxruntime.session import first_line, open_session
from irc.backends.onnxruntime.stream import OnnxRuntimeStream
from irc.dims import DimLike
from irc.errors import Error
from irc.text.literals import parse_dim


@dataclass(frozen=True)
class Write:
    """A run writes `step` tokens behind the `past` ones into caches of `capacity`."""

    past: str
    step: DimLike
    capacity: DimLike

    def needed(self, inputs: Mapping[str, np.ndarray], sizes: Sizes) -> int:
        """How many positions the caches must have for this run."""
        past = inputs[self.past]
        if past.size and past.min() < 0:
            raise Error(f"the input {self.past} counts tokens, but it has {past.min()}")
        return int(past.max(initial=0)) + sized([self.step], sizes)[0]


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
        ports = facts["ports"]
        self._ports = Ports(
            tuple(port_of(p) for p in ports["inputs"]),
            tuple(port_of(p, state=True) for p in ports["states"]),
            tuple(port_of(p) for p in ports["outputs"]),
        )
        self.session = open_session(Path(folder), facts, threads, low_memory)
        self.grows: str | None = facts["grows"]
        self.writes = [
            Write(w["past"], parse_dim(w["step"]), parse_dim(w["capacity"]))
            for w in facts["writes"]
        ]
        self.state_outputs = {s["input"]: s["output"] for s in facts["states"]}
        self._results = {s["output"]: s["result"] for s in facts["states"]}
        self._inputs = Inputs("forward", [*self._ports.inputs, *self._ports.states])

    @property
    def ports(self) -> Ports:
        """What goes in, what stays, what comes out."""
        return self._ports

    def run(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Every argument in (states too), every result out; nothing is kept."""
        arrays, sizes = self._inputs.bind(inputs)
        for write in self.writes:
            self.check_room(write.needed(arrays, sizes), sized([write.capacity], sizes)[0])
        names = [output.name for output in self.session.get_outputs()]
        try:
            found = self.session.run(names, arrays)
        except Exception as error:  # each failure has a class of its own, with no common base
            raise Error(f"ONNX Runtime failed: {first_line(error)}") from error
        results = zip(names, found, strict=True)
        return {self._results.get(name, name): np.asarray(value) for name, value in results}

    def check_room(self, needed: int, capacity: int) -> None:
        """An Error where a run would write behind the end of a cache."""
        if needed > capacity:
            raise Error(
                f"this run fills the caches up to position {needed}, but they have room for "
                f"{capacity}; open the stream with a larger {self.grows or 'capacity'}"
            )

    def open(self, sizes: Mapping[str, int]) -> OnnxRuntimeStream:
        """A stream whose states are zeros; `sizes` gives the symbols in their shapes."""
        return OnnxRuntimeStream(self, sizes)
