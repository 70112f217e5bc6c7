"""GPUs for tests of the runtime: they keep record, and work when somebody waits for it.

Everything on a stream happens in order, and as late as on a real one it may: a buffer that is
written again too early, or read before it is there, gives wrong numbers here too.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from irc.backends.communicator import Exchange
from irc.backends.ranks.combine import perform
from irc.dtypes import numpy_dtype
from irc.errors import Error

Array = np.ndarray[Any, Any]
Work = Callable[[], None]
PATIENCE = 100.0


class Memory:
    """Bytes by address; a stretch that was never allocated, or is free again, is an Error."""

    def __init__(self, total: int = 1 << 40) -> None:
        self.total, self.used = total, 0
        self._bases: list[int] = []
        self._blocks: dict[int, Array] = {}
        self._next = 1 << 20

    def allocate(self, size: int) -> int:
        """New memory, whose bytes are anything but zeros."""
        if self.used + size > self.total:
            raise Error("no memory is left on the GPU")
        base = self._next
        self._next += -(-size // 256) * 256 + 256
        self._bases.append(base)
        self._blocks[base] = np.full(size, 0xCD, np.uint8)
        self.used += size
        return base

    def free(self, address: int) -> None:
        """Give it back."""
        self.used -= self._blocks.pop(address).size
        self._bases.remove(address)

    def view(self, address: int, size: int) -> Array:
        """So many bytes from an address on."""
        at = bisect_right(self._bases, address) - 1
        base = self._bases[at] if at >= 0 else address
        start, block = address - base, self._blocks.get(base, np.empty(0, np.uint8))
        if at < 0 or start + size > block.size:
            raise Error(f"{size} bytes at {address:#x} are not allocated")
        return block[start : start + size]

    def array(self, address: int, shape: Sequence[int], dtype: str) -> Array:
        """The same as an array."""
        kind = numpy_dtype(dtype)
        size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        return self.view(address, size).view(kind).reshape(tuple(shape))

    def read(self, address: int, shape: Sequence[int], dtype: str) -> Array:
        """A copy of an array."""
        return self.array(address, shape, dtype).copy()

    def write(self, address: int, array: Array, dtype: str) -> None:
        """Put an array there."""
        self.array(address, array.shape, dtype)[...] = array


@dataclass
class Graph:
    """What was captured."""

    work: list[Work]
    dropped: bool = False


class Stream:
    """A queue of work. `calls` records what is asked for, by name."""

    def __init__(self, memory: Memory, calls: list[tuple[Any, ...]]) -> None:
        self._memory, self.calls = memory, calls
        self._queue: list[Work] = []
        self._captured: list[Work] | None = None
        self.handle = id(self)
        STREAMS[self.handle] = self

    def enqueue(self, work: Work) -> None:
        """Put work at the end."""
        (self._queue if self._captured is None else self._captured).append(work)

    def upload(self, address: int, host: Array) -> None:
        """See the runtime's Stream."""
        assert host.flags.c_contiguous

        def work() -> None:
            self._memory.view(address, host.nbytes)[...] = host.reshape(-1).view(np.uint8)

        self.calls.append(("upload", address, host.nbytes))
        self.enqueue(work)

    def download(self, host: Array, address: int) -> None:
        """See the runtime's Stream."""
        assert host.flags.c_contiguous

        def work() -> None:
            host.reshape(-1).view(np.uint8)[...] = self._memory.view(address, host.nbytes)

        self.calls.append(("download", address, host.nbytes))
        self.enqueue(work)

    def copy(self, target: int, source: int, size: int) -> None:
        """See the runtime's Stream."""

        def work() -> None:
            self._memory.view(target, size)[...] = self._memory.view(source, size)

        self.calls.append(("copy", target, source, size))
        self.enqueue(work)

    def zero(self, address: int, size: int) -> None:
        """See the runtime's Stream."""

        def work() -> None:
            self._memory.view(address, size)[...] = 0

        self.calls.append(("zero", address, size))
        self.enqueue(work)

    def event(self) -> Event:
        """See the runtime's Stream."""
        event = Event(self)
        self.enqueue(event.reach)
        return event

    def wait(self) -> None:
        """Do the work."""
        assert self._captured is None, "a wait within a capture"
        while self._queue:
            self._queue.pop(0)()

    def until(self, event: Event) -> None:
        """Do the work up to an event."""
        while not event.reached:
            self._queue.pop(0)()

    def capture(self, work: Work) -> Graph:
        """See the runtime's Stream."""
        self._captured = []
        try:
            work()
            graph = Graph(self._captured)
        finally:
            self._captured = None
        self.calls.append(("capture",))
        return graph

    def launch(self, graph: Graph) -> None:
        """See the runtime's Stream."""
        assert not graph.dropped
        self.calls.append(("launch",))
        self._queue += graph.work

    def drop(self, graph: Graph) -> None:
        """See the runtime's Stream."""
        self.calls.append(("drop",))
        graph.dropped = True


STREAMS: dict[int, Stream] = {}


class Event:
    """A place in a stream."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self.reached = stream, False

    def reach(self) -> None:
        """The stream has come here."""
        self.reached = True

    def wait(self) -> None:
        """See the runtime's Event."""
        self._stream.until(self)


@dataclass
class _Meeting:
    came: dict[int, Any] = field(default_factory=dict[int, Any])
    left: int = 0


class Fabric:
    """What joins the GPUs of a run: groups meet here, whose ranks are threads."""

    def __init__(self, patience: float = PATIENCE) -> None:
        self._changed = threading.Condition()
        self._patience = patience
        self._meetings: dict[Any, _Meeting] = {}
        self._counts: dict[Any, int] = {}
        self._names = 0
        self.broken = ""

    def name(self) -> bytes:
        """A new name of a group."""
        with self._changed:
            self._names += 1
            return b"group %d" % self._names

    def fail(self, reason: str) -> None:
        """Nobody meets any more."""
        with self._changed:
            self.broken = self.broken or reason
            self._changed.notify_all()

    def meet(self, key: Any, position: int, ways: int, item: Any) -> list[Any]:
        """What all of a group came with, in order."""
        until = time.monotonic() + self._patience
        with self._changed:
            turn = self._counts.get((key, position), 0)
            self._counts[key, position] = turn + 1
            meeting = self._meetings.setdefault((key, turn), _Meeting())
            meeting.came[position] = item
            self._changed.notify_all()
            while len(meeting.came) < ways:
                if self.broken:
                    raise Error(self.broken)
                if not self._changed.wait(max(0.0, until - time.monotonic())):
                    missing = [each for each in range(ways) if each not in meeting.came]
                    raise Error(f"rank {missing} of the group did not come within the timeout")
            meeting.left += 1
            if meeting.left == ways:
                del self._meetings[key, turn]
            return [meeting.came[each] for each in range(ways)]


class Group:
    """One rank's side of a group. `fault`: what to do wrong, for tests of the self-test."""

    def __init__(self, fabric: Fabric, memory: Memory, name: bytes, rank: int, ranks: int) -> None:
        self.fabric, self._memory, self.name = fabric, memory, name
        self.rank, self.ranks = rank, ranks
        self.fault = ""
        self.open = True
        fabric.meet((name, "init"), rank, ranks, None)

    def bind(
        self, operation: str, dtype: str, elements: int, reduce_op: str = "none", root: int = -1
    ) -> Callable[[int, int, int], None]:
        """See the runtime's Group."""
        what = Exchange(operation, reduce_op, tuple(range(self.ranks)), max(root, 0))
        (count,) = what.result_shape((elements,))

        def work(source: int, target: int) -> None:
            operand = self._memory.array(source, (elements,), dtype).copy()
            operands = self.meet(operand)
            if self.fault == "order":
                operands = operands[::-1]
            results = [np.empty(count, operand.dtype) for _ in operands]
            for position in range(self.ranks):
                perform(what, position, operands, results)
            if self.fault == "nothing" and operation == "all_reduce":
                results = [operand] * self.ranks
            self._memory.array(target, (count,), dtype)[...] = results[self.rank]

        def launch(source: int, target: int, stream: int) -> None:
            STREAMS[stream].calls.append((operation, self.name, elements, dtype))
            STREAMS[stream].enqueue(lambda: work(source, target))

        return launch

    def meet(self, item: Any) -> list[Any]:
        """What all ranks came with, in order."""
        assert self.open
        return self.fabric.meet(self.name, self.rank, self.ranks, item)

    def send(self, address: int, size: int, to: int, stream: int) -> None:
        """See the runtime's Group."""
        key = (self.name, "mail", self.rank, to)

        def work() -> None:
            self.fabric.meet(key, 0, 2, self._memory.view(address, size).copy())

        STREAMS[stream].calls.append(("send", size, to))
        STREAMS[stream].enqueue(work)

    def receive(self, address: int, size: int, source: int, stream: int) -> None:
        """See the runtime's Group."""
        key = (self.name, "mail", source, self.rank)

        def work() -> None:
            self._memory.view(address, size)[...] = self.fabric.meet(key, 1, 2, None)[0]

        STREAMS[stream].calls.append(("receive", size, source))
        STREAMS[stream].enqueue(work)

    def abort(self) -> None:
        """See the runtime's Group."""
        self.fabric.fail("the group was given up")

    def close(self) -> None:
        """See the runtime's Group."""
        self.open = False
