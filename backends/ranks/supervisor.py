"""The supervisor of a rank: its parent process, which MPI's launcher started.

A launcher kills every rank when one has died, and tells the user no more than a process id. So what
it started forks: the child is the rank, and when that dies, the supervisor waits until the other
ranks have named it. MPI's own start and end block, and hold Python's lock meanwhile; the supervisor
watches these: it reports its rank if that ends or stops before all have met, and ends the other
ranks of this host.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from contextlib import suppress
from typing import NoReturn

from irc.backends.ranks.environment import RANK_VARIABLES, Place
from irc.backends.ranks.process import PROC, is_stopped, stat_fields, unlink_shared_memory

MET, DONE = b"m", b"d"
REPORTED = 75  # the exit status where the user has been told why
_PIPE = "IRC_SUPERVISOR_PIPE"
_FOR_THE_RANK = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_END = signal.SIGUSR2  # what supervisors send each other before all ranks have met
_PARENT_DEATH_SIGNAL = 1  # of Linux's prctl
_TURN = 0.25
_RELAY = 0.5  # seconds that a launcher has to pass a message on
_STOPPED = 5.0  # seconds that a rank may be stopped before all have met
_ALIKE = 3.0  # seconds in which the other ranks may end by themselves, as after a wrong flag
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
    os._exit(Supervisor(process, reading, place.rank).run())


def _die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, int(signal.SIGKILL))


def tell_supervisor(event: bytes) -> None:
    """Tell it, where there is one, that the ranks have met, or that this one is done."""
    pipe = os.environ.get(_PIPE, "")
    with suppress(OSError):  # it has been killed
        if pipe:
            os.write(int(pipe), event)


class Supervisor:
    """Watches the `process` of one rank, which writes its events to `pipe`."""

    def __init__(self, process: int, pipe: int, rank: int) -> None:
        self.process, self.pipe, self.rank = process, pipe, rank
        self._have_met = self._has_ended = False
        signal.signal(_END, lambda *_: self._end())

    def run(self) -> int:
        """The exit status, once the rank has ended."""
        ran = time.monotonic()
        # rank 0 tells the user, if it has come this far
        until = ran + _MEETING + (_ALIKE if self.rank else 0)
        while not self._told(_TURN):
            now = time.monotonic()
            if not is_stopped(self.process):
                ran = now
            if now - ran > _STOPPED:
                self._end_all(f"rank {self.rank} stalls: its process is stopped (SIGSTOP)")
            if now > until:
                self._end_all(f"the ranks have not met within {_MEETING:g} s")
        self._have_met = True
        while not self._told(2 * _TURN):
            pass
        until = time.monotonic() + _ENDING
        while time.monotonic() < until:
            self._end_with_rank(os.WNOHANG)
            time.sleep(_TURN / 10)
        self._kill_rank()
        return 0

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
        self._has_ended = True
        code = os.waitstatus_to_exitcode(status)
        was_ended = code < 0 and -code in _FOR_THE_RANK
        if not self._have_met and not was_ended:
            self._end_before_meeting(sudden=code < 0)
        elif code < 0 and not was_ended:
            time.sleep(_NAMING)
        os._exit(code if code >= 0 else 128 - code)

    def _end_before_meeting(self, sudden: bool) -> None:
        """The other ranks would wait for this one in the start of MPI, unless they end too."""
        time.sleep(_TURN)  # others may not have come as far as this
        until = time.monotonic() + (0 if sudden else _ALIKE)
        while _children(_other_supervisors()):
            if time.monotonic() > until:
                self._end_all(f"rank {self.rank} ended before all ranks had met")
            time.sleep(_TURN)

    def _end_all(self, text: str) -> NoReturn:
        """Tell the user why, and end the ranks of this host."""
        os.write(2, f"error: {text}\n".encode())
        time.sleep(_RELAY)
        for process in _other_supervisors():
            with suppress(OSError):  # it has ended
                os.kill(process, _END)
        self._end()

    def _end(self) -> NoReturn:
        """End the rank; the user has been told why."""
        if not self._has_ended:
            self._kill_rank()
        os._exit(REPORTED)

    def _kill_rank(self) -> None:
        unlink_shared_memory(self.process)
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)


def _other_supervisors() -> list[int]:
    """Those of the other ranks of this host."""
    own = os.getpid()
    return [each for each in _children([os.getppid()]) if each != own and _is_rank(each)]


def _is_rank(process: int) -> bool:
    """Whether MPI's launcher started a process: its environment names a rank."""
    try:
        variables = (PROC / str(process) / "environ").read_bytes()
    except OSError:
        return False
    return any(f"{name}=".encode() in variables for name, _ in RANK_VARIABLES)


def _children(parents: list[int]) -> list[int]:
    """The processes that these have started, and that run."""
    names = [name for name in os.listdir(PROC) if name.isdecimal()] if PROC.exists() else []
    stats = {int(name): fields for name in names if (fields := stat_fields(name))}
    return [
        process
        for process, fields in stats.items()
        if int(fields[1]) in parents and fields[0] not in "ZX"
    ]
