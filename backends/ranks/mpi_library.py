"""Starts and ends the MPI library; both calls block, and neither may hang."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

from irc.backends.ranks.supervisor import DONE, MET, tell_supervisor
from irc.errors import Error

_STARTING, _ENDING = 60, 5  # seconds, where no supervisor watches
_INSTALL = "use mpich: pip install 'irc-compiler[mpi]'"
# The other network module of MPICH 5 crashes a process when the one it sends to has died.
_SETTINGS = {"MPIR_CVAR_CH4_NETMOD": "ofi"}


class Library(NamedTuple):
    """mpi4py's MPI, a communicator of our own over all ranks, and whether MPI was started here."""

    mpi: Any
    comm: Any
    started_here: bool

    def finish(self) -> None:
        """Finalize MPI if it was started here; where a rank never does, the process is ended."""
        if self.started_here:
            sys.stdout.flush()  # the process may be ended here
            with _watched(DONE, _ENDING):
                self.mpi.Finalize()


def start() -> Library:
    """MPI for several threads, started unless it is.

    An Error where no MPI library can be loaded, or where it supports one thread only.
    """
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise Error(f"MPI is not available ({reason}); {_INSTALL}") from error
    here = not MPI.Is_initialized()
    with _watched(b"", _STARTING):
        provided = MPI.Init_thread(MPI.THREAD_MULTIPLE) if here else MPI.Query_thread()
        comm = MPI.COMM_WORLD.Dup()
    tell_supervisor(MET)
    if provided < MPI.THREAD_MULTIPLE:
        raise Error(
            "this MPI lets only one thread call it (no MPI_THREAD_MULTIPLE), and irc needs two; "
            + _INSTALL
        )
    for each in (comm, MPI.COMM_WORLD, MPI.COMM_SELF):  # errors of polling belong to any of them
        each.Set_errhandler(MPI.ERRORS_RETURN)
    return Library(MPI, comm, here)


@contextmanager
def _watched(event: bytes, seconds: int) -> Generator[None]:
    """A call of MPI that blocks and holds Python's lock: the supervisor ends it, or an alarm."""
    if tell_supervisor(event) or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(seconds)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
