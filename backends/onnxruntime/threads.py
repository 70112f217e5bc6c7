"""Ranks as threads of one process: communicators that meet in shared memory.

A rank that waits stops at once when another one fails, disagrees, or waits for it in turn, and
after a time in which no rank has moved at all.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias, TypeVar

import numpy as np

from irc.backends.communicator import Communicator, Exchange, PeerError
from irc.backends.ranks.combine import perform

Array: TypeAlias = np.ndarray[Any, Any]
T = TypeVar("T")

TIMEOUT = 60.0  # seconds in which some rank must move
_TURN = 1.0  # seconds between two looks of a rank that waits
SMALL = 1 << 15  # bytes of an operand up to which the last rank to come does all the work


@dataclass
class _Meeting:
    """One collective of one group: what each rank came with, and how many have done their share."""

    group: tuple[int, ...]
    text: str  # what the first rank came for, and where
    came: dict[int, Any] = field(default_factory=dict[int, Any])
    done: int = 0

    @property
    def full(self) -> bool:
        return len(self.came) == len(self.group)

    def missing(self) -> list[int]:
        return [rank for rank in self.group if rank not in self.came]

    def items(self) -> list[Any]:
        """What the ranks came with, in the order of the group."""
        return [self.came[rank] for rank in self.group]


@dataclass(frozen=True)
class _Wait:
    """A rank that waits: where, and which ranks have to come."""

    text: str
    missing: Callable[[], list[int]]


class ThreadWorld:
    """`ranks` ranks that share memory. After a failure it is good for nothing.

    `timeout`: for how many seconds ranks wait while none of them moves.
    """

    def __init__(self, ranks: int, timeout: float = TIMEOUT) -> None:
        self.ranks, self.timeout = ranks, timeout
        self._changed = threading.Condition()
        self._failed: tuple[int | None, str] | None = None  # the rank to blame
        self._moved = 0.0
        self._counts: dict[tuple[int, tuple[int, ...]], int] = {}  # meetings of a rank in a group
        self._meetings: dict[tuple[tuple[int, ...], int], _Meeting] = {}
        self._mail: dict[tuple[int, int], deque[dict[str, Array]]] = {}
        self._waits: dict[int, _Wait] = {}
        self._left: set[int] = set()

    def communicator(self, rank: int) -> Communicator:
        """The side of one rank."""
        return ThreadCommunicator(self, rank)

    def run(self, work: Callable[[Communicator], T]) -> list[T]:
        """What `work` gives on every rank, each in a thread; the first failure is raised."""
        results: dict[int, T] = {}
        errors: dict[int, BaseException] = {}
        self._left.clear()
        self._moved = time.monotonic()

        def one(rank: int) -> None:
            try:
                results[rank] = work(self.communicator(rank))
                self.leave(rank)
            except BaseException as error:  # raised again by the thread that called run
                errors[rank] = error
                self.fail(rank, f"rank {rank} failed: {error}")

        threads = [
            threading.Thread(target=one, args=(rank,), name=f"rank {rank}")
            for rank in range(1, self.ranks)
        ]
        for thread in threads:
            thread.start()
        try:
            one(0)
            for thread in threads:
                thread.join()
        except BaseException:
            self.fail(0, "the run was interrupted")
            raise
        if errors:
            raise self._first(errors)
        return [results[rank] for rank in range(self.ranks)]

    def _first(self, errors: Mapping[int, BaseException]) -> BaseException:
        """What the rank raised that is to blame for all others."""
        blamed = self._failed[0] if self._failed is not None else None
        rank = blamed if blamed is not None and blamed in errors else next(iter(errors))
        error = errors[rank]
        if not isinstance(error, PeerError):
            error.add_note(f"on rank {rank} of {self.ranks}")
        return error

    def fail(self, rank: int | None, message: str) -> None:
        """Stop all ranks, unless they are stopped already."""
        with self._changed:
            self._failed = self._failed or (rank, message)
            self._changed.notify_all()

    def leave(self, rank: int) -> None:
        """This rank comes to no meeting any more."""
        with self._changed:
            self._left.add(rank)
            self._changed.notify_all()

    def meet(
        self, rank: int, group: tuple[int, ...], text: str, item: Any, wake: bool
    ) -> tuple[_Meeting, bool]:
        """Come to the next meeting of a group, and whether all others have; no waiting.

        `wake` the others once all are there.
        """
        with self._changed:
            self._stop_if_failed()
            count = self._counts.get((rank, group), 0)
            self._counts[rank, group] = count + 1
            meeting = self._meetings.setdefault((group, count), _Meeting(group, text))
            if meeting.text != text:
                first = next(iter(meeting.came))
                self._disagree(first, meeting.text, rank, text)
            meeting.came[rank] = item
            if meeting.full:
                del self._meetings[group, count]
                if wake:
                    self._changed.notify_all()
            return meeting, meeting.full

    def wait(
        self,
        rank: int,
        text: str,
        ready: Callable[[], bool],
        missing: Callable[[], list[int]] = list,
    ) -> None:
        """Wait until something is `ready`, for which the `missing` ranks have to come."""
        with self._changed:
            self._moved = looked = time.monotonic()
            self._waits[rank] = _Wait(text, missing)
            try:
                while not ready():
                    self._stop_if_failed()
                    self._check_circle(rank)
                    now = time.monotonic()
                    if now - looked > 2 * _TURN:  # the process stood still (ctrl-Z), not the ranks
                        self._moved = min(now, self._moved + now - looked)
                    looked, left = now, self._moved + self.timeout - now
                    if left <= 0:
                        self._stall(text, missing())
                    self._changed.wait(min(left, _TURN))
            finally:
                del self._waits[rank]

    def finish(self, meeting: _Meeting, shares: int) -> None:
        """Some shares of a meeting's work are done."""
        with self._changed:
            meeting.done += shares
            if meeting.done == len(meeting.group):
                self._changed.notify_all()

    def post(self, source: int, to: int, arrays: Mapping[str, Array]) -> None:
        """Lay copies of arrays into the box from one rank to another."""
        copies = {name: array.copy() for name, array in arrays.items()}
        with self._changed:
            self._stop_if_failed()
            self._mail.setdefault((source, to), deque()).append(copies)
            self._changed.notify_all()

    def fetch(self, source: int, to: int) -> dict[str, Array]:
        """Wait for the next arrays in the box."""
        with self._changed:
            box = self._mail.setdefault((source, to), deque())
        text, awaited = f"the values of rank {source}", [source]
        self.wait(to, text, lambda: bool(box), lambda: [] if box else awaited)
        return box.popleft()

    def _stop_if_failed(self) -> None:
        if self._failed is not None:
            raise PeerError(self._failed[1])

    def _fail(self, rank: int | None, message: str) -> NoReturn:
        self.fail(rank, message)
        raise PeerError(message)

    def _disagree(self, a: int, at_a: str, b: int, at_b: str) -> NoReturn:
        (a, at_a), (b, at_b) = sorted([(a, at_a), (b, at_b)])
        self._fail(None, f"the ranks do not do the same: rank {a} is at {at_a}, rank {b} at {at_b}")

    def _stall(self, text: str, missing: list[int]) -> NoReturn:
        who = _listed(missing) or "another rank"
        self._fail(
            None,
            f"{who} did not come to {text}: no rank has moved for {self.timeout:g} s; "
            "if it only takes long, give a larger timeout",
        )

    def _check_circle(self, rank: int) -> None:
        """Two ranks that wait for each other never meet, nor does one that has left."""
        mine = self._waits[rank]
        for other in mine.missing():
            if other in self._left:
                self._fail(None, f"rank {rank} is at {mine.text}, but rank {other} has finished")
            if rank in self._behind(other):
                self._disagree(rank, mine.text, other, self._waits[other].text)

    def _behind(self, rank: int) -> Iterable[int]:
        """The ranks that this one waits for, directly or not."""
        found: dict[int, None] = {}
        waiting = [rank]
        while waiting:
            wait = self._waits.get(waiting.pop())
            for other in wait.missing() if wait is not None else ():
                if other not in found:
                    found[other] = None
                    waiting.append(other)
        return found


class ThreadCommunicator:
    """One rank's side of a ThreadWorld; see Communicator."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self._world, self.rank = world, rank
        self.ranks = self.neighbours = world.ranks

    def exchange(self, what: Exchange, operand: Array, result: Array) -> None:
        """Take part in a collective: read `operand`, write `result`, both contiguous."""
        world, text = self._world, what.described(operand)
        large, ways = operand.nbytes > SMALL, len(what.group)
        meeting, last = world.meet(self.rank, what.group, text, (operand, result), large)
        if large and not last:
            world.wait(self.rank, text, lambda: meeting.full, meeting.missing)
        if large or last:
            operands, results = zip(*meeting.items(), strict=True)
            own = (what.group.index(self.rank),)
            for position in own if large else range(ways):
                perform(what, position, operands, results)
            world.finish(meeting, len(own) if large else ways)
        world.wait(self.rank, text, lambda: meeting.done == ways, meeting.missing)

    def send(self, to: int, arrays: Mapping[str, Array]) -> None:
        """Hand named arrays to another rank, which receives them by the same names."""
        self._world.post(self.rank, to, arrays)

    def receive(self, source: int) -> dict[str, Array]:
        """The arrays that `source` sent."""
        return self._world.fetch(source, self.rank)

    def agree(self, what: str, fact: str) -> None:
        """A PeerError on every rank where the ranks do not all give the same `fact`."""
        everyone = tuple(range(self.ranks))
        text = f"the comparison of {what}"
        meeting, _ = self._world.meet(self.rank, everyone, text, fact, True)
        self._world.wait(self.rank, text, lambda: meeting.full, meeting.missing)
        facts = meeting.items()
        for rank, found in enumerate(facts):
            if found != facts[0]:
                raise PeerError(
                    f"the ranks differ in {what}: rank 0 has {facts[0]}, rank {rank} has {found}"
                )

    def abort(self, reason: str) -> None:
        """Tell the other ranks that this one cannot go on."""
        self._world.fail(self.rank, f"rank {self.rank} failed: {reason}")

    def close(self) -> None:
        """Nothing is held."""


def _listed(ranks: list[int]) -> str:
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {' and '.join(map(str, ranks))}" if ranks else ""
