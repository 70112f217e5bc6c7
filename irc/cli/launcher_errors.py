"""What MPI's launcher writes to standard error: passed on, without the traces of its own source."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable
from contextlib import suppress

# "[mpiexec@host] main (/mpich/src/pm/hydra/mpiexec/mpiexec.c:270): process manager error ..."
_TRACE = re.compile(rb"\[[\w:.-]+@[^\]]*\] \w+ \([^()\s]*\.[ch]:\d+\): ")
_STDERR = 2
_WAIT = 1.0  # seconds for the last words of a launcher that has ended
_KEPT = 20


class LauncherErrors:
    """A pipe for the standard error of the launcher; `pipe` is the end that it writes to."""

    def __init__(self) -> None:
        self._source, self.pipe = os.pipe()
        self._lines: list[str] = []
        self._thread = threading.Thread(target=self._pass_on, daemon=True)

    def start(self) -> None:
        """Pass on what comes; the launcher has its end."""
        os.close(self.pipe)
        self._thread.start()

    def about(self, hosts: Iterable[str]) -> str:
        """What was said last about one of these hosts, such as that it is unknown; or nothing."""
        self._thread.join(_WAIT)
        words = [re.compile(rf"(?<![\w.-]){re.escape(host)}(?![\w-]|\.\w)") for host in hosts]
        found = [line for line in self._lines if any(word.search(line) for word in words)]
        return found[-1] if found else ""

    def _pass_on(self) -> None:
        with open(self._source, "rb") as source:
            for line in source:
                if _TRACE.match(line):
                    continue
                self._lines = [*self._lines[1 - _KEPT :], line.decode(errors="replace").strip()]
                with suppress(OSError):  # nobody reads it
                    os.write(_STDERR, line)
