"""Where a rank's process is, and what can be seen of it from another process of its host."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

# Seconds for which a process may wait for a disk or a driver and do nothing else: a network drive
# may come back, but one that does not holds its readers for ever, in the same state.
DISK = 60.0
_PROC = Path("/proc")


@dataclass(frozen=True)
class Home:
    """A process and its host. `kernel` names the running kernel and process namespace, or is empty.

    `began` tells the process from a later one with the same number; `parent` is the process that
    MPI's launcher started, whose child this one is, or the launcher itself.
    """

    host: str
    kernel: str
    process: int
    began: int
    parent: int

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"


@dataclass(frozen=True)
class Glance:
    """What the kernel says of a process: whether it is there, stopped, and its CPU time (ticks).

    `ready`: whether some thread waits for nothing but a core, which others may keep busy.
    `on_disk`: whether one waits for a disk or a driver, and cannot be interrupted.
    """

    there: bool
    stopped: bool = False
    ticks: int = 0
    ready: bool = False
    on_disk: bool = False


def own_home() -> Home:
    """This process."""
    process = os.getpid()
    fields = _stat(_PROC / str(process) / "stat")
    began = int(fields[19]) if fields else 0
    return Home(socket.gethostname(), _kernel(), process, began, os.getppid())


def glance(home: Home) -> Glance | None:
    """What can be seen of a process from here; None where it is on another host."""
    if not home.kernel or home.kernel != _kernel():
        return None
    fields = _stat(_PROC / str(home.process) / "stat")
    if not fields or int(fields[19]) != home.began or fields[0] in "ZX":
        return Glance(False)
    states = _task_states(str(home.process))
    ticks = int(fields[11]) + int(fields[12])
    return Glance(True, fields[0] in "Tt", ticks, "R" in states, "D" in states)


def is_stopped(process: int) -> bool:
    """Whether a process of this host is stopped (SIGSTOP)."""
    return _stat(_PROC / str(process) / "stat")[:1] in (["T"], ["t"])


class Life:
    """A number that grows while this process computes or reads, whatever the calling thread does.

    CPU time of the other threads in milliseconds, pages and blocks read; where some other thread is
    ready to run, or has waited for a disk for less than DISK, the clock.
    """

    def __init__(self) -> None:
        self._on_disk: float | None = None  # since when

    def __call__(self) -> int:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        spent = int((usage.ru_utime + usage.ru_stime - time.thread_time()) * 1000)
        found = spent + usage.ru_majflt + usage.ru_inblock
        now = time.monotonic()
        return found + int(now * 1000) if self._goes_on(_task_states("self"), now) else found

    def _goes_on(self, states: set[str], now: float) -> bool:
        """Whether threads in these states do something, or may soon."""
        if "D" not in states:
            self._on_disk = None
        elif self._on_disk is None:
            self._on_disk = now
        return "R" in states or (self._on_disk is not None and now - self._on_disk < DISK)


def _task_states(process: str) -> set[str]:
    """The states that the threads of a process are in, the calling thread aside."""
    folder, own = _PROC / process / "task", threading.get_native_id()
    try:
        tasks = [task for task in os.listdir(folder) if int(task) != own]
    except OSError:
        return set()
    found = (_stat(folder / task / "stat") for task in tasks)
    return {fields[0] for fields in found if fields}


def _kernel() -> str:
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _stat(path: Path) -> list[str]:
    """The fields of a stat file from the state on; none where the process is gone."""
    try:
        return path.read_text().rpartition(")")[2].split()
    except OSError:
        return []
