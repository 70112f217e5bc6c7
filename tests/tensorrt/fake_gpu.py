"""GPUs in numpy: a rank is a thread, and its streams run when it waits for them.

Work on a stream runs in order, and as late as a real GPU may run it: a buffer that is overwritten
too early, or read before it is written, gives wrong numbers here too.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from irc.backends.cuda.device import CudaDriver, CudaEvent, CudaStream
from irc.backends.cuda.driver import Gpu
from irc.backends.cuda.group import Group
from irc.backends.cuda.watch import wait
from irc.errors import Error
from irc.ir.dtypes import numpy_dtype

Array = np.ndarray[Any, Any]
Work = Callable[[], Any]  # returns False where it has to wait for other ranks
SOON = 100.0  # seconds until a test gives up

SHARED: dict[bytes, Array] = {}  # by handle


class Memory:
    """Bytes by address; a range that was never allocated, or was freed, is an Error."""

    def __init__(self, total: int = 1 << 40) -> None:
        self.total, self.used = total, 0
        self._bases: list[int] = []
        self._blocks: dict[int, Array] = {}
        self._next = 1 << 20

    def allocate(self, size: int, block: Array | None = None) -> int:
        """Memory of arbitrary bytes, or a block of another GPU."""
        if self.used + size > self.total:
            raise Error("the GPU has too little memory")
        base = self._next
        self._next += -(-size // 256) * 256 + 256
        self._bases.append(base)
        self._blocks[base] = np.full(size, 0xCD, np.uint8) if block is None else block
        self.used += size
        return base

    def free(self, address: int) -> None:
        self.used -= self._blocks.pop(address).size
        self._bases.remove(address)

    def block(self, address: int) -> Array:
        """All memory that begins at an address."""
        return self._blocks[address]

    def view(self, address: int, size: int) -> Array:
        """u8[size] at an address."""
        at = bisect_right(self._bases, address) - 1
        base = self._bases[at] if at >= 0 else address
        start, block = address - base, self._blocks.get(base, np.empty(0, np.uint8))
        if at < 0 or start + size > block.size:
            raise Error(f"{size} bytes at {address:#x} are not allocated")
        return block[start : start + size]

    def array(self, address: int, shape: Sequence[int], dtype: Any) -> Array:
        """The same as an array of a numpy dtype, or of one of irc by its name."""
        kind = numpy_dtype(dtype) if isinstance(dtype, str) else np.dtype(dtype)
        size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        return self.view(address, size).view(kind).reshape(tuple(shape))

    def read(self, address: int, shape: Sequence[int], dtype: str) -> Array:
        return self.array(address, shape, dtype).copy()

    def write(self, address: int, array: Array, dtype: str) -> None:
        self.array(address, array.shape, dtype)[...] = array


@dataclass
class Graph:
    """Captured work."""

    work: list[Work]
    dropped: bool = False


STREAMS: dict[int, FakeStream] = {}


class FakeStream(CudaStream):
    """See CudaStream. `driver.calls` records the enqueued calls."""

    def __init__(self, driver: FakeDriver) -> None:
        self.driver, self.memory = driver, driver.memory
        self._queue: list[Work] = []
        self._captured: list[Work] | None = None
        self.handle = id(self)
        STREAMS[self.handle] = self

    def close(self) -> None:
        del STREAMS[self.handle]

    def enqueue(self, work: Work, *call: Any) -> None:
        """Append work; `call` is recorded."""
        (self._queue if self._captured is None else self._captured).append(work)
        self.driver.calls += [call] if call else []

    def upload(self, address: int, host: Array) -> None:
        assert host.flags.c_contiguous

        def work() -> None:
            self.memory.view(address, host.nbytes)[...] = host.reshape(-1).view(np.uint8)

        self.enqueue(work, "upload", address, host.nbytes)

    def download(self, host: Array, address: int) -> None:
        assert host.flags.c_contiguous

        def work() -> None:
            host.reshape(-1).view(np.uint8)[...] = self.memory.view(address, host.nbytes)

        self.enqueue(work, "download", address, host.nbytes)

    def copy(self, target: int, source: int, size: int) -> None:
        def work() -> None:
            self.memory.view(target, size)[...] = self.memory.view(source, size)

        self.enqueue(work, "copy", target, source, size)

    def event(self, inside: bool = False) -> FakeEvent:
        assert inside == (self._captured is not None), "inside: only while a graph is captured"
        event = FakeEvent(self)
        self.enqueue(event.reach)
        return event

    def is_done(self) -> bool:
        """Do the work, up to what waits for other ranks."""
        assert self._captured is None, "a wait within a capture"
        if self.driver.broken:
            raise Error(self.driver.broken)
        while self._queue and self._queue[0]() is not False:
            self._queue.pop(0)
        return not self._queue

    def wait(self, what: str = "the step") -> None:
        if self.driver.groups:
            wait(self, self.driver.groups, what, SOON)
        else:
            assert self.is_done()

    def until(self, event: FakeEvent) -> None:
        """Do the work up to an event."""
        if self.driver.broken:
            raise Error(self.driver.broken)
        while not event.reached:
            self._queue.pop(0)()

    def capture(self, work: Callable[[], None]) -> Graph:
        self._captured = []
        try:
            work()
            graph = Graph(self._captured)
        finally:
            self._captured = None
        self.driver.calls.append(("capture",))
        return graph

    def launch(self, graph: Graph) -> None:
        assert not graph.dropped
        self.driver.calls.append(("launch",))
        self._queue += graph.work

    def drop(self, graph: Graph) -> None:
        self.driver.calls.append(("drop",))
        graph.dropped = True


class FakeEvent(CudaEvent):
    """See CudaEvent."""

    def __init__(self, stream: FakeStream) -> None:
        self._stream, self.reached = stream, False

    def reach(self) -> None:
        self.reached = True

    def wait(self) -> None:
        if self._stream.driver.groups:
            wait(self, self._stream.driver.groups, "the step", SOON)
        else:
            self._stream.until(self)

    def is_done(self) -> bool:
        self._stream.is_done()
        return self.reached

    def ms_until(self, later: CudaEvent) -> float:
        """More on each next GPU."""
        return 1.0 + self._stream.driver.number


class FakeDriver(CudaDriver):
    """See CudaDriver. `broken`: the error of the GPU, if it has failed."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.gpu = Gpu("Fake 9000", 89, f"fake-{number}", 1 << 40)
        self.memory = Memory()
        self.calls: list[tuple[Any, ...]] = []
        self.groups: list[Group] = []
        self.broken = ""
        self.pins: list[weakref.ref[Array]] = []  # page-locked memory
        self._kept, self._kept_size, self._keeps = [], 0, True

    def _allocate(self, size: int) -> int:
        return self.memory.allocate(size)

    def free(self, address: int) -> None:
        self.memory.free(address)

    def share(self, address: int) -> bytes:
        handle = f"{self.number} {address}".encode()
        SHARED[handle] = self.memory.block(address)
        return handle

    def open_shared(self, handle: bytes) -> int:
        block = SHARED[handle]
        return self.memory.allocate(block.size, block)

    def close_shared(self, address: int) -> None:
        self.memory.free(address)

    def make_current(self) -> None:
        """Any thread may use it."""

    def _free_memory(self) -> int:
        return self.memory.total - self.memory.used

    def pinned(self, size: int) -> Array:
        memory = np.full(size, 0xAB, np.uint8)
        self.pins.append(weakref.ref(memory))
        return memory

    def zero(self, address: int, size: int, stream: int) -> None:
        def work() -> None:
            self.memory.view(address, size)[...] = 0

        STREAMS[stream].enqueue(work, "zero", address, size)

    def stream(self) -> FakeStream:
        return FakeStream(self)

    def add_rms_norm(
        self, dtype: str, weight_dtype: str, rows: int, columns: int, eps: float, offset: float
    ) -> Any:
        shape, kind = (rows, columns), numpy_dtype(dtype)

        def run(x: int, residual: int, weight: int, normed: int, total: int) -> None:
            places = (x, residual, normed, total)
            added, r, n, t = (self.memory.array(each, shape, dtype) for each in places)
            t[...] = (added.astype("f4") + r.astype("f4")).astype(kind)
            wide = t.astype("f4")
            scale = 1 / np.sqrt((wide * wide).mean(-1, keepdims=True) + eps)
            gain = self.memory.array(weight, (columns,), weight_dtype).astype("f4") + offset
            n[...] = (wide * scale * gain).astype(kind)

        def launch(*arguments: int) -> None:
            STREAMS[arguments[-1]].enqueue(lambda: run(*arguments[:-1]))

        return launch
