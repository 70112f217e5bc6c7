"""Ranks as threads of one process, whose communicators share memory.

A rank that waits stops at once when another rank fails or makes another call, or when all ranks
wait; and after a time in which no rank has moved at all.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias, TypeVar

import numpy as np

from irc.backends.ranks.combine import perform
from irc.backends.ranks.communicator import (
    CollectiveCall,
    Communicator,
    PeerError,
    difference,
    disagreement,
)

Array: TypeAlias = np.ndarray[Any, Any]
T = TypeVar("T")

TIMEOUT = 60.0  # seconds in which some rank must move
_TURN = 1.0  # seconds between two checks of a rank that waits
SMALL = 1 << 15  # bytes of an operand up to which the last rank to come does all the work


@dataclass
class _Call:
    """One call of a group: what each rank brought, and how many shares of the work are done."""

    group: tuple[int, ...]
    text: str  # of the first rank
    items: dict[int, Any] = field(default_factory=dict[int, Any])
    done: int = 0

    @property
    def is_full(self) -> bool:
        return len(self.items) == len(self.group)


@dataclass(frozen=True)
class _Wait:
    """A rank that waits in a call until something is ready."""

    text: str
    is_ready: Callable[[], bool]


class ThreadWorld:
    """`ranks` ranks that share memory. After a failure it cannot be used any more.

    `timeout`: for how many seconds ranks wait while none of them moves.
    """

    def __init__(self, ranks: int, timeout: float = TIMEOUT) -> None:
        self.ranks, self.timeout = ranks, timeout
        self._changed = threading.Condition()
        self._failed: tuple[int | None, str] | None = None  # the rank to blame, and the message
        self._moves = 0  # times that a rank began to wait
        self._counts: dict[tuple[int, tuple[int, ...]], int] = {}  # calls of a rank in a group
        self._calls: dict[tuple[tuple[int, ...], int], _Call] = {}
        self._sent: dict[tuple[int, int], deque[dict[str, Array]]] = {}
        self.progress: dict[int, Callable[[], int]] = {}  # see Communicator.report, by rank
        self._waits: dict[int, _Wait] = {}  # of ranks that have finished too, which never end

    def communicator(self, rank: int) -> Communicator:
        """The communicator of one rank."""
        return ThreadCommunicator(self, rank)

    def run(self, work: Callable[[Communicator], T]) -> list[T]:
        """What `work` returns on every rank, each in a thread; the first failure is raised."""
        if self.ranks == 1:
            return [work(self.communicator(0))]
        results: dict[int, T] = {}
        errors: dict[int, BaseException] = {}
        self._waits.clear()

        def run_rank(rank: int) -> None:
            try:
                results[rank] = work(self.communicator(rank))
                with self._changed:
                    self._waits[rank] = _Wait("the end", lambda: False)
                    self._changed.notify_all()
            except BaseException as error:  # raised again by the thread that called run
                errors[rank] = error
                self.fail(rank, f"rank {rank} failed: {error}")

        threads = [
            threading.Thread(target=run_rank, args=(rank,), name=f"rank {rank}")
            for rank in range(1, self.ranks)
        ]
        for thread in threads:
            thread.start()
        try:
            run_rank(0)
            for thread in threads:
                thread.join()
        except BaseException:
            self.fail(0, "the run was interrupted")
            raise
        if errors:
            raise self._blamed_error(errors)
        return [results[rank] for rank in range(self.ranks)]

    def _blamed_error(self, errors: Mapping[int, BaseException]) -> BaseException:
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

    def check(self) -> None:
        """A PeerError where the run has failed."""
        if self._failed is not None:
            raise PeerError(self._failed[1])

    def join(
        self, rank: int, group: tuple[int, ...], text: str, item: Any, wake: bool
    ) -> tuple[_Call, bool]:
        """Join the next call of a group, without waiting; returns it and whether this rank is last.

        The last rank may `wake` the others.
        """
        with self._changed:
            self.check()
            count = self._counts.get((rank, group), 0)
            self._counts[rank, group] = count + 1
            call = self._calls.setdefault((group, count), _Call(group, text))
            if call.text != text:
                self._fail(disagreement({next(iter(call.items)): call.text, rank: text}))
            call.items[rank] = item
            if call.is_full:
                del self._calls[group, count]
                if wake:
                    self._changed.notify_all()
            return call, call.is_full

    def wait(self, rank: int, text: str, is_ready: Callable[[], bool]) -> None:
        """Wait in the call `text` until something is ready."""
        with self._changed:
            self._moves += 1
            moves, waited = self._moves, 0.0  # a time in which this process runs, not of a clock
            self._waits[rank] = _Wait(text, is_ready)
            try:
                while not is_ready():
                    self.check()
                    self._check_deadlock()
                    if self._moves != moves:
                        moves, waited = self._moves, 0.0
                    if waited >= self.timeout:
                        self._time_out(text)
                    if not self._changed.wait(_TURN):
                        waited += _TURN
            finally:
                del self._waits[rank]

    def finish(self, call: _Call, shares: int) -> None:
        """Count shares of a call's work as done."""
        with self._changed:
            call.done += shares
            if call.done == len(call.group):
                self._changed.notify_all()

    def send(self, source: int, to: int, arrays: Mapping[str, Array]) -> None:
        """Queue copies of arrays from one rank to another."""
        copies = {name: array.copy() for name, array in arrays.items()}
        with self._changed:
            self.check()
            self._sent.setdefault((source, to), deque()).append(copies)
            self._changed.notify_all()

    def receive(self, source: int, to: int) -> dict[str, Array]:
        """Wait for the next arrays in a queue."""
        with self._changed:
            queue = self._sent.setdefault((source, to), deque())
        self.wait(to, f"the values of rank {source}", lambda: bool(queue))
        return queue.popleft()

    def _fail(self, message: str) -> NoReturn:
        self.fail(None, message)
        raise PeerError(message)

    def _time_out(self, text: str) -> NoReturn:
        missing = [str(rank) for rank in range(self.ranks) if rank not in self._waits]
        names = " and ".join(missing)
        who = f"rank{'s' * (len(missing) > 1)} {names}" if missing else "another rank"
        self._fail(
            f"{who} did not come to {text}: no rank has moved for {self.timeout:g} s; "
            "if it only takes long, give a larger timeout"
        )

    def _check_deadlock(self) -> None:
        """A PeerError where all ranks wait, or have finished, and none can go on."""
        if len(self._waits) == self.ranks and not any(w.is_ready() for w in self._waits.values()):
            calls = {rank: wait.text for rank, wait in self._waits.items()}
            self._fail(disagreement(calls) or f"all ranks wait for each other at {calls[0]}")


class ThreadCommunicator:
    """The communicator of one rank of a ThreadWorld; see Communicator."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self._world, self.rank, self.local_rank = world, rank, rank
        self.ranks = self.local_ranks = world.ranks

    def collective(self, call: CollectiveCall, operand: Array, result: Array) -> None:
        """Take part in a collective: reads `operand`, writes `result`, both contiguous."""
        world, text = self._world, call.description(operand)
        large, group_size = operand.nbytes > SMALL, len(call.group)
        joined, last = world.join(self.rank, call.group, text, (operand, result), large)
        if large and not last:
            world.wait(self.rank, text, lambda: joined.is_full)
        if large or last:
            operands, results = zip(*(joined.items[rank] for rank in call.group), strict=True)
            shares = (call.group.index(self.rank),) if large else tuple(range(group_size))
            for position in shares:
                perform(call, position, operands, results)
            world.finish(joined, len(shares))
        world.wait(self.rank, text, lambda: joined.done == group_size)

    def send(self, to: int, arrays: Mapping[str, Array]) -> None:
        """Send copies of named arrays to another rank; returns before they are received."""
        self._world.send(self.rank, to, arrays)

    def receive(self, source: int) -> dict[str, Array]:
        """The arrays of the next `send` of `source` to this rank."""
        return self._world.receive(source, self.rank)

    def broadcast(self, data: bytes, root: int = 0, group: Sequence[int] = ()) -> bytes:
        """The `data` of rank `root`, on every rank of `group` (default: all ranks)."""
        return self._gathered(f"the broadcast from rank {root}", data, group)[root]

    def agree(self, what: str, fact: str) -> None:
        """Compare a fact, such as a checksum, over all ranks: a PeerError where they differ."""
        facts = self._gathered(f"the comparison of {what}", fact)
        if problem := difference(what, [*facts.values()]):
            raise PeerError(problem)

    def _gathered(self, text: str, item: T, group: Sequence[int] = ()) -> dict[int, T]:
        """The items of all ranks of a group, in its order."""
        members = tuple(group) or tuple(range(self.ranks))
        joined, _ = self._world.join(self.rank, members, text, item, True)
        self._world.wait(self.rank, text, lambda: joined.is_full)
        return {rank: joined.items[rank] for rank in members}

    def check(self) -> None:
        """Health check: a PeerError where the run has failed."""
        self._world.check()

    def report(self, progress: Callable[[], int]) -> None:
        """Tell all ranks a number that changes while the device of this rank gets on with work."""
        self._world.progress[self.rank] = progress

    def progress(self) -> tuple[int, ...]:
        """The latest numbers that all ranks have told."""
        return tuple(number() for number in list(self._world.progress.values()))

    def paused(self) -> AbstractContextManager[None]:
        """Nothing to tell: threads have the terminal in common."""
        return nullcontext()

    def close(self) -> None:
        """Nothing is held."""
