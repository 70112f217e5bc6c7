"""Starts and ends MPI itself, the two calls that block: neither may hang."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from irc.backends.mpi.guard import tell_guardian
from irc.backends.mpi.guardian import DONE, MET
from irc.errors import Error

_STARTING = 30  # seconds until all ranks are there, where no guardian watches
_FINISHING = 5
# The other network module of MPICH 5 crashes a process when the one it sends to has died.
_SETTINGS = {"MPIR_CVAR_CH4_NETMOD": "ofi"}


@dataclass(frozen=True)
class Started:
    """mpi4py's MPI, a communicator of our own over all ranks, and whether MPI was started here."""

    mpi: Any
    comm: Any
    here: bool

    def finish(self) -> None:
        """Finalize what was started; where a rank never comes to that, do without it."""
        if not self.here:
            return
        sys.stdout.flush()  # the process may be ended here
        with _watched(DONE, _FINISHING):
            self.mpi.Finalize()


def start() -> Started:
    """MPI for several threads, started unless it is already; an Error where it cannot do that."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    import mpi4py

    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    from mpi4py import MPI

    here = not MPI.Is_initialized()
    with _watched(b"", _STARTING):
        provided = MPI.Init_thread(MPI.THREAD_MULTIPLE) if here else MPI.Query_thread()
        comm = MPI.COMM_WORLD.Dup()
    tell_guardian(MET)
    if provided < MPI.THREAD_MULTIPLE:
        raise Error(
            "this MPI lets only one thread call it, and irc needs two; use mpich: "
            "pip install 'irc-compiler[mpi]'"
        )
    for each in (comm, MPI.COMM_WORLD, MPI.COMM_SELF):  # errors of polling belong to any of them
        each.Set_errhandler(MPI.ERRORS_RETURN)
    return Started(MPI, comm, here)


@contextmanager
def _watched(what: bytes, seconds: int) -> Generator[None]:
    """A call of MPI that blocks and holds Python's lock: a guardian ends it, or an alarm does."""
    if tell_guardian(what) or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(seconds)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
