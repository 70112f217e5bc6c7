"""The second thread of a rank: exchanges heartbeats over MPI, checks health, ends the process.

It needs an MPI that several threads may call. Where the run has failed and the working thread does
not return, because it computes or is stuck, this thread ends the process.
"""

from __future__ import annotations

import fcntl
import os
import sys
import termios
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NoReturn

from irc.backends.ranks.communicator import PeerError
from irc.backends.ranks.health import ENDED, RUNNING, Failure, Heartbeat, Peer, find_failure
from irc.backends.ranks.process import Activity, RankProcess, is_stopped, state_of

TAG = 1
EVERY = 0.5  # seconds between two heartbeats
LISTEN = 0.05  # seconds between two looks at the messages that came
GRACE = 2.5  # seconds that the working thread has to notice a failure
_SIZE = 1 << 15  # bytes of a heartbeat at most
_LONGEST = 4000  # characters of a text in it
_END = 1.5  # seconds that the reporting rank gives the others to end
_REPORT = 4.0  # seconds that telling the user may take
_TURN = 0.02


class Status:
    """What the threads of a rank share: what it does, and why the run has failed."""

    def __init__(self, rank: int, process: RankProcess) -> None:
        self.rank, self.process = rank, process
        self.state, self.call = RUNNING, ""
        self.awaits: tuple[int, ...] = ()
        self.progress = 0
        self.failure: Failure | None = None
        self.exit_status: int | None = None  # once the process is to end
        self.reported = False
        self.changed = threading.Event()  # wakes the heartbeat thread
        self._lock, self._activity = threading.Lock(), Activity()

    def fail(self, failure: Failure) -> None:
        """Make a failure known, unless an earlier one is."""
        with self._lock:
            self.failure = self.failure or replace(failure, text=failure.text[:_LONGEST])
        self.changed.set()

    def check(self) -> None:
        """Raise the failure where there is one."""
        if self.failure is not None:
            raise PeerError(self.failure.text)

    def reports(self) -> bool:
        """Whether this rank tells the user about the failure: True once, on the first able rank."""
        with self._lock:
            if self.failure is None or self.reported or self.rank != _reporter(self.failure):
                return False
            self.reported = True
            return True

    @contextmanager
    def during(self, state: str, call: str = "", awaits: tuple[int, ...] = ()) -> Generator[None]:
        """Inside, this rank is in a call."""
        self.call, self.awaits, self.state = call, awaits, state
        try:
            yield
        finally:
            self.state, self.call = RUNNING, ""
            self.progress += 1

    def heartbeat(self) -> Heartbeat:
        """What the other ranks are told now."""
        state = ENDED if self.exit_status is not None else self.state
        activity = self._activity() if state == RUNNING else 0
        return Heartbeat(
            self.rank,
            self.process,
            state,
            activity,
            self.progress,
            self.call[:_LONGEST],
            self.awaits,
            self.failure,
        )


def _reporter(failure: Failure) -> int:
    """The rank that tells the user about a failure: the first that can."""
    return next(rank for rank in range(len(failure.silent) + 1) if rank not in failure.silent)


class HeartbeatThread:
    """Heartbeats to and from all other ranks of `comm`; see find_failure for `limit`.

    `report` tells the user why the run failed, where the working thread cannot.
    """

    def __init__(
        self, mpi: Any, comm: Any, status: Status, limit: float, report: Callable[[str], None]
    ) -> None:
        self._mpi, self._comm, self._status = mpi, comm, status
        self._limit, self._report = limit, report
        now = time.monotonic()
        self.peers = {
            rank: Peer(Heartbeat(rank, status.process), now, now) for rank in range(comm.Get_size())
        }
        self._others = [rank for rank in self.peers if rank != status.rank]
        self._met: set[int] = set()
        self._receives = {rank: self._receive(rank) for rank in self._others}
        self._sends: dict[int, Any] = {}
        self._sent, self._ran, self._parent_ran = 0.0, now, now
        self._failed = 0.0
        self._over = False
        self._thread = threading.Thread(target=self._run, name="irc heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, once all ranks are to: returns when each has sent its last heartbeat.

        Without it a message could be under way to a rank that finalizes MPI, which is an error.
        """
        self._over = True
        self._status.changed.set()
        self._thread.join()
        last = replace(self._status.heartbeat(), last=True)
        ends = [self._comm.isend(last, rank, TAG) for rank in self._others]
        while self._receives:
            self._listen()
            time.sleep(_TURN / 10)
        for request in [*self._sends.values(), *ends]:
            request.wait()

    def end_process(self, status: int) -> NoReturn:
        """End the process after a failure, once the user has been told."""
        self._status.exit_status = status
        self._status.changed.set()
        while True:  # the thread ends the process, whatever signal comes meanwhile
            with suppress(BaseException):
                self._thread.join()

    def _run(self) -> None:
        try:
            while not self._over:
                self._turn()
                self._status.changed.wait(LISTEN)
                self._status.changed.clear()
        except BaseException as error:
            self._status.fail(Failure(f"rank {self._status.rank} failed: {error!r}"))
            raise

    def _turn(self) -> None:
        status = self._status
        self._listen()
        now = time.monotonic()
        gap, self._ran = now - self._ran, now
        if gap > EVERY:  # this thread did not run: others were not silent meanwhile
            for peer in self.peers.values():
                peer.heard += gap
                peer.moved += gap
        if status.failure is None and now - self._sent >= EVERY:
            self._check_health(now)
        if status.failure is not None and not self._failed:
            self._failed = now
            self._send()
        if now - self._sent >= EVERY:
            self._send()
        if status.exit_status is not None:
            self._exit(status.exit_status)
        # the working thread may be telling the user
        if self._failed and now - self._failed > GRACE + _REPORT * status.reported:
            if status.reports() and status.failure is not None:
                self._report(status.failure.text)
            self._exit(1)

    def _check_health(self, now: float) -> None:
        status, parent = self._status, self._status.process.parent
        if not is_stopped(parent):
            self._parent_ran = now
        elif now - self._parent_ran > self._limit:
            who = f"rank {status.rank} ({status.process})"
            text = f"{who} stalls: process {parent}, which started it, is stopped (SIGSTOP)"
            status.fail(Failure(text))
        self.peers[status.rank].hear(status.heartbeat(), now)
        states = {rank: state_of(self.peers[rank].beat.process) for rank in self._met}
        failure = find_failure(status.rank, self.peers, states, self._limit, now)
        if failure is not None:
            status.fail(failure)

    def _receive(self, rank: int) -> Any:
        return self._comm.irecv(_SIZE, rank, TAG)

    def _listen(self) -> None:
        """Take in the heartbeats that have come."""
        for rank, request in list(self._receives.items()):
            try:
                arrived, beat = request.test()
                while arrived:
                    self._met.add(rank)
                    self.peers[rank].hear(beat, time.monotonic())
                    if beat.failure is not None:
                        self._status.fail(beat.failure)
                    if beat.last:
                        del self._receives[rank]
                        break
                    request = self._receives[rank] = self._receive(rank)
                    arrived, beat = request.test()
            except self._mpi.Exception as error:
                self._connection_broke(rank, error)

    def _send(self) -> None:
        """Send a heartbeat to all other ranks but those that have not taken the last one yet."""
        beat = self._status.heartbeat()
        self._sent = time.monotonic()
        for rank in list(self._receives):
            try:
                before = self._sends.get(rank)
                if before is None or before.Test():
                    self._sends[rank] = self._comm.isend(beat, rank, TAG)
            except self._mpi.Exception as error:
                self._connection_broke(rank, error)

    def _connection_broke(self, rank: int, error: Exception) -> None:
        self._receives.pop(rank, None)
        where = self.peers[rank].beat.process if rank in self._met else "before its first heartbeat"
        text = f"rank {rank} ({where}) died, or the network to it broke: {last_line(error)}"
        self._status.fail(Failure(text, (rank,)))

    def _exit(self, status: int) -> NoReturn:
        """End this process. The rank that told the user ends all others too, stopped or not."""
        failure = self._status.failure
        assert failure is not None
        self._status.exit_status = status
        reporter = _reporter(failure)
        if self._status.rank != reporter:
            self._continue(_REPORT, lambda: self.peers[reporter].beat.state == ENDED)
            self._continue(_END, lambda: False)
            os._exit(status)
        others = [peer for rank, peer in self.peers.items() if rank not in failure.silent]
        others.remove(self.peers[reporter])
        self._continue(_END, lambda: all(peer.beat.state == ENDED for peer in others))
        # the launcher drops what it has not read when it ends the ranks
        self._continue(_END, lambda: not any(_unread(file) for file in (1, 2)))
        time.sleep(_TURN)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for file in (1, 2):  # MPI's own message would hide ours
            os.dup2(nowhere, file)
        self._mpi.COMM_WORLD.Abort(status)  # of another communicator it would end this rank alone
        os._exit(status)

    def _continue(self, seconds: float, done: Callable[[], bool]) -> None:
        """Exchange heartbeats until something is done, or for so long."""
        until = time.monotonic() + seconds
        while not done() and time.monotonic() < until:
            self._send()
            self._listen()
            time.sleep(_TURN)


def _unread(file: int) -> int:
    """The number of bytes that the reader of a pipe has not read yet."""
    count = bytearray(4)
    with suppress(OSError):  # no pipe
        fcntl.ioctl(file, termios.FIONREAD, count)
    return int.from_bytes(count, sys.byteorder)


def last_line(error: Exception) -> str:
    """The last line of MPI's stack of messages, which is the most specific."""
    return str(error).strip().splitlines()[-1].strip()
