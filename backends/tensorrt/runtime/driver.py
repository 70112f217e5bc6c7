"""What the runtime asks of a GPU, its libraries, and the other GPUs of a run.

gpu.py does it with cuda-python, TensorRT and NCCL; tests/tensorrt has one that keeps record and
computes with numpy. Addresses are numbers. Nothing here waits but what says so: work is enqueued on
a stream, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]
Shape: TypeAlias = tuple[int, ...]
Launch: TypeAlias = Callable[[int, int, int], None]  # source, target, stream


@dataclass(frozen=True)
class Gpu:
    """A GPU: its name, compute capability (89 for sm_89), and what no other GPU has, on any host.

    `memory`: bytes in all.
    """

    name: str
    capability: int
    identity: str
    memory: int

    def __str__(self) -> str:
        return f"{self.name}, sm_{self.capability}"


@dataclass(frozen=True)
class Tensor:
    """An input or output of an engine; a dimension that a run decides is -1."""

    name: str
    dtype: str
    shape: Shape
    output: bool


class Event(Protocol):
    """A place in a stream."""

    def wait(self) -> None:
        """Wait until the stream has come so far."""
        ...


class Stream(Protocol):
    """Work on the GPU, in order."""

    @property
    def handle(self) -> int:
        """What other libraries call it by."""
        ...

    def upload(self, address: int, host: Array) -> None:
        """Copy contiguous host memory to the GPU; it must stay as it is until that has happened."""
        ...

    def download(self, host: Array, address: int) -> None:
        """Copy from the GPU into contiguous host memory."""
        ...

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy bytes from one place of the GPU to another."""
        ...

    def zero(self, address: int, size: int) -> None:
        """Fill bytes with zeros."""
        ...

    def event(self) -> Event:
        """The place after everything enqueued so far."""
        ...

    def wait(self) -> None:
        """Wait until everything is done."""
        ...

    def capture(self, work: Callable[[], None]) -> Any:
        """What `work` enqueues here, as a graph; an Error where something cannot be captured."""
        ...

    def launch(self, graph: Any) -> None:
        """Enqueue a graph."""
        ...

    def drop(self, graph: Any) -> None:
        """Give up a graph."""
        ...


class Group(Protocol):
    """One rank's side of a group of GPUs."""

    rank: int
    ranks: int

    def bind(
        self, operation: str, dtype: str, elements: int, reduce_op: str = "none", root: int = -1
    ) -> Launch:
        """What enqueues a collective; `elements` of the operand of one rank."""
        ...

    def send(self, address: int, size: int, to: int, stream: int) -> None:
        """Enqueue sending bytes to a rank of the group."""
        ...

    def receive(self, address: int, size: int, source: int, stream: int) -> None:
        """Enqueue receiving bytes from a rank of the group."""
        ...

    def abort(self) -> None:
        """Give up at once, also what is under way; any thread may say so."""
        ...

    def close(self) -> None:
        """Give up; every rank calls it."""
        ...


class Context(Protocol):
    """An engine with memory for its activations, under one profile."""

    def bind(self, group: Group) -> bool:
        """Let the engine's own collectives use a group; whether the library could.

        Every rank of the group calls it, and waits for the others.
        """
        ...

    def set_shape(self, name: str, shape: Shape) -> bool:
        """The shape of an input; whether the profile takes it."""
        ...

    def set_address(self, name: str, address: int) -> None:
        """Where an input or output lies."""
        ...

    def shape(self, name: str) -> Shape:
        """The shape of a tensor, once those of all inputs are set."""
        ...

    def capturable(self, stream: Stream) -> bool:
        """Whether an enqueue may be captured in a graph now."""
        ...

    def enqueue(self, stream: Stream) -> None:
        """Run once; an Error with what the library says."""
        ...


class Engine(Protocol):
    """A deserialized engine."""

    tensors: Mapping[str, Tensor]
    profiles: int

    def aliased(self, output: str) -> str | None:
        """The input that an output must share its memory with."""
        ...

    def context(self, profile: int, stream: Stream) -> Context:
        """A context under a profile."""
        ...


class Driver(Protocol):
    """One GPU, used by one thread, and the libraries that drive it."""

    gpu: Gpu
    library: tuple[int, ...]
    """The version of TensorRT or TensorRT-RTX, as in (1, 7, 1, 116)."""

    def allocate(self, size: int) -> int:
        """The address of new memory on the GPU, a multiple of 256; an Error where none is left."""
        ...

    def free(self, address: int) -> None:
        """Give memory back that `allocate` gave."""
        ...

    def free_memory(self) -> int:
        """How many bytes of the GPU nobody uses."""
        ...

    def pinned(self, size: int) -> Array:
        """Host memory of so many bytes that copies run fast from; it lives as long as the driver
        or the array."""
        ...

    def stream(self) -> Stream:
        """A new stream."""
        ...

    def engine(self, path: Path) -> Engine:
        """The engine in a file; an Error with what the library says."""
        ...

    def group_name(self) -> bytes:
        """A name for a new group: one rank makes it, and all of the group use it."""
        ...

    def group(self, name: bytes, rank: int, ranks: int, label: str) -> Group:
        """This GPU's side of a group; every rank makes its own at once, and waits for the others.

        `label` says in errors which group it is.
        """
        ...

    def register(self, key: str, rank: int, group: Group) -> None:
        """Let plugins that name the group `key` find it; `rank` is the number in the run."""
        ...

    def close(self) -> None:
        """Give up what is held."""
        ...


Drivers: TypeAlias = Callable[[int], Driver]  # from the number of the rank on its host
