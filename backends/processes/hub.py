"""The hub: passes letters on between the processes of a run, and finds out which one is lost."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from irc.backends.mpi.process import DISK, Glance, Home, glance
from irc.backends.processes.letters import BEAT, END, FAIL, HUB, Letter, address_of, decoded

LIMIT = 5.0  # seconds without a sign of life after which a rank of this host is lost
FAR = 30.0  # of another host, whose processes cannot be looked at
_TURN = 0.25
_LAST = 2.0  # seconds in which the last letters of a process that is gone are read
_GONE = (EOFError, OSError)


@dataclass
class _Member:
    """A rank: its process, when it was heard, and what it waits for.

    `blocked` is for how long it has been silent for the sake of a disk, `missed` when its process
    was first seen to be gone; `passed` counts the letters of other ranks that it was sent.
    """

    connection: Connection[Any, Any]
    home: Home
    outbox: queue.SimpleQueue[bytes | None] = field(default_factory=queue.SimpleQueue[bytes | None])
    heard: float = field(default_factory=time.monotonic)
    blocked: float = 0.0
    missed: float | None = None
    beat: dict[str, Any] = field(default_factory=dict[str, Any])
    passed: int = 0
    ticks: int = 0
    ended: bool = False
    gone: bool = False

    def __str__(self) -> str:
        return f"({self.home})"

    def hand(self, data: bytes) -> None:
        """Pass on a letter of another rank."""
        self.passed += 1
        self.outbox.put(data)

    def excused(self, seen: Glance, silent: float, now: float) -> bool:
        """Whether the kernel knows why it is silent, and that may pass."""
        if seen.stopped:
            return False
        if seen.ready or seen.ticks != self.ticks:  # it computes, and lets nothing else run
            self.ticks, self.heard, self.blocked = seen.ticks, now, 0.0
            return True
        if not seen.on_disk or self.blocked + silent > DISK:
            return False
        self.heard, self.blocked = now, self.blocked + silent
        return True

    def waits(self) -> bool:
        """Whether it waits for a letter, and everything that was sent to it had arrived by then.

        A sign of life may be older than what was sent to the rank since, such as the answer that it
        waited for.
        """
        waits = not self.ended and bool(self.beat.get("waits"))
        return waits and self.beat["arrived"] == self.passed


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
        # what ranks have sent, and None where no more will come; a None alone wakes the hub
        self._inbox: queue.SimpleQueue[tuple[int, bytes | None] | None] = queue.SimpleQueue()
        self._senders: list[threading.Thread] = []
        self._readers: list[threading.Thread] = []
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="irc hub", daemon=True)

    def add(self, rank: int, connection: Connection[Any, Any], home: Home) -> None:
        """A rank has come."""
        member = _Member(connection, home)
        sender = threading.Thread(target=_send, args=(member,), daemon=True)
        reader = threading.Thread(target=self._read, args=(rank, connection), daemon=True)
        with self._lock:
            if self._over.is_set():  # it comes too late
                connection.close()
                return
            self._members[rank] = member
            for data in self._early.pop(rank, ()):
                member.hand(data)
            for thread, kind in ((sender, self._senders), (reader, self._readers)):
                thread.start()
                kind.append(thread)

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

    def has_left(self, rank: int, patience: float) -> bool:
        """Whether a rank that is gone had taken leave; its last letters have so many seconds."""
        member = self._members.get(rank)
        until = time.monotonic() + patience
        while member and not (member.ended or member.gone) and time.monotonic() < until:
            time.sleep(0.01)
        return member is not None and member.ended

    def close(self, patience: float) -> None:
        """End: once all ranks have ended or so many seconds have passed, with all letters sent."""
        until = time.monotonic() + patience
        while time.monotonic() < until and not all(
            member.ended or member.gone for member in [*self._members.values()]
        ):
            time.sleep(0.01)
        with self._lock:
            self._over.set()
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join()
        members = [*self._members.values()]
        for member in members:
            member.outbox.put(None)
        for sender in self._senders:
            sender.join(max(0.0, until - time.monotonic()))
        for member in members:
            _shut(member.connection)
        for thread in (*self._senders, *self._readers):
            thread.join()  # before what it uses is closed, and may be another's
        for member in members:
            with suppress(OSError):
                member.connection.close()

    def _read(self, rank: int, connection: Connection[Any, Any]) -> None:
        """A thread per rank: one that stops in the middle of a letter holds up nobody else."""
        with suppress(*_GONE):
            while True:
                self._inbox.put((rank, connection.recv_bytes()))
        self._inbox.put((rank, None))

    def _run(self) -> None:
        last = time.monotonic()
        while not self._over.is_set():
            with suppress(queue.Empty):
                found = self._inbox.get(timeout=_TURN)
                if found is not None:
                    self._take(*found)
            now = time.monotonic()
            if now - last > 2 * _TURN:  # this process stood still itself
                self._forgive(now - last)
            last = now
            if self._inbox.empty():
                self._judge(now)

    def _forgive(self, seconds: float) -> None:
        with self._lock:
            for member in self._members.values():
                member.heard += seconds
                if member.missed is not None:
                    member.missed += seconds

    def _take(self, rank: int, data: bytes | None) -> None:
        member = self._members[rank]
        if data is None:
            member.gone = True
            if not member.ended:
                self.fail(f"rank {rank} {member} died: its process is gone", rank)
            return
        member.heard, member.blocked = time.monotonic(), 0.0
        kind, to = address_of(data)
        if to != HUB:
            self._pass_on(to, data)
            return
        letter = decoded(data)
        if kind == BEAT:
            member.beat = dict(letter.facts)
        elif kind == FAIL:
            self.fail(letter.facts["text"], rank)
        elif kind == END:
            member.ended = True

    def _pass_on(self, to: int, data: bytes) -> None:
        with self._lock:
            other = self._members.get(to)
            if other is None:  # it has not come yet
                self._early.setdefault(to, []).append(data)
            else:
                other.hand(data)

    def _judge(self, now: float) -> None:
        if self.failure or self.missing():
            return
        for rank, member in self._members.items():
            if not (member.ended or member.gone):
                self._check_alive(rank, member, now)
        self._check_waits()

    def _check_waits(self) -> None:
        """Ranks that wait for one that has finished, or all for each other, wait in vain.

        A rank's letters are read in order: what it sent before it finished, or before it said that
        it waits, was counted where it arrives.
        """
        members = self._members
        waiting = [rank for rank, member in members.items() if member.waits()]
        for rank in waiting:
            source = members[rank].beat["source"]
            if members[source].ended:
                here = members[rank].beat["waits"]
                self.fail(f"rank {rank} is at {here}, but rank {source} has finished")
        if waiting and len(waiting) == sum(not member.ended for member in members.values()):
            first, last = waiting[0], waiting[-1]
            self.fail(
                "the ranks do not do the same: "
                f"rank {first} is at {members[first].beat['waits']}, "
                f"rank {last} at {members[last].beat['waits']}; "
                "all need the same artifact and the same inputs"
            )

    def _check_alive(self, rank: int, member: _Member, now: float) -> None:
        seen = glance(member.home)
        if seen is not None and not seen.there:
            member.missed = now if member.missed is None else member.missed
            if now - member.missed > _LAST:  # its end would have been read, were it no sudden one
                self.fail(f"rank {rank} {member} died: its process is gone", rank)
            return
        silent = now - member.heard
        if silent <= (self._limit if seen is not None else max(FAR, self._limit)):
            return
        if seen is not None and member.excused(seen, silent, now):
            return
        since = f"it has given no sign of life for {member.blocked + silent:.0f} s"
        self.fail(f"rank {rank} {member} stalls: {since}{_why(seen)}", rank)


def _why(seen: Glance | None) -> str:
    """What the kernel says about a silence."""
    if seen is not None and seen.stopped:
        return ", as its process is stopped (SIGSTOP)"
    return ", as it waits for a disk or a driver" if seen is not None and seen.on_disk else ""


def pair() -> tuple[Connection[Any, Any], Connection[Any, Any]]:
    """Two ends of a pipe between processes of one host."""
    one, other = socket.socketpair()
    return Connection(one.detach()), Connection(other.detach())


def _send(member: _Member) -> None:
    """Send what is in the outbox; the loss of the other end is found by who receives."""
    with suppress(OSError):
        while (data := member.outbox.get()) is not None:
            member.connection.send_bytes(data)


def _shut(connection: Connection[Any, Any]) -> None:
    """End what threads read and write there."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)
