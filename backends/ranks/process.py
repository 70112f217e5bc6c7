"""The process of a rank: its identity, and what the kernel of its host reports about it."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# Seconds for which a process may wait for a disk or a driver (state D) and do nothing else.
DISK = 60.0
PROC, SHM = Path("/proc"), Path("/dev/shm")
_SEGMENT = "mpich_shm_"  # what the names of MPICH's files in SHM begin with
_START = 60.0  # seconds


@dataclass(frozen=True)
class RankProcess:
    """A process id and its host.

    `kernel` identifies the running kernel and process namespace, and is empty where unknown;
    `began` tells the process from a later one with the same id; `parent` is the process id of its
    supervisor, or of the launcher where there is none.
    """

    host: str
    process: int
    kernel: str = ""
    began: int = 0
    parent: int = 0

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"


@dataclass(frozen=True)
class ProcessState:
    """What the kernel reports about a process: whether it exists, is stopped, its CPU time (ticks).

    `runnable`: some thread runs or waits for a core. `on_disk`: some thread waits for a disk or a
    driver, uninterruptibly.
    """

    exists: bool
    stopped: bool = False
    ticks: int = 0
    runnable: bool = False
    on_disk: bool = False


def own_process() -> RankProcess:
    """This process."""
    fields = stat_fields(os.getpid())
    began = int(fields[19]) if fields else 0
    return RankProcess(socket.gethostname(), os.getpid(), _kernel(), began, os.getppid())


def state_of(process: RankProcess) -> ProcessState | None:
    """The state of a process; None where it runs on another host, or the kernel has no /proc."""
    if not process.kernel or process.kernel != _kernel():
        return None
    fields = stat_fields(process.process)
    if not fields or int(fields[19]) != process.began or fields[0] in "ZX":
        return ProcessState(False)
    threads = _thread_states(str(process.process))
    ticks = int(fields[11]) + int(fields[12])
    return ProcessState(True, fields[0] in "Tt", ticks, "R" in threads, "D" in threads)


def is_stopped(process: int) -> bool:
    """Whether a process of this host is stopped (SIGSTOP)."""
    return stat_fields(process)[:1] in (["T"], ["t"])


class Activity:
    """A counter that grows while this process computes or reads, the calling thread aside.

    CPU time in milliseconds, pages and blocks read; and the clock, while another thread is
    runnable, or has waited for a disk for less than DISK seconds.
    """

    def __init__(self) -> None:
        self._on_disk: float | None = None  # since when

    def __call__(self) -> int:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        spent = int((usage.ru_utime + usage.ru_stime - time.thread_time()) * 1000)
        found, now = spent + usage.ru_majflt + usage.ru_inblock, time.monotonic()
        return found + int(now * 1000) * self.is_busy(_thread_states("self"), now)

    def is_busy(self, threads: set[str], now: float) -> bool:
        """Whether threads in these states do something, or soon may."""
        if "D" not in threads:
            self._on_disk = None
        elif self._on_disk is None:
            self._on_disk = now
        return "R" in threads or (self._on_disk is not None and now - self._on_disk < DISK)


def stat_fields(process: int | str) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty where the process is gone."""
    try:
        return (PROC / str(process) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def unlink_shared_memory(process: int | str) -> None:
    """Unlink the files that MPICH maps into a process, which stay in /dev/shm if it is killed.

    Called when MPI has started on all ranks, which have mapped them by then, or the ranks end.
    """
    for path in _mapped_shared_memory(process):
        path.unlink(missing_ok=True)


def remove_stale_shared_memory() -> None:
    """Remove the files of MPICH that runs left which were killed while MPI started.

    They are this user's, no process maps them, and MPI needs less than a minute to start.
    """
    with suppress(OSError):  # another process removes the same files
        stale = {path for path in SHM.glob(f"{_SEGMENT}*") if _is_old(path.stat())}
        for process in PROC.iterdir() if stale else ():
            stale -= _mapped_shared_memory(process.name)
        for path in stale:
            path.unlink()


def _is_old(found: os.stat_result) -> bool:
    return found.st_mtime < time.time() - _START and found.st_uid == os.geteuid()


def _mapped_shared_memory(process: int | str) -> set[Path]:
    """The files of MPICH that a process maps; none where it is gone or has another user."""
    try:
        lines = (PROC / str(process) / "maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    paths = (Path(line.split(maxsplit=5)[-1]) for line in lines if _SEGMENT in line)
    return {path for path in paths if path.name.startswith(_SEGMENT)}


def _thread_states(process: str) -> set[str]:
    """The states of the threads of a process, the calling thread aside."""
    try:
        names = os.listdir(PROC / process / "task")
    except OSError:
        return set()
    own = str(threading.get_native_id())
    found = (stat_fields(f"{process}/task/{name}") for name in names if name != own)
    return {fields[0] for fields in found if fields}


def _kernel() -> str:
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
