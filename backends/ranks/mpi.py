"""The Communicator of a rank that is a process: over MPI, with a health check that ends hangs."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from typing import Any, NoReturn, TypeAlias

import numpy as np

from irc.backends.ranks.collective_call import CollectiveCall
from irc.backends.ranks.communicator import PeerError, difference
from irc.backends.ranks.health import PAUSED, TRANSFERRING, WAITING, Failure, disagreement
from irc.backends.ranks.heartbeat import HeartbeatThread, Status, last_line
from irc.backends.ranks.mpi_collectives import post
from irc.backends.ranks.mpi_library import start
from irc.backends.ranks.process import (
    RankProcess,
    own_process,
    remove_stale_shared_memory,
    unlink_shared_memory,
)

Array: TypeAlias = np.ndarray[Any, Any]

LIMIT = 5.0  # seconds without a sign of life after which a rank counts as lost
LARGE = 1 << 20  # bytes of an operand from which a collective may be slow
_MESSAGES, _GROUPS = 2, 3  # tags
_RECORD, _DIGEST = 1024, 16  # bytes of a text that ranks compare, and of its digest
_UNDERWAY = 8  # sends to one rank that may be under way
_SPIN = 2e-3  # seconds of polling without sleep
_NAP, _SHORT, _SLEEP = 50e-6, 50e-3, 500e-6  # how long to sleep between polls: at first, later
_NAMING = 3.0  # seconds in which the heartbeats name the rank to which the network broke


def print_error(text: str) -> None:
    """Print on standard error why the run failed."""
    print(f"error: {text}", file=sys.__stderr__, flush=True)


class MpiCommunicator:
    """See Communicator, for what threads have too. Made once per process, on every rank.

    `limit`: how many seconds another rank may give no sign of life, or idle while it is waited for.
    After a failure the process ends within seconds, through `leave` where the program calls it;
    `report` tells the user the reason, on one rank.
    """

    def __init__(self, limit: float = LIMIT, report: Callable[[str], None] = print_error) -> None:
        self._library = start()
        self._mpi, comm = self._library.mpi, self._library.comm
        self.rank: int = comm.Get_rank()
        self.ranks: int = comm.Get_size()
        self._everyone = tuple(range(self.ranks))
        # per group MPI's communicators for checks and for data that goes with them
        self._comms: dict[tuple[int, ...], tuple[Any, Any]] = {self._everyone: (comm, comm.Dup())}
        self._checks: dict[Any, tuple[str, Array]] = {}
        self._sends: dict[int, deque[tuple[Any, Array]]] = {}
        self._held: list[Any] = []  # memory that MPI may still write to after a failure
        self._status = Status(self.rank, own_process())
        self._heartbeat = HeartbeatThread(self._mpi, comm, self._status, limit, report)
        own = json.dumps(asdict(self._status.process))
        records = self._compared("the start", own)
        self.processes = [RankProcess(**json.loads(each)) for each in records]
        unlink_shared_memory("self")
        remove_stale_shared_memory()
        hosts = [each.host for each in self.processes]
        self.local_rank = hosts[: self.rank].count(hosts[self.rank])
        self.local_ranks = hosts.count(hosts[self.rank])

    def collective(self, call: CollectiveCall, operand: Array, result: Array) -> None:
        """Take part in a collective: reads `operand`, writes `result`, both contiguous."""
        key = call, operand.dtype, operand.shape
        if key not in self._checks:
            self._checks[key] = _check_of(call.description(operand), call.group)
        assert result.shape == call.result_shape(operand.shape) and result.flags.c_contiguous
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
                self._status.state = TRANSFERRING
            self._wait(posted.request)
            posted.finish()

    def send(self, to: int, arrays: Mapping[str, Array]) -> None:
        """Send copies of named arrays to another rank; returns before they are received."""
        with self._during(f"sending values to rank {to}", (self.rank, to)):
            under_way = self._sends.setdefault(to, deque())
            while under_way and (len(under_way) >= _UNDERWAY or under_way[0][0].Test()):
                self._wait(under_way.popleft()[0])
            copies = {name: np.asarray(array) for name, array in arrays.items()}
            data = np.frombuffer(pickle.dumps(copies, protocol=5), np.uint8)
            under_way.append((self._library.comm.Isend(data, to, _MESSAGES), data))

    def receive(self, source: int) -> dict[str, Array]:
        """The arrays of the next `send` of `source` to this rank."""
        with self._during(f"the values of rank {source}", (self.rank, source)):
            status, found = self._mpi.Status(), list[Any]()

            def has_come() -> bool:
                message = self._library.comm.Improbe(source, _MESSAGES, status)
                if message is not None:
                    found.append(message)
                return message is not None

            self._poll(has_come)
            self._status.state = TRANSFERRING
            data = np.empty(status.Get_count(self._mpi.BYTE), np.uint8)
            self._wait(found[0].Irecv(data))
            return pickle.loads(data.data)

    def broadcast(self, data: bytes, root: int = 0, group: Sequence[int] = ()) -> bytes:
        """The `data` of rank `root`, on every rank of `group` (default: all ranks)."""
        members = tuple(group) or self._everyone
        text, position = f"the broadcast from rank {root}", members.index(root)
        with self._during(text, members):
            comm, _ = self._comms_of(members)
            self._check_call(comm, members, text)
            size = np.array([len(data)])
            self._wait(comm.Ibcast(size, position))
            memory = np.empty(size[0], np.uint8)
            if self.rank == root:
                memory[...] = np.frombuffer(data, np.uint8)
            self._wait(comm.Ibcast(memory, position))
            return memory.tobytes()

    def agree(self, what: str, fact: str) -> None:
        """Compare a fact, such as a checksum, over all ranks: a PeerError where they differ."""
        facts = self._compared(f"the comparison of {what}", fact)
        if problem := difference(what, facts):
            self._fail(problem)

    def check(self) -> None:
        """Health check: a PeerError where the run has failed."""
        self._status.check()

    def paused(self) -> AbstractContextManager[None]:
        """Inside, this rank waits for a person, and no other rank considers it stuck."""
        return self._status.during(PAUSED)

    def abort(self, reason: str) -> None:
        """Tell all ranks that this one failed."""
        self._status.fail(Failure(f"rank {self.rank} failed: {reason}"))

    @property
    def failure(self) -> str | None:
        """The message about why the run has failed."""
        failure = self._status.failure
        return failure.text if failure is not None else None

    def reports_failure(self) -> bool:
        """Whether this rank tells the user about the failure: True once, on one rank."""
        return self._status.reports()

    def leave(self, status: int) -> NoReturn:
        """End this process after a failure, and every rank that does not end itself."""
        self._heartbeat.end_process(status)

    def close(self) -> None:
        """Release what is held; every rank calls it once, at the end of a successful run."""
        self.check()
        with self._during("the end", self._everyone):
            for under_way in self._sends.values():
                for request, _ in under_way:
                    self._wait(request)
            self._check_call(self._library.comm, self._everyone, "the end")
        self._library.finish(self._heartbeat.stop)

    @contextmanager
    def _during(self, text: str, group: tuple[int, ...]) -> Generator[None]:
        """Be in a call, as the other ranks see it."""
        self.check()
        others = tuple(rank for rank in group if rank != self.rank)
        with self._status.during(WAITING, text, others):
            try:
                yield
            except self._mpi.Exception as error:
                self._network_broke(error)

    def _comms_of(self, group: tuple[int, ...]) -> tuple[Any, Any]:
        """The two communicators of a group, in its order; made when its ranks first need them."""
        if group not in self._comms:
            world = self._library.comm
            # making one blocks, so first wait for the others in a way that the health check can end
            others = [rank for rank in group if rank != self.rank]
            byte = np.zeros(1, np.uint8)
            sent = [world.Isend(byte, rank, _GROUPS) for rank in others]
            received = [world.Irecv(np.empty(1, np.uint8), rank, _GROUPS) for rank in others]
            for request in sent + received:
                self._wait(request)
            made = world.Create_group(world.Get_group().Incl(group))
            made.Set_errhandler(self._mpi.ERRORS_RETURN)
            self._comms[group] = made, made.Dup()
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
        texts = self._gathered(comm, len(group), text)
        other = next((rank for rank, each in zip(group, texts, strict=True) if each != text), None)
        there = texts[group.index(other)] if other is not None else "another call"
        self._fail(disagreement(self.rank, text, -1 if other is None else other, there))

    def _compared(self, what: str, fact: str) -> list[str]:
        """The facts of all ranks."""
        with self._during(what, self._everyone):
            self._check_call(self._library.comm, self._everyone, what)
            return self._gathered(self._library.comm, self.ranks, fact)

    def _gathered(self, comm: Any, count: int, text: str) -> list[str]:
        """The texts of all ranks of a group; long ones shortened, with their digest at the end."""
        data = text.encode()
        if len(data) > _RECORD:
            mark = f"... ({_digest(data).hex()})".encode()
            data = data[: _RECORD - len(mark)] + mark
        every = np.empty((count, _RECORD), np.uint8)
        self._wait(comm.Iallgather(np.frombuffer(data.ljust(_RECORD), np.uint8), every))
        return [each.tobytes().decode(errors="ignore").rstrip() for each in every]

    def _wait(self, request: Any) -> None:
        self._poll(request.Test)

    def _poll(self, is_done: Callable[[], bool]) -> None:
        """Poll until something is done; a PeerError where the run has failed meanwhile.

        Other processes get the core: there may be more ranks than cores.
        """
        if is_done():
            return
        began = time.perf_counter()
        while not is_done():
            self.check()
            waited = time.perf_counter() - began
            if waited < _SPIN:
                os.sched_yield() if hasattr(os, "sched_yield") else time.sleep(0)
            else:
                time.sleep(_NAP if waited < _SHORT else _SLEEP)

    def _network_broke(self, error: Exception) -> NoReturn:
        """After an error of MPI itself: wait until the heartbeats name the rank that is gone."""
        until = time.monotonic() + _NAMING
        while time.monotonic() < until:
            self.check()
            time.sleep(_SLEEP)
        self._fail(f"the network to another rank broke: {last_line(error)}")

    def _fail(self, text: str) -> NoReturn:
        self._status.fail(Failure(text))
        self.check()
        raise PeerError(text)


def _check_of(text: str, group: tuple[int, ...]) -> tuple[str, Array]:
    """A call's text, and (n, -n) for its digest n: their largest over ranks tell if all agree."""
    number = int.from_bytes(_digest(repr(group).encode() + text.encode())[:7], "little")
    return text, np.array([number, -number])


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST).digest()
