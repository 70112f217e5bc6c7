"""The `Driver` protocol: one GPU with its memory, streams, graphs and NCCL groups.

device.py implements it with cuda-python; tests/tensorrt/fake_gpu.py implements it in numpy.
Addresses and stream handles are integers. Work is enqueued on a stream and runs in order; only
methods that say so wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from .group import Group

Array: TypeAlias = np.ndarray[Any, Any]
Launch: TypeAlias = Callable[[int, int, int], None]  # source address, target address, stream
LaunchNorm: TypeAlias = Callable[[int, int, int, int, int], None]


@dataclass(frozen=True)
class Gpu:
    """A GPU: compute capability (89 for sm_89), UUID, and memory in bytes."""

    name: str
    capability: int
    uuid: str
    memory: int

    def __str__(self) -> str:
        return f"{self.name}, sm_{self.capability}"


class Event(Protocol):
    """A place in a stream."""

    def ms_until(self, later: Any) -> float:
        """Milliseconds from this event to a later one of the same GPU; both are done."""
        ...

    def is_done(self) -> bool:
        """Whether the stream has reached this place; an Error where the GPU has failed."""
        ...

    def wait(self) -> None:
        """Wait until the stream has reached this place."""
        ...


class Stream(Protocol):
    """A CUDA stream."""

    @property
    def handle(self) -> int:
        """The stream as other libraries take it."""
        ...

    def upload(self, address: int, host: Array) -> None:
        """Copy contiguous host memory to the GPU; it must not change until the copy is done."""
        ...

    def download(self, host: Array, address: int) -> None:
        """Copy from the GPU into contiguous host memory."""
        ...

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy bytes within the GPU."""
        ...

    def event(self) -> Event:
        """The place after everything enqueued so far."""
        ...

    def is_done(self) -> bool:
        """Whether everything enqueued is done; an Error where the GPU has failed."""
        ...

    def wait(self, what: str = "the step") -> None:
        """Wait until everything is done; a PeerError where a rank of a group of the driver is lost.

        `what` names the work in messages.
        """
        ...

    def capture(self, work: Callable[[], None]) -> Any:
        """A graph of what `work` enqueues here; an Error where something cannot be captured."""
        ...

    def launch(self, graph: Any) -> None:
        """Enqueue a graph."""
        ...

    def drop(self, graph: Any) -> None:
        """Destroy a graph."""
        ...


class Driver(Protocol):
    """One GPU, used by one thread. `groups`: those whose collectives may be on its streams."""

    groups: list[Group]

    @property
    def gpu(self) -> Gpu:
        """The GPU."""
        ...

    def allocate(self, size: int) -> int:
        """The address of new device memory, a multiple of 256; an Error if too little is free."""
        ...

    def free(self, address: int) -> None:
        """Free memory that `allocate` returned; waits for the GPU."""
        ...

    def share(self, address: int) -> bytes:
        """A handle by which another process of this host opens memory of `allocate`."""
        ...

    def open_shared(self, handle: bytes) -> int:
        """The address here of memory that another process shares, also of another GPU."""
        ...

    def close_shared(self, address: int) -> None:
        """Release memory that `open_shared` returned."""
        ...

    def free_memory(self) -> int:
        """The number of free bytes of the GPU."""
        ...

    def pinned(self, size: int) -> Array:
        """Page-locked host memory, u8[size]."""
        ...

    def zero(self, address: int, size: int, stream: int) -> None:
        """Enqueue filling bytes with zeros."""
        ...

    def add_rms_norm(
        self, dtype: str, weight_dtype: str, rows: int, columns: int, eps: float, offset: float
    ) -> LaunchNorm:
        """launch(total, residual, weight, normed, stream): see norm.py."""
        ...

    def stream(self) -> Stream:
        """A new stream."""
        ...
