"""Ctrl-C and SIGTERM unwind the program, so that no half-written file remains."""

from __future__ import annotations

import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

INTERRUPTED, TERMINATED = 130, 143


class Signals:
    """The signal that arrived. `status` is the exit status that it requires, 0 if none came.

    Python code that starts up inside an extension module may swallow the exception raised here, or
    turn it into one of its own; the status tells even then.
    """

    def __init__(self) -> None:
        self.status = 0

    @contextmanager
    def handled(self) -> Generator[None]:
        """SIGINT raises KeyboardInterrupt and SIGTERM SystemExit inside."""
        try:
            before = {
                signal.SIGINT: signal.signal(signal.SIGINT, self._interrupt),
                signal.SIGTERM: signal.signal(signal.SIGTERM, self._terminate),
            }
        except ValueError:  # not the main thread, which alone may do this
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _interrupt(self, number: int, frame: FrameType | None) -> NoReturn:
        self.status = INTERRUPTED
        raise KeyboardInterrupt

    def _terminate(self, number: int, frame: FrameType | None) -> NoReturn:
        self.status = TERMINATED
        raise SystemExit(TERMINATED)
