"""TensorRT's logger, error recorder and progress monitor, implemented."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

_DRIVER_MISSING = re.compile(r"cudaError 35\b")  # repeated after other errors without a GPU
_SOURCE = re.compile(r"\s+In \w+ at /_src/\S*")


def make_logger(trt: Any, listen: Callable[[str], None]) -> Any:
    """An `ILogger` of a module `tensorrt` or `tensorrt_rtx` that calls `listen` with each message,
    from any thread.

    TensorRT uses the first logger of a process for all its objects, so it must stay alive.
    """

    class Logger(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            listen(text)

    return Logger()


@cache
def silent_logger(trt: Any) -> Any:
    """The logger of a process whose objects report their errors to an error recorder."""
    return make_logger(trt, lambda text: None)


def make_error_recorder(trt: Any) -> Any:
    """An `IErrorRecorder` that keeps every error until `clear`; `texts` are their reasons."""

    class ErrorRecorder(trt.IErrorRecorder):
        def __init__(self) -> None:
            trt.IErrorRecorder.__init__(self)
            self.errors: list[tuple[Any, str]] = []

        @property
        def texts(self) -> list[str]:
            return [text for text in (reason(text) for _, text in self.errors) if text]

        def num_errors(self) -> int:
            return len(self.errors)

        def get_error_code(self, index: int) -> Any:
            return self.errors[index][0]

        def get_error_desc(self, index: int) -> str:
            return self.errors[index][1]

        def has_overflowed(self) -> bool:
            return False

        def clear(self) -> None:
            self.errors.clear()

        def report_error(self, code: Any, text: str) -> bool:
            self.errors.append((code, text))
            return False  # the library goes on if it can

    return ErrorRecorder()


def reason(text: str) -> str:
    """An error without positions in TensorRT's source; "" for one about a missing driver."""
    lines = [line for line in text.splitlines() if line.strip()]
    text = "\n".join(line for line in lines if not _DRIVER_MISSING.search(line))
    text = re.sub(r"^\w+::\w+: Error Code \d+: ", "", _SOURCE.sub("", text).strip())
    return text.removeprefix("Assertion failed: ").rstrip(". ")


@dataclass
class _Phase:
    """An open phase; all of it is a part of the parent's next step."""

    parent: str | None
    steps: int
    done: int = 0


def make_monitor(trt: Any, report: Callable[[float], None], cancelled: threading.Event) -> Any:
    """An `IProgressMonitor` that reports the fraction done, which never decreases, and stops the
    build if `cancelled`. The library calls it from several threads."""

    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.open: dict[str, _Phase] = {}
            self.fraction, self.lock = 0.0, threading.Lock()

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            with self.lock:
                self.open[name] = _Phase(parent, max(1, steps))

        def phase_finish(self, name: str) -> None:
            with self.lock:
                phase = self.open.pop(name, None)
                parent = self.open.get(str(phase.parent)) if phase is not None else None
                if parent is not None:
                    parent.done += 1
                self.report(0.0 if self.open else 1.0)

        def step_complete(self, name: str, step: int) -> bool:
            with self.lock:
                if (phase := self.open.get(name)) is not None:
                    phase.done = max(phase.done, step + 1)
                self.report(0.0)
            return not cancelled.is_set()

        def report(self, fraction: float) -> None:
            roots = (name for name, phase in self.open.items() if phase.parent not in self.open)
            self.fraction = max(self.fraction, fraction, *map(self.part, roots))
            report(self.fraction)

        def part(self, name: str) -> float:
            """The fraction of one open phase, with its open sub-phases."""
            phase = self.open[name]
            inner = (self.part(each) for each, sub in self.open.items() if sub.parent == name)
            return min((phase.done + max(inner, default=0.0)) / phase.steps, 1.0)

    return Monitor()
