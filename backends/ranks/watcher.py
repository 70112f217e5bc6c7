"""The watcher of a rank: a thread that exchanges heartbeats with all ranks, and ends a failed run.

A run fails where a process is gone, where a rank sends no heartbeat for `limit` seconds, where it
idles so long while another rank waits for it, and where all ranks wait. A rank that computes never
fails. Where the working thread does not return after a failure, the watcher ends the process.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from irc.backends.ranks.communicator import PeerError, disagreement

RUNNING = "running"  # outside of any call
WAITING = "waiting"  # in a call, for other ranks
TRANSFERRING = "transferring"  # a large array, with ranks that are at the same call
PAUSED = "paused"  # waits for a person

LIMIT = 5.0  # seconds
EVERY = 0.5  # seconds between two heartbeats
LISTEN = 0.05  # seconds between two looks at the messages that came
GRACE = 2.5  # seconds that the working thread has to notice a failure
_REPORT = 4.0  # seconds that telling the user may take
END = 1.0  # seconds that the reporting rank gives the others to end
_SLOW = 12  # times the limit: a large transfer between hosts delays heartbeats
_TAG = 1
_LONGEST = 4000  # characters of a text in a heartbeat
_ACTIVE = 10  # milliseconds of CPU per second: a driver's own threads spend less


@dataclass(frozen=True)
class RankProcess:
    """A process id and its host; `kernel` names the running kernel and process namespace."""

    host: str
    process: int
    kernel: str

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"


def own_process() -> RankProcess:
    """This process."""
    kernel = ""
    with suppress(OSError):  # no /proc
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        kernel = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return RankProcess(socket.gethostname(), os.getpid(), kernel)


def process_state(process: int) -> str:
    """The state of a process of this host by its letter in ps; X where it is gone."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(errors="replace")
    except OSError:
        return "X"
    return text.rpartition(")")[2].split()[0]


@dataclass(frozen=True)
class Failure:
    """Why a run cannot go on. `lost`: the ranks that cannot tell it to the user."""

    text: str
    lost: tuple[int, ...] = ()


@dataclass(frozen=True)
class Heartbeat:
    """What a rank tells all others, twice a second.

    `idle`: for how many seconds it has neither computed nor read anything nor finished a call;
    `call` is the call that it is in, and `awaits` the other ranks that take part. `progress`: see
    Communicator.report. `last`: it sends no other.
    """

    state: str = RUNNING
    idle: float = 0.0
    call: str = ""
    awaits: tuple[int, ...] = ()
    failure: Failure | None = None
    progress: int = 0
    last: bool = False


@dataclass
class Peer:
    """A rank: its process, its last heartbeat, and when that came by this host's clock."""

    process: RankProcess
    heard: float
    beat: Heartbeat = Heartbeat()


def find_failure(own: int, peers: Mapping[int, Peer], limit: float, now: float) -> Failure | None:
    """Why the run cannot go on, as rank `own` sees it; None where nothing is wrong.

    `peers` has all ranks.
    """
    for rank, peer in peers.items():
        if rank != own and (reason := _loss(peer, peers[own], limit, now)):
            return Failure(f"rank {rank} ({peer.process}) {reason}", (rank,))
    here = peers[own].beat
    for rank in here.awaits:
        peer = peers[rank]
        if peer.beat.state == RUNNING and peer.beat.idle > limit:
            return Failure(
                f"rank {rank} ({peer.process}) is stuck: for {limit:g} s it has neither computed "
                f"nor read anything, while rank {own} waits for it at {here.call}",
                (rank,),
            )
    beats = [peer.beat for peer in peers.values()]
    waiting = all(beat.state == WAITING and beat.idle > limit for beat in beats)
    text = disagreement({rank: peer.beat.call for rank, peer in peers.items()}) if waiting else ""
    return Failure(text) if text else None


def _loss(peer: Peer, own: Peer, limit: float, now: float) -> str:
    """Why a rank is lost; empty where it is not."""
    silent = now - peer.heard
    since = f"stalls: it has sent no heartbeat for {int(silent)} s"
    if not own.process.kernel or peer.process.kernel != own.process.kernel:
        slow = TRANSFERRING in (peer.beat.state, own.beat.state)
        why = "its process or its host has stopped, or the network between the hosts"
        return f"{since}; {why}" if silent > limit * (_SLOW if slow else 1) else ""
    state = process_state(peer.process.process)
    if state in "ZX":
        return "died: its process is gone"
    if silent <= limit:
        return ""
    if state in "RD":  # it computes or reads, and holds Python's lock
        peer.heard = now
        return ""
    reason = "its process is stopped (SIGSTOP)" if state in "Tt" else "it idles with Python's lock"
    return f"{since}, as {reason}"


class Watcher:
    """The watcher thread of a rank, and what it shares with the working thread.

    `processes` are those of all ranks; see find_failure for `limit`.
    """

    def __init__(self, mpi: Any, comm: Any, processes: Sequence[RankProcess], limit: float) -> None:
        self._mpi, self._comm, self._limit = mpi, comm, limit
        self.rank: int = comm.Get_rank()
        self.failure: Failure | None = None
        self.progress: Callable[[], int] = lambda: 0
        self._beat = Heartbeat()  # the next one, without the time in which this rank idled
        self._moved, self._active = time.monotonic(), 0
        self.peers = {rank: Peer(process, self._moved) for rank, process in enumerate(processes)}
        self._open = [rank for rank in self.peers if rank != self.rank]  # with heartbeats to come
        self._sends: dict[int, Any] = {}
        self._sent, self._ran, self._failed = 0.0, self._moved, 0.0
        self._claimed = self._over = False
        self._changed = threading.Event()  # wakes the thread
        self._lock, self._ending = threading.Lock(), threading.Lock()
        self._thread = threading.Thread(target=self._run, name="irc watcher", daemon=True)
        self._thread.start()

    def fail(self, failure: Failure) -> None:
        """Make a failure known to all ranks, unless an earlier one is."""
        with self._lock:
            self.failure = self.failure or failure
        self._changed.set()

    def fail_here(self, reason: str) -> None:
        """Tell all ranks that this one failed, unless the run has failed already."""
        self.fail(Failure(f"rank {self.rank} failed: {reason}"[:_LONGEST]))

    def check(self) -> None:
        """A PeerError where the run has failed."""
        if self.failure is not None:
            raise PeerError(self.failure.text)

    def claim_report(self) -> bool:
        """Whether the caller tells the user about the failure: True once, on the first rank that
        can."""
        with self._lock:
            claimed, self._claimed = self._claimed, True
            return not claimed and self.rank == self._reporter()

    @contextmanager
    def during(self, state: str, call: str = "", awaits: tuple[int, ...] = ()) -> Generator[None]:
        """Inside, this rank is in a call."""
        self._moved = time.monotonic()
        self._beat = Heartbeat(state, 0.0, call[:_LONGEST], awaits)
        try:
            yield
        finally:
            self._moved, self._beat = time.monotonic(), Heartbeat()

    def transfer(self) -> None:
        """Note that the call of this rank moves a large array from now on."""
        self._beat = replace(self._beat, state=TRANSFERRING)

    def stop(self) -> None:
        """End the thread, once all ranks are to: returns when each has sent its last heartbeat.

        Without it a message could be under way to a rank that finalizes MPI, which is an error.
        """
        self._over = True
        self._changed.set()
        self._thread.join()
        beat = replace(self._heartbeat(), last=True)
        ends = [self._comm.isend(beat, rank, _TAG) for rank in self.peers if rank != self.rank]
        while self._open:
            self._listen()
            time.sleep(LISTEN / 10)
        for request in [*self._sends.values(), *ends]:
            request.wait()

    def end_process(self, status: int) -> NoReturn:
        """End the process after a failure, once the user has been told.

        The rank that told it ends all others too, stopped or not; they give it time to.
        """
        self._ending.acquire()  # never released: of two threads the second one waits for its end
        if self.rank != self._reporter():
            time.sleep(GRACE + _REPORT + 2 * END)
            os._exit(status)
        time.sleep(END)  # the others end, and the launcher passes on what was printed
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for file in (1, 2):  # MPI's own message would hide ours
            os.dup2(nowhere, file)
        self._mpi.COMM_WORLD.Abort(status)  # of another communicator it would end this rank alone
        os._exit(status)

    def _reporter(self) -> int:
        """The first rank that is not lost."""
        lost = self.failure.lost if self.failure is not None else ()
        return next(rank for rank in range(len(lost) + 1) if rank not in lost)

    def _run(self) -> None:
        try:
            while not self._over:
                self._turn()
                self._changed.wait(LISTEN)
                self._changed.clear()
        except BaseException as error:
            self.fail_here(repr(error))
            raise

    def _turn(self) -> None:
        self._listen()
        now = time.monotonic()
        gap, self._ran = now - self._ran, now
        if gap > EVERY:  # this thread did not run: others were not silent meanwhile
            for peer in self.peers.values():
                peer.heard += gap
            self._moved += gap
        if now - self._sent >= EVERY:
            self.peers[self.rank].beat = self._heartbeat()
            failure = find_failure(self.rank, self.peers, self._limit, now)
            if failure is not None:
                self.fail(failure)
            self._send()
        if self.failure is None:
            return
        if not self._failed:
            self._failed = now
            self._send()
        # the working thread may be telling the user
        if now - self._failed > GRACE + _REPORT * self._claimed:
            if self.claim_report():
                print(f"error: {self.failure.text}", file=sys.__stderr__, flush=True)
            self.end_process(1)

    def _heartbeat(self) -> Heartbeat:
        """What the other ranks are told now."""
        now, active = time.monotonic(), activity()
        least = _ACTIVE * max(now - self._moved, EVERY)
        if self._beat.state == RUNNING and active - self._active >= least:
            self._moved, self._active = now, active
        idle, progress = now - self._moved, self.progress()
        return replace(self._beat, idle=idle, failure=self.failure, progress=progress)

    def _listen(self) -> None:
        """Take in the heartbeats that have come."""
        for rank in list(self._open):
            try:
                while rank in self._open and (message := self._comm.improbe(rank, _TAG)):
                    beat: Heartbeat = message.recv()
                    self.peers[rank].beat, self.peers[rank].heard = beat, time.monotonic()
                    if beat.failure is not None:
                        self.fail(beat.failure)
                    if beat.last:
                        self._open.remove(rank)
            except self._mpi.Exception as error:
                self._connection_broke(rank, error)

    def _send(self) -> None:
        """Send a heartbeat to all other ranks but those that have not taken the last one yet."""
        beat, self._sent = self._heartbeat(), time.monotonic()
        for rank in list(self._open):
            try:
                before = self._sends.get(rank)
                if before is None or before.test()[0]:
                    self._sends[rank] = self._comm.isend(beat, rank, _TAG)
            except self._mpi.Exception as error:
                self._connection_broke(rank, error)

    def _connection_broke(self, rank: int, error: Exception) -> None:
        self._open.remove(rank)
        who = f"rank {rank} ({self.peers[rank].process})"
        text = f"{who} died, or the network to it broke: {last_line(error)}"
        self.fail(Failure(text, (rank,)))


def activity() -> int:
    """What grows while this process computes or reads, this thread not counted: milliseconds of
    CPU time, and blocks and pages read."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    spent = int((usage.ru_utime + usage.ru_stime - time.thread_time()) * 1000)
    return spent + usage.ru_majflt + usage.ru_inblock


def last_line(error: Exception) -> str:
    """The last line of MPI's stack of messages, which is the most specific."""
    return str(error).strip().splitlines()[-1].strip()
