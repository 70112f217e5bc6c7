"""How much of a build is done, from the nested phases that the progress monitor reports."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class _Phase:
    parent: str | None
    steps: int
    done: int = 0


class Phases:
    """Adds nested phases up to one fraction, which never goes back."""

    def __init__(self) -> None:
        self._open: dict[str, _Phase] = {}
        self._fraction = 0.0

    def start(self, name: str, parent: str | None, steps: int) -> None:
        """A phase of so many steps begins, as a part of its parent's next step."""
        self._open[name] = _Phase(parent, max(1, steps))

    def step(self, name: str, step: int) -> None:
        """A step, counted from 0, is done."""
        phase = self._open.get(name)
        if phase is not None:
            phase.done = max(phase.done, min(step + 1, phase.steps))

    def finish(self, name: str) -> None:
        """A phase ends; its parent is a step further."""
        phase = self._open.pop(name, None)
        if phase is None:
            return
        parent = self._open.get(phase.parent or "")
        if parent is not None:
            parent.done = min(parent.done + 1, parent.steps)
        elif not self._open:
            self._fraction = 1.0

    @property
    def fraction(self) -> float:
        """The part of everything that is done, between 0 and 1."""
        roots = [name for name, phase in self._open.items() if phase.parent not in self._open]
        now = max((self._of(name) for name in roots), default=0.0)
        self._fraction = max(self._fraction, min(now, 1.0))
        return self._fraction

    def _of(self, name: str) -> float:
        phase = self._open[name]
        inner = [self._of(each) for each, open in self._open.items() if open.parent == name]
        return min((phase.done + max(inner, default=0.0)) / phase.steps, 1.0)


def monitor(trt: Any, tell: Callable[[float], None], cancelled: threading.Event) -> Any:
    """An `IProgressMonitor` that tells the fraction done, and stops the build once `cancelled`."""

    class Monitor(trt.IProgressMonitor):
        """Called by the library, from several threads."""

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.phases, self.lock = Phases(), threading.Lock()

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            """A phase begins."""
            with self.lock:
                self.phases.start(name, parent, steps)

        def phase_finish(self, name: str) -> None:
            """A phase ends."""
            with self.lock:
                self.phases.finish(name)
                tell(self.phases.fraction)

        def step_complete(self, name: str, step: int) -> bool:
            """A step ends; the answer is whether to go on."""
            with self.lock:
                self.phases.step(name, step)
                tell(self.phases.fraction)
            return not cancelled.is_set()

    return Monitor()
