"""Keeps the launcher of MPI from ending all ranks at once when one dies, before they can say so.

A launcher kills every rank when it finds that one has gone, and tells the user no more than a
process number. So what it started becomes a guardian (see guardian.py), and the rank a child of it:
the other ranks find out which one died, say it, and have the launcher end the rest, guardians too.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress

from irc.backends.mpi import guardian

_OF_RANKS = ("PMI", "MPI", "OMPI")  # how the names of variables begin that tell a rank
_PIPE = "IRC_GUARDIAN_PIPE"
_PARENT_DEATH_SIGNAL = 1  # of Linux's prctl
_LOCAL = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")


def guard(rank: int, ranks: int) -> None:
    """Go on in a child process; called before anything large is imported or any thread begins."""
    reading, writing = os.pipe()
    _end_with_the_parent()
    parent, process = os.getpid(), os.fork()
    if process == 0:
        _end_with_the_parent()
        if os.getppid() != parent:  # it was killed meanwhile
            os._exit(1)
        os.close(reading)
        os.environ[_PIPE] = str(writing)
        return
    os.close(writing)
    os.set_inheritable(reading, True)
    for number in guardian.HEARD_BY_THE_RANK:
        signal.signal(number, signal.SIG_IGN)
    local = _local(os.environ)
    # another program, without the variables that tell a rank, so that nobody takes it for one
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_OF_RANKS)}
    words = [str(number) for number in (process, reading, rank, ranks, local)]
    program = [sys.executable, "-IS", os.path.realpath(guardian.__file__)]
    os.execve(sys.executable, [*program, *words], environment)


def _end_with_the_parent() -> None:
    """Let the kernel kill this process when its parent dies, whatever it does then."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, int(signal.SIGKILL))


def tell_guardian(what: bytes) -> bool:
    """Tell it that the ranks have met, or that this one is done; false where there is none."""
    pipe = os.environ.get(_PIPE, "")
    if not pipe:
        return False
    with suppress(OSError):  # it has been killed, which the rank finds out otherwise
        os.write(int(pipe), what)
    return True


def _local(environment: Mapping[str, str]) -> int:
    """How many ranks are on this host; 0 where the launcher does not say."""
    found = [environment[name] for name in _LOCAL if environment.get(name, "").isdecimal()]
    return int(found[0]) if found else 0
