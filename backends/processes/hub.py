"""The hub: passes letters on between the processes of a run, and finds out which one is lost."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from irc.backends.mpi.process import Home, glance
from irc.backends.processes.letters import BEAT, END, FAIL, HUB, Letter, address_of, decoded

LIMIT = 5.0  # seconds without a sign of life after which a rank of this host is lost
FAR = 30.0  # of another host, whose processes cannot be looked at
_TURN = 0.25
_FRESH = 2.5  # seconds within which a living rank is heard
_GONE = (EOFError, OSError)


@dataclass
class _Member:
    """A rank: its process, when it was heard, and what it waits for. `moved`: its last progress."""

    connection: Connection[Any, Any]
    home: Home
    outbox: queue.SimpleQueue[bytes | None] = field(default_factory=queue.SimpleQueue[bytes | None])
    heard: float = field(default_factory=time.monotonic)
    moved: float = field(default_factory=time.monotonic)
    beat: dict[str, Any] = field(default_factory=dict[str, Any])
    ticks: int = 0
    ended: bool = False
    gone: bool = False

    def __str__(self) -> str:
        return f"({self.home})"


class Hub:
    """Serves `ranks` ranks, who are added one by one.

    `told` is called once with what the run failed of and the rank to blame (None: several).
    """

    def __init__(
        self,
        ranks: int,
        told: Callable[[str, int | None], None] = lambda text, rank: None,
        limit: float = LIMIT,
    ) -> None:
        self.ranks, self.failure = ranks, ""
        self._told, self._limit = told, limit
        self._members: dict[int, _Member] = {}
        self._early: dict[int, list[bytes]] = {}  # letters to ranks that have not come
        self._senders: list[threading.Thread] = []
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._bell, self._waker = pair()
        self._thread = threading.Thread(target=self._run, name="irc hub", daemon=True)

    def add(self, rank: int, connection: Connection[Any, Any], home: Home) -> None:
        """A rank has come."""
        member = _Member(connection, home)
        sender = threading.Thread(target=_send, args=(member,), daemon=True)
        with self._lock:
            self._members[rank] = member
            for data in self._early.pop(rank, ()):
                member.outbox.put(data)
            self._senders.append(sender)
        sender.start()
        self._ring()

    def missing(self) -> list[int]:
        """The ranks that have not come."""
        return [rank for rank in range(self.ranks) if rank not in self._members]

    def start(self) -> None:
        """Begin, also while ranks are still coming."""
        self._thread.start()

    def fail(self, text: str, rank: int | None = None) -> None:
        """Tell all ranks that the run cannot go on, unless they know."""
        with self._lock:
            if self.failure:
                return
            self.failure = text
            for member in self._members.values():
                letter = Letter(FAIL, HUB, facts={"text": text, "rank": rank})
                member.outbox.put(letter.encoded())
        self._told(text, rank)

    def close(self, patience: float) -> None:
        """End: once all ranks have ended or so many seconds have passed, with all letters sent."""
        until = time.monotonic() + patience
        while time.monotonic() < until and not all(
            member.ended or member.gone for member in self._members.values()
        ):
            time.sleep(0.01)
        self._over.set()
        self._ring()
        if self._thread.is_alive():
            self._thread.join()  # before what it reads from is closed, and may be another's
        for member in self._members.values():
            member.outbox.put(None)
        for sender in self._senders:
            sender.join(max(0.0, until - time.monotonic()))
        for connection in (
            self._bell,
            self._waker,
            *(m.connection for m in self._members.values()),
        ):
            with suppress(OSError):
                connection.close()

    def _ring(self) -> None:
        """Let the thread look up."""
        with suppress(OSError):
            self._waker.send_bytes(b".")

    def _run(self) -> None:
        last = time.monotonic()
        while not self._over.is_set():
            with self._lock:
                living = {m.connection: r for r, m in self._members.items() if not m.gone}
            for connection in wait([self._bell, *living], _TURN):
                if connection is self._bell:
                    self._bell.recv_bytes()
                elif isinstance(connection, Connection) and connection in living:
                    self._take(living[connection])
            now = time.monotonic()
            if now - last > 2 * _TURN:  # this process stood still itself
                with self._lock:
                    for member in self._members.values():
                        member.heard += now - last
                        member.moved += now - last
            last = now
            self._judge(now)

    def _take(self, rank: int) -> None:
        member = self._members[rank]
        try:
            data = member.connection.recv_bytes()
        except _GONE:
            member.gone = True
            if not member.ended:
                self.fail(f"rank {rank} {member} died: its process is gone", rank)
            return
        now = time.monotonic()
        member.heard = now
        kind, to = address_of(data)
        if to != HUB:
            member.moved = now
            with self._lock:
                other = self._members.get(to)
                if other is None:  # it has not come yet
                    self._early.setdefault(to, []).append(data)
                    return
            other.moved = now
            other.outbox.put(data)
            return
        letter = decoded(data)
        if kind == BEAT:
            if letter.facts.get("progress") != member.beat.get("progress"):
                member.moved = now
            member.beat = dict(letter.facts)
        elif kind == FAIL:
            self.fail(letter.facts["text"], rank)
        elif kind == END:
            member.ended = True

    def _judge(self, now: float) -> None:
        if self.failure or self.missing():
            return
        for rank, member in self._members.items():
            if not (member.ended or member.gone):
                self._check_alive(rank, member, now)
        waiting = [r for r, m in self._members.items() if m.beat.get("waits") and not m.ended]
        for rank in waiting:
            # a beat may be older than what was passed on to the rank since, such as the answer
            # that it waited for
            if not self._is_idle(self._members[rank], now, _FRESH):
                continue
            for other in self._members[rank].beat["others"]:
                if self._members[other].ended:
                    here = self._members[rank].beat["waits"]
                    self.fail(f"rank {rank} is at {here}, but rank {other} has finished")
        idle = [r for r in waiting if self._is_idle(self._members[r], now, self._limit)]
        if len(idle) == self.ranks:
            first, last = idle[0], idle[-1]
            self.fail(
                "the ranks do not do the same: "
                f"rank {first} is at {self._members[first].beat['waits']}, "
                f"rank {last} at {self._members[last].beat['waits']}; "
                "all need the same artifact and the same inputs"
            )

    def _is_idle(self, member: _Member, now: float, seconds: float) -> bool:
        """Whether a rank has not gone on for so long, and still says so."""
        return now - member.moved > seconds and now - member.heard < _FRESH

    def _check_alive(self, rank: int, member: _Member, now: float) -> None:
        seen = glance(member.home)
        if seen is not None and not seen.there:
            self.fail(f"rank {rank} {member} died: its process is gone", rank)
            return
        silent = now - member.heard
        if silent <= (self._limit if seen is not None else max(FAR, self._limit)):
            return
        if seen is not None and not seen.stopped and seen.ticks != member.ticks:
            member.ticks, member.heard = seen.ticks, now  # it computes, and lets nothing else run
            return
        why = ", as its process is stopped (SIGSTOP)" if seen and seen.stopped else ""
        self.fail(
            f"rank {rank} {member} stalls: it has given no sign of life for {silent:.0f} s{why}",
            rank,
        )


def pair() -> tuple[Connection[Any, Any], Connection[Any, Any]]:
    """Two ends of a pipe between processes of one host."""
    one, other = socket.socketpair()
    return Connection(one.detach()), Connection(other.detach())


def _send(member: _Member) -> None:
    """Send what is in the outbox; the loss of the other end is found by who receives."""
    with suppress(OSError):
        while (data := member.outbox.get()) is not None:
            member.connection.send_bytes(data)
