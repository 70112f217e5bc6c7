"""A program of several processes: rank 0 leads it (`LeadingProgram`), the others `follow`.

Every call on rank 0 is sent to the other ranks, which repeat it, so that its caller need not know
of them.
"""

from __future__ import annotations

import pickle
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, TypeAlias

import numpy as np

from ..backends.base import Arrays, Ports, Program, Stream
from ..backends.ranks.communicator import Communicator

Array: TypeAlias = np.ndarray[Any, Any]

_END = "end"


class LeadingProgram:
    """The program of rank 0, and its one stream, which `open` begins anew.

    Between two calls the other ranks wait for any time, see `Communicator.paused`.
    """

    def __init__(self, program: Program, communicator: Communicator) -> None:
        self._program, self._communicator = program, communicator
        self._stream: Stream | None = None
        self._pause = ExitStack()
        self._pause.enter_context(communicator.paused())

    @property
    def ports(self) -> Ports:
        """The inputs, states and outputs."""
        return self._program.ports

    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        """All results for all arguments, states among both; nothing is kept."""
        return self._everywhere("run", inputs)

    def open(self, sizes: Mapping[str, int]) -> Stream:
        """A stream whose states are zeros; `sizes` are the symbols in their shapes."""
        self._stream = self._everywhere("open", sizes)
        return self

    def step(self, inputs: Mapping[str, Array], first: int = 0) -> Arrays:
        """Run rows `first`, `first + 1`, ... of the states."""
        return self._everywhere("step", inputs, first)

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Let row `targets[i]` of all states be what row `sources[i]` was before the call."""
        self._everywhere("copy_rows", sources, targets)

    def clear_rows(self, rows: Sequence[int]) -> None:
        """Fill these rows of all states with zeros."""
        self._everywhere("clear_rows", rows)

    def end(self) -> None:
        """Let the other ranks return from `follow`."""
        self._everywhere(_END)
        self._pause.close()

    def _everywhere(self, name: str, *arguments: object) -> Any:
        self._pause.close()
        call = np.frombuffer(pickle.dumps((name, arguments)), np.uint8)
        for rank in range(1, self._communicator.ranks):
            self._communicator.send(rank, {"call": call})
        result = _result(self._program, self._stream, name, arguments)
        self._pause.enter_context(self._communicator.paused())
        return result


def follow(program: Program, communicator: Communicator) -> None:
    """Repeat the calls of rank 0 on its LeadingProgram; returns at its `end`.

    Signals to end are left to rank 0.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(ValueError):  # not the main thread
            signal.signal(number, signal.SIG_IGN)
    name, stream = "", None
    while name != _END:
        name, arguments = pickle.loads(communicator.receive(0)["call"].tobytes())
        result = _result(program, stream, name, arguments)
        stream = result if name == "open" else stream


def _result(program: Program, stream: Stream | None, name: str, arguments: Sequence[Any]) -> Any:
    if name == _END:
        return None
    return getattr(program if name in ("open", "run") else stream, name)(*arguments)
