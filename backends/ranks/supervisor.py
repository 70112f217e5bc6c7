"""The supervisor of a rank: its parent process, which MPI's launcher started.

A launcher kills every rank when one has died, and tells the user no more than a process id. So what
it started forks: the child is the rank, and when that dies, the supervisor waits until the other
ranks have named it. MPI's own start and end block, and hold Python's lock meanwhile; the supervisor
watches these, and reports a rank of this host that ends or stops before all have met.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from irc.backends.ranks.environment import RANK_VARIABLES, Place
from irc.backends.ranks.process import PROC, stat_fields, unlink_shared_memory

MET, DONE = b"m", b"d"
REPORTED = 75  # the exit status where the user has been told why
_PIPE = "IRC_SUPERVISOR_PIPE"
_FOR_THE_RANK = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_PARENT_DEATH_SIGNAL = 1  # of Linux's prctl
_TURN = 0.25
_BEFORE = 1.0  # seconds before the first look: most ranks have met by then
_RELAY = 0.5  # seconds that a launcher has to pass a message on
_STOPPED = 5.0  # seconds that another rank may be stopped before all have met
_MEETING = 60.0  # seconds until all ranks have met
_ENDING = 5.0  # seconds that MPI has to end
_NAMING = 12.0  # seconds that the other ranks have after this one died


def supervise(place: Place) -> None:
    """Go on in a child process; called before anything large is imported or any thread begins."""
    reading, writing = os.pipe()
    _die_with_parent()
    parent, process = os.getpid(), os.fork()
    if process == 0:
        _die_with_parent()
        if os.getppid() != parent:  # it was killed meanwhile
            os._exit(1)
        os.close(reading)
        os.environ[_PIPE] = str(writing)
        return
    os.close(writing)
    for number in _FOR_THE_RANK:
        signal.signal(number, signal.SIG_IGN)
    os._exit(Supervisor(process, reading, place).run())


def _die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, int(signal.SIGKILL))


def tell_supervisor(event: bytes) -> bool:
    """Tell it that the ranks have met, or that this one is done; False where there is none."""
    pipe = os.environ.get(_PIPE, "")
    if not pipe:
        return False
    with suppress(OSError):  # it has been killed
        os.write(int(pipe), event)
    return True


class Supervisor:
    """Watches the `process` of one rank, which writes its events to `pipe`."""

    def __init__(self, process: int, pipe: int, place: Place) -> None:
        self.process, self.pipe, self.place = process, pipe, place
        self._stopped: dict[int, float] = {}  # by rank, since when
        self._missing: set[int] = set()
        self._ticks = 0  # CPU time of the launcher

    def run(self) -> int:
        """The exit status, once the rank has ended."""
        until = time.monotonic() + _MEETING
        met = self._told(_BEFORE)
        while not met:
            launcher = os.getppid()
            ranks = local_ranks(launcher) if self.had_a_core(launcher) else None
            problem = self.find_problem(ranks, time.monotonic())
            if problem is None and time.monotonic() > until:
                problem = f"the ranks have not met within {_MEETING:g} s", -1
            if problem is not None:
                return self._give_up(*problem)
            met = self._told(_TURN)
        while not self._told(2 * _TURN):
            pass
        until = time.monotonic() + _ENDING
        while time.monotonic() < until:
            self._end_with_rank(os.WNOHANG)
            time.sleep(_TURN / 10)
        self._kill_rank()
        return 0

    def had_a_core(self, launcher: int) -> bool:
        """Whether a launcher waits, or has run since the last call: so it has started all ranks."""
        fields = stat_fields(launcher)
        ticks = int(fields[11]) + int(fields[12]) if fields else 0
        ran, self._ticks = ticks > self._ticks, ticks
        return ran or fields[:1] == ["S"]

    def _told(self, seconds: float) -> bool:
        """Whether the rank sends an event within so many seconds; where it ends, so does this."""
        ready = select.select([self.pipe], [], [], seconds)[0]
        if ready and os.read(self.pipe, 1):
            return True
        self._end_with_rank(0 if ready else os.WNOHANG)
        return False

    def _end_with_rank(self, options: int) -> None:
        """End as the rank did; after a sudden death the others get time to name it."""
        process, status = os.waitpid(self.process, options)
        if not process:
            return
        code = os.waitstatus_to_exitcode(status)
        if code < 0 and -code not in _FOR_THE_RANK:
            time.sleep(_NAMING)
        os._exit(code if code >= 0 else 128 - code)

    def _kill_rank(self) -> None:
        unlink_shared_memory(self.process)
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)

    def _give_up(self, text: str, other: int) -> int:
        """End the rank; one of all supervisors tells the user, and kills rank `other`."""
        if self.place.rank == (1 if other == 0 else 0):
            os.write(2, f"error: {text}\n".encode())
            time.sleep(_RELAY)
            found = local_ranks(os.getppid()) or {}
            for process in found[other].processes if other in found else ():
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        time.sleep(_RELAY)
        self._kill_rank()
        return REPORTED

    def find_problem(
        self, ranks: Mapping[int, LocalRank] | None, now: float
    ) -> tuple[str, int] | None:
        """What is wrong with another rank of this host, and its number."""
        if ranks is None:
            return None
        all_here = self.place.local_ranks == self.place.ranks
        missing = set(range(self.place.ranks)).difference(ranks) if all_here else set[int]()
        for rank in sorted(missing & self._missing):  # at two looks in a row
            return f"rank {rank} ended before all ranks had met", rank
        self._missing = missing
        for rank, one in ranks.items():
            if not one.stopped:
                self._stopped.pop(rank, None)
            elif now - self._stopped.setdefault(rank, now) > _STOPPED:
                return f"rank {rank} stalls: its process is stopped (SIGSTOP)", rank
        return None


class LocalRank(NamedTuple):
    """A rank of this host: whether it is stopped, and its process with that of its supervisor."""

    stopped: bool
    processes: tuple[int, ...]


def local_ranks(launcher: int) -> dict[int, LocalRank] | None:
    """The ranks that a launcher started; None while it is still starting some, or without /proc."""
    if not (PROC / "self").exists():
        return None
    names = filter(str.isdecimal, os.listdir(PROC))
    stats = {int(name): fields for name in names if (fields := stat_fields(name))}
    living = {process: f for process, f in stats.items() if f[0] not in "ZX"}
    children: dict[int, list[int]] = {}
    for process, fields in living.items():
        children.setdefault(int(fields[1]), []).append(process)
    own = _read(launcher, "cmdline")
    is_starting = any(_read(each, "cmdline") == own for each in children.get(launcher, ()))
    if is_starting:
        return None
    found: dict[int, LocalRank] = {}
    for process in children.get(launcher, ()):
        rank = _rank_of(process)
        if rank is not None:
            processes = (process, *children.get(process, ()))
            stopped = any(living[each][0] in "Tt" for each in processes)
            found[rank] = LocalRank(stopped, processes)
    return found


def _rank_of(process: int) -> int | None:
    """The rank that the environment of a process names."""
    pairs = (each.partition(b"=") for each in _read(process, "environ").split(b"\0"))
    found = {name.decode(errors="replace"): value for name, _, value in pairs}
    ranks = (found[name] for name, *_ in RANK_VARIABLES if found.get(name, b"").isdigit())
    return next(map(int, ranks), None)


def _read(process: int, file: str) -> bytes:
    try:
        return (PROC / str(process) / file).read_bytes()
    except OSError:
        return b""
