"""Starts and ends the MPI library; both calls block, and the supervisor of the rank ends a hang."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from irc.backends.ranks.supervisor import DONE, MET, tell_supervisor
from irc.errors import Error, installs

_INSTALL = f"use mpich: {installs('mpi')}"


class Library(NamedTuple):
    """mpi4py's MPI, a communicator of our own over all ranks, and whether MPI was started here."""

    mpi: Any
    comm: Any
    started_here: bool

    def finish(self, exchange_last: Callable[[], None]) -> None:
        """End the last exchange of messages, and finalize MPI if it was started here.

        Where a rank never does, the supervisor ends it.
        """
        if self.started_here:
            sys.stdout.flush()  # the process may be ended here
            tell_supervisor(DONE)
        exchange_last()
        if self.started_here:
            self.mpi.Finalize()


def start() -> Library:
    """MPI for several threads, started unless it is.

    An Error where no MPI library can be loaded, or where it supports one thread only.
    """
    # the other network module of MPICH 5 crashes a process when the one it sends to has died
    os.environ.setdefault("MPIR_CVAR_CH4_NETMOD", "ofi")
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise Error(f"MPI is not available ({reason}); {_INSTALL}") from error
    here = not MPI.Is_initialized()
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
