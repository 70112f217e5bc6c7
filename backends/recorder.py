"""`Recorder`: collects what ran when on the ranks of a program, for times of operations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Event:
    """What ran once on a rank: from `begin`, in ns of time.time_ns, for `us` microseconds.

    `kernel` is what the backend calls it. `value` is the value that it computes, as the module's
    text names it; behind a slash may follow a part of it, and it may be of no operation.
    """

    rank: int
    kernel: str
    value: str
    begin: int
    us: float


@dataclass
class Recorder:
    """The events of a program that is loaded with the option `recorder`; `sources` give those that
    a library keeps until the end."""

    events: list[Event] = field(default_factory=list[Event])
    sources: list[Callable[[], Iterable[Event]]] = field(default_factory=list[Any])

    def add(self, rank: int, kernel: str, value: str, begin: int) -> None:
        """Add what ran from `begin` until now."""
        self.events.append(Event(rank, kernel, value, begin, (time.time_ns() - begin) / 1e3))

    def finish(self) -> list[Event]:
        """All events in order; the program runs no more."""
        events = [*self.events, *(event for source in self.sources for event in source())]
        return sorted(events, key=lambda event: event.begin)
