"""The Communicator of a rank that is a process: over MPI, with a watcher that ends hangs."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import numpy as np

from irc.backends.ranks.communicator import CollectiveCall, PeerError, difference, disagreement
from irc.backends.ranks.launch import tell_supervisor
from irc.backends.ranks.mpi_collectives import post
from irc.backends.ranks.watcher import (
    LIMIT,
    PAUSED,
    WAITING,
    Failure,
    RankProcess,
    Watcher,
    last_line,
    own_process,
)
from irc.errors import Error, installs

Array: TypeAlias = np.ndarray[Any, Any]

LARGE = 1 << 20  # bytes of an operand from which a collective may be slow
_MESSAGES, _GROUPS = 2, 3  # tags
_SPIN = 2e-3  # seconds of polling without sleep
_NAP, _SHORT, _SLEEP = 50e-6, 50e-3, 500e-6  # how long to sleep between polls: at first, later
_NAMING = 3.0  # seconds in which the watchers name the rank to which the network broke
_INSTALL = f"use mpich: {installs('mpi')}"


class MpiCommunicator:
    """See Communicator, for what threads have too. Made once per process, on every rank.

    `limit`: how many seconds another rank may send no heartbeat, or idle while it is waited for.
    After a failure the process ends within seconds, through `watcher.end_process` where the program
    calls it.
    """

    def __init__(self, limit: float = LIMIT) -> None:
        self._mpi, self._starts_mpi = _start_mpi()
        self._comm: Any = self._mpi.COMM_WORLD.Dup()
        for comm in (self._comm, self._mpi.COMM_WORLD, self._mpi.COMM_SELF):
            comm.Set_errhandler(self._mpi.ERRORS_RETURN)  # errors of polling belong to any of them
        self.rank: int = self._comm.Get_rank()
        self.ranks: int = self._comm.Get_size()
        self._everyone = tuple(range(self.ranks))
        # per group MPI's communicators for checks and for data that goes with them
        self._comms: dict[tuple[int, ...], tuple[Any, Any]] = {
            self._everyone: (self._comm, self._comm.Dup())
        }
        self._checks: dict[Any, tuple[str, Array]] = {}
        self._sends: list[Any] = []  # requests
        self._held: list[Any] = []  # memory that MPI may still write to after a failure
        processes: list[RankProcess] = self._comm.allgather(own_process())
        _unlink_shared_memory()
        tell_supervisor()
        self.watcher = Watcher(self._mpi, self._comm, processes, limit)
        hosts = [process.host for process in processes]
        self.local_rank = hosts[: self.rank].count(hosts[self.rank])
        self.local_ranks = hosts.count(hosts[self.rank])

    def collective(self, call: CollectiveCall, operand: Array, result: Array) -> None:
        """Take part in a collective: reads `operand`, writes `result`, both contiguous."""
        key = call, operand.dtype, operand.shape
        if key not in self._checks:
            self._checks[key] = _check_of(call.description(operand), call.group)
        text, digest = self._checks[key]
        with self._during(text, call.group):
            checks, data = self._comms_of(call.group)
            largest = np.empty_like(digest)
            check = checks.Iallreduce(digest, largest, self._mpi.MAX)
            # the check and the data are under way at the same time: one wait for both
            posted = post(self._mpi, data, call, operand, result)
            self._held = [largest, check, posted]
            self._wait(check)
            self._verify_check(checks, call.group, text, digest, largest)
            if operand.nbytes >= LARGE:
                self.watcher.transfer()
            self._wait(posted.request)
            posted.finish()

    def send(self, to: int, arrays: Mapping[str, Array]) -> None:
        """Send copies of named arrays to another rank; returns before they are received."""
        with self._during(f"sending values to rank {to}", (self.rank, to)):
            self._sends = [request for request in self._sends if not request.test()[0]]
            copies = {name: np.asarray(array) for name, array in arrays.items()}
            self._sends.append(self._comm.isend(copies, to, _MESSAGES))

    def receive(self, source: int) -> dict[str, Array]:
        """The arrays of the next `send` of `source` to this rank."""
        with self._during(f"the values of rank {source}", (self.rank, source)):
            message: Any = self._poll(lambda: self._comm.improbe(source, _MESSAGES))
            self.watcher.transfer()
            return message.recv()

    def broadcast(self, data: bytes, root: int = 0, group: Sequence[int] = ()) -> bytes:
        """The `data` of rank `root`, on every rank of `group` (default: all ranks)."""
        members = tuple(group) or self._everyone
        text = f"the broadcast from rank {root}"
        with self._during(text, members):
            comm, _ = self._comms_of(members)
            self._check_call(comm, members, text)
            return comm.bcast(data, members.index(root))

    def agree(self, what: str, fact: str) -> None:
        """Compare a fact, such as a checksum, over all ranks: a PeerError where they differ."""
        text = f"the comparison of {what}"
        with self._during(text, self._everyone):
            self._check_call(self._comm, self._everyone, text)
            facts = self._comm.allgather(fact)
        if problem := difference(what, facts):
            self._fail(problem)

    def check(self) -> None:
        """Health check: a PeerError where the run has failed."""
        self.watcher.check()

    def report(self, progress: Callable[[], int]) -> None:
        """Tell all ranks a number that changes while the device of this rank gets on with work."""
        self.watcher.progress = progress

    def progress(self) -> tuple[int, ...]:
        """The latest numbers that all ranks have told."""
        return tuple(peer.beat.progress for peer in self.watcher.peers.values())

    def paused(self) -> AbstractContextManager[None]:
        """Inside, this rank waits for a person, and no other rank considers it stuck."""
        return self.watcher.during(PAUSED)

    def close(self) -> None:
        """Release what is held; every rank calls it once, at the end of a successful run."""
        with self._during("the end", self._everyone):
            for request in self._sends:
                self._poll(lambda request=request: request.test()[0])
            self._check_call(self._comm, self._everyone, "the end")
        sys.stdout.flush()
        self.watcher.stop()
        if self._starts_mpi:
            self._mpi.Finalize()

    @contextmanager
    def _during(self, text: str, group: tuple[int, ...]) -> Generator[None]:
        """Be in a call, as the other ranks see it."""
        self.check()
        others = tuple(rank for rank in group if rank != self.rank)
        with self.watcher.during(WAITING, text, others):
            try:
                yield
            except self._mpi.Exception as error:
                self._network_broke(error)

    def _comms_of(self, group: tuple[int, ...]) -> tuple[Any, Any]:
        """The two communicators of a group, in its order; made when its ranks first need them."""
        if group not in self._comms:
            # making one blocks, so first wait for the others in a way that the watcher can end
            others = [rank for rank in group if rank != self.rank]
            byte = np.zeros(1, np.uint8)
            sent = [self._comm.Isend(byte, rank, _GROUPS) for rank in others]
            received = [self._comm.Irecv(np.empty(1, np.uint8), rank, _GROUPS) for rank in others]
            for request in sent + received:
                self._wait(request)
            comm = self._comm.Create_group(self._comm.Get_group().Incl(group))
            comm.Set_errhandler(self._mpi.ERRORS_RETURN)
            self._comms[group] = comm, comm.Dup()
        return self._comms[group]

    def _check_call(self, comm: Any, group: tuple[int, ...], text: str) -> None:
        """Wait until all ranks of a group make this call."""
        _, digest = _check_of(text, group)
        largest = np.empty_like(digest)
        self._wait(comm.Iallreduce(digest, largest, self._mpi.MAX))
        self._verify_check(comm, group, text, digest, largest)

    def _verify_check(
        self, comm: Any, group: tuple[int, ...], text: str, digest: Array, largest: Array
    ) -> None:
        """A PeerError where another rank of the group makes another call."""
        if (largest == digest).all():
            # the largest of (n, -n) is the own one on every rank, so all are the same
            return
        calls = dict(zip(group, comm.allgather(text), strict=True))
        self._fail(disagreement(calls) or f"the ranks make different calls at {text}")

    def _wait(self, request: Any) -> None:
        self._poll(request.Test)

    def _poll(self, answer: Callable[[], Any]) -> Any:
        """Poll until there is an answer; a PeerError where the run has failed meanwhile.

        Other processes get the core: there may be more ranks than cores.
        """
        began = time.perf_counter()
        while not (result := answer()):
            self.check()
            waited = time.perf_counter() - began
            if waited < _SPIN:
                os.sched_yield() if hasattr(os, "sched_yield") else time.sleep(0)
            else:
                time.sleep(_NAP if waited < _SHORT else _SLEEP)
        return result

    def _network_broke(self, error: Exception) -> NoReturn:
        """After an error of MPI itself: wait until the watchers name the rank that is gone."""
        until = time.monotonic() + _NAMING
        while time.monotonic() < until:
            self.check()
            time.sleep(_SLEEP)
        self._fail(f"the network to another rank broke: {last_line(error)}")

    def _fail(self, text: str) -> NoReturn:
        self.watcher.fail(Failure(text))
        self.check()
        raise PeerError(text)


def _start_mpi() -> tuple[Any, bool]:
    """(MPI for several threads, whether it was started here); the supervisor ends a hang.

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
    if provided < MPI.THREAD_MULTIPLE:
        raise Error(
            "this MPI lets only one thread call it (no MPI_THREAD_MULTIPLE), and irc needs two; "
            + _INSTALL
        )
    return MPI, here


def _unlink_shared_memory() -> None:
    """Unlink the files that MPICH maps into this process, which stay in /dev/shm if it is killed.

    All ranks have mapped them once MPI has started.
    """
    maps = Path("/proc/self/maps")
    for line in maps.read_text(errors="replace").splitlines() if maps.exists() else ():
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith("mpich_shm_"):
            path.unlink(missing_ok=True)


def _check_of(text: str, group: tuple[int, ...]) -> tuple[str, Array]:
    """A call's text, and (n, -n) for its digest n: their largest over ranks tell if all agree."""
    data = repr(group).encode() + text.encode()
    number = int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "little")
    return text, np.array([number, -number])
