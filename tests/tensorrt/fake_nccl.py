"""GPUs and NCCL played by numpy: streams are queues, pointers are host memory, ranks are threads.

A collective on a stream runs once the streams of all ranks have come to it, and until then its
stream is not ready, as on GPUs. A communicator that is aborted lets its stream go on.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from irc.errors import Error

NUMPY = {
    0: np.int8,
    1: np.uint8,
    2: np.int32,
    4: np.int64,
    6: np.float16,
    7: np.float32,
    8: np.float64,
    9: ml_dtypes.bfloat16,
}
REDUCE = {0: np.add, 1: np.multiply, 2: np.maximum, 3: np.minimum}


def view(pointer: int, count: int, dtype: Any) -> np.ndarray:
    """The memory at a pointer as an array."""
    size = count * np.dtype(dtype).itemsize
    buffer = memoryview((ctypes.c_char * size).from_address(pointer) if size else b"")
    return np.frombuffer(buffer, dtype, count)


@dataclass
class Comm:
    """One rank's communicator."""

    name: bytes
    rank: int
    ranks: int
    handle: int
    state: int = 7
    aborted: bool = False


@dataclass
class Call:
    """One rank's part in a collective."""

    kind: str
    comm: Comm
    source: int
    target: int
    numbers: tuple[int, ...]


@dataclass
class FakeGpu:
    """All GPUs of the process, and the NCCL library that joins them."""

    timeout: float = 100.0
    calls: list[str] = field(default_factory=list)
    lock: Any = field(default_factory=threading.RLock)
    streams: dict[int, list[Any]] = field(default_factory=dict)
    worlds: dict[bytes, dict[int, Comm]] = field(default_factory=dict)
    memory: dict[int, Any] = field(default_factory=dict)
    counter: Any = field(default_factory=lambda: itertools.count(1000))
    capturing: Any = field(default_factory=threading.local)
    refuse: dict[str, str] = field(default_factory=dict)

    # What plays nccl.bindings.nccl

    def Config(self) -> Any:
        return SimpleNamespace(blocking=1, ptr=0)

    def comm_init_rank_scalable(
        self, ranks: int, rank: int, ids: int, name: Any, config: int
    ) -> Comm:
        with self.lock:
            comm = Comm(bytes(name), rank, ranks, next(self.counter))
            world = self.worlds.setdefault(bytes(name), {})
            world[rank] = comm
            if len(world) == ranks and {each.ranks for each in world.values()} == {ranks}:
                for each in world.values():
                    each.state = 0
            return comm

    def comm_get_async_error(self, comm: Comm) -> int:
        return comm.state

    def comm_abort(self, comm: Comm) -> None:
        with self.lock:
            comm.aborted = True
            self.calls.append(f"abort {comm.rank}")
            for queue in self.streams.values():
                queue[:] = [op for op in queue if getattr(op, "comm", None) is not comm]
            self.pump()

    def comm_finalize(self, comm: Comm) -> None:
        self.calls.append(f"finalize {comm.rank}")

    def comm_destroy(self, comm: Comm) -> None:
        self.calls.append(f"destroy {comm.rank}")

    def get_error_string(self, status: int) -> str:
        return f"result {status}"

    def get_last_error(self, comm: Comm) -> str:
        return "the fake says so"

    def __getattr__(self, kind: str) -> Callable[..., None]:
        known = ("all_reduce", "all_gather", "reduce_scatter", "allto_all", "broadcast")
        if kind not in (*known, "reduce", "gather", "scatter"):
            raise AttributeError(kind)

        def post(source: int, target: int, *rest: Any) -> None:
            *numbers, comm, stream = rest
            if kind in self.refuse:
                raise RuntimeError(self.refuse[kind])
            self.put(stream, Call(kind, comm, source, target, tuple(numbers)))

        return post

    # What streams do

    def put(self, stream: int, op: Any) -> None:
        """Add to a stream, or to the graph that is captured from it."""
        recording = getattr(self.capturing, "ops", None)
        if recording is not None:
            recording.append(op)
            return
        with self.lock:
            self.streams[stream].append(op)
            self.pump()

    def pump(self) -> None:
        """Do all that can be done."""
        with self.lock:
            while any(self._advance(queue) for queue in self.streams.values()):
                continue

    def _advance(self, queue: list[Any]) -> bool:
        if not queue:
            return False
        op = queue[0]
        if not isinstance(op, Call):
            op()
            queue.pop(0)
            return True
        heads = [q for q in self.streams.values() if q and isinstance(q[0], Call)]
        mine = {q[0].comm.rank: q for q in heads if q[0].comm.name == op.comm.name}
        if len(mine) < op.comm.ranks:
            return False
        perform([mine[rank][0] for rank in range(op.comm.ranks)])
        for each in mine.values():
            each.pop(0)
        return True


class FakeDriver:
    """One rank's Driver."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.broken = ""

    def allocate(self, nbytes: int) -> int:
        buffer = ctypes.create_string_buffer(nbytes + 64)
        pointer = -(-ctypes.addressof(buffer) // 64) * 64
        self.gpu.memory[pointer] = buffer
        return pointer

    def free(self, pointer: int) -> None:
        del self.gpu.memory[pointer]

    def write(self, pointer: int, data: bytes, stream: int) -> None:
        self.gpu.put(stream, lambda: ctypes.memmove(pointer, data, len(data)))

    def read(self, pointer: int, nbytes: int, stream: int) -> bytes:
        deadline = time.monotonic() + self.gpu.timeout
        while not self.ready(stream):
            assert time.monotonic() < deadline, "the stream hangs"
            time.sleep(1e-4)
        return ctypes.string_at(pointer, nbytes)

    def zero(self, pointer: int, nbytes: int, stream: int) -> None:
        self.gpu.put(stream, lambda: ctypes.memset(pointer, 0, nbytes))

    def open_stream(self) -> int:
        with self.gpu.lock:
            stream = next(self.gpu.counter)
            self.gpu.streams[stream] = []
            return stream

    def close_stream(self, stream: int) -> None:
        with self.gpu.lock:
            del self.gpu.streams[stream]

    def ready(self, stream: int) -> bool:
        if self.broken:
            raise Error(self.broken)
        with self.gpu.lock:
            self.gpu.pump()
            return not self.gpu.streams[stream]

    def add_rms_norm(
        self, dtype: str, weight_dtype: str, rows: int, columns: int, eps: float, offset: float
    ) -> Any:
        from irc.dtypes import numpy_dtype

        kind, gain = numpy_dtype(dtype), numpy_dtype(weight_dtype)

        def run(total: int, residual: int, weight: int, normed: int) -> None:
            size = rows * columns
            t, r, n = (view(p, size, kind) for p in (total, residual, normed))
            t[:] = (t.astype("f4") + r.astype("f4")).astype(kind)
            wide = t.astype("f4").reshape(rows, columns)
            scale = 1 / np.sqrt((wide * wide).mean(-1, keepdims=True) + eps)
            gains = view(weight, columns, gain).astype("f4") + offset
            n[:] = (wide * scale * gains).astype(kind).reshape(-1)

        def launch(total: int, residual: int, weight: int, normed: int, stream: int) -> None:
            self.gpu.put(stream, lambda: run(total, residual, weight, normed))

        return launch

    @contextmanager
    def capture(self, stream: int) -> Any:
        """Inside, what is put on the stream by this thread becomes a graph, a list."""
        ops: list[Any] = []
        self.gpu.capturing.ops = ops
        try:
            yield ops
        finally:
            self.gpu.capturing.ops = None

    def launch(self, graph: Any, stream: int) -> None:
        """Put a graph on a stream."""
        for op in graph:
            self.gpu.put(stream, op)


def perform(calls: list[Call]) -> None:
    """A collective, from the calls of all ranks in order."""
    first, ways = calls[0], len(calls)
    assert {(call.kind, call.numbers) for call in calls} == {(first.kind, first.numbers)}
    count, kind = first.numbers[0], NUMPY[first.numbers[1]]
    given = {"reduce_scatter": ways, "allto_all": ways, "scatter": ways}.get(first.kind, 1)
    x = [view(call.source, count * given, kind).copy() for call in calls]
    results = results_of(first, x, ways)
    for call, result in zip(calls, results, strict=True):
        if result is not None:
            view(call.target, result.size, kind)[:] = result


def results_of(call: Call, x: list[np.ndarray], ways: int) -> list[np.ndarray | None]:
    """Each rank's result; None where NCCL leaves the target alone."""
    root = call.numbers[-1]
    if call.kind in ("all_reduce", "reduce_scatter", "reduce"):
        whole = x[0]
        for each in x[1:]:
            whole = REDUCE[call.numbers[2]](whole, each)
        if call.kind == "reduce_scatter":
            return list(np.split(whole, ways))
        return [whole if call.kind == "all_reduce" or r == root else None for r in range(ways)]
    match call.kind:
        case "all_gather":
            return [np.concatenate(x)] * ways
        case "gather":
            return [np.concatenate(x) if r == root else None for r in range(ways)]
        case "broadcast":
            return [x[root]] * ways
        case "scatter":
            return list(np.split(x[root], ways))
        case _:
            parts = [np.split(each, ways) for each in x]
            return [np.concatenate(arrived) for arrived in zip(*parts, strict=True)]
