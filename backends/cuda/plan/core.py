"""The parts of a plan: buffers, kernels, and the steps that run one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, TypeAlias

from irc.ir.dims import Dim
from irc.ir.dtypes import dtype

from .cost import NONE, Work

# arena: memory of a plan, shared by values that are not alive at the same time. All other places
# keep their addresses from step to step: arguments, results, states (which results overwrite),
# weights (also packed ones), memory of kernels that is zero before the first step, and what a rank
# knows of the memory of its group (execute/peers.py).
Place: TypeAlias = Literal["arena", "input", "output", "state", "weight", "zeros", "peers"]
Library: TypeAlias = Literal["cublaslt", "nccl", "memory"]
Settings: TypeAlias = Mapping[str, "int | float | str | tuple[int, ...]"]
ALIGNMENT = 256  # bytes, of every buffer
WARP = 32
MANY = 2**30  # elements, from which on indices have 64 bits: loops may count a little further
PEERS = 336  # bytes of a buffer at the place `peers`: see peer_memory.cuh


@dataclass(frozen=True)
class Buffer:
    """Device memory of one value: elements of `dtype` in row-major order, 4-bit ones in pairs.

    `offset` is in bytes from the start of the arena, of buffers there.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    place: Place
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return dtype(self.dtype).nbytes(prod(self.shape))


@dataclass(frozen=True)
class Argument:
    """A pointer argument of a launch, to the start of a buffer."""

    buffer: str
    written: bool = False


@dataclass(frozen=True)
class Kernel:
    """CUDA C++ source with one `extern "C"` kernel called `name`, after the prelude.

    `macros` are defined before the source. Sizes that are symbols are arguments, so that a kernel
    serves every plan of its function.
    """

    name: str
    source: str
    macros: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def text(self) -> str:
        """The source behind its macros."""
        return "".join(f"#define {k} {v}\n" for k, v in self.macros.items()) + self.source


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    `arguments` are pointers, then integers (`int`) and numbers (`float`), as the kernel declares
    them. `shared`: bytes of dynamic shared memory. `cluster`: blocks per cluster.
    `programmatic`: whether it may start before the kernel in front of it has ended, for which it
    then waits itself (programmatic dependent launch); `early`: positions of the pointers that it
    reads before it waits, to memory that no kernel writes during a step, but for rows of caches.
    `operations` are names of the IR values that it computes, `source` the line of the first.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: int
    arguments: tuple[Argument | int | float, ...]
    shared: int = 0
    cluster: int = 1
    early: tuple[int, ...] = ()
    programmatic: bool = False
    operations: tuple[str, ...] = ()
    source: str = ""
    work: Work = NONE


@dataclass(frozen=True)
class LibraryCall:
    """A call of a library; "memory" has the function `copy` (source, target).

    `settings` are what the function needs besides its pointers, in numbers and words.
    """

    library: Library
    function: str
    arguments: tuple[Argument, ...]
    settings: Settings = field(default_factory=dict[str, Any])
    operations: tuple[str, ...] = ()
    source: str = ""
    work: Work = NONE

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes of a collective."""
        return tuple(str(self.settings["axis"]).split("."))


Step: TypeAlias = Launch | LibraryCall


def pointers(step: Step) -> list[Argument]:
    """The arguments of a step that are memory."""
    return [argument for argument in step.arguments if isinstance(argument, Argument)]


@dataclass(frozen=True)
class Plan:
    """What one function runs at given sizes.

    `results` are the buffers of the function's results, in order; a result that overwrites a state
    is the buffer of that state. `candidates`: the names of kernels by what the choice depends on,
    see Regime.choose. `ranges`: the least and the largest number of every size within which the
    same steps run (None: without a limit).
    """

    function: str
    sizes: Mapping[str, int]
    buffers: Mapping[str, Buffer]
    kernels: Mapping[str, Kernel]
    steps: tuple[Step, ...]
    results: tuple[str, ...]
    candidates: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    ranges: Mapping[Dim, tuple[int, int | None]] = field(
        default_factory=dict[Dim, "tuple[int, int | None]"]
    )

    @property
    def arena(self) -> int:
        """Bytes of the arena."""
        ends = [b.offset + b.nbytes for b in self.buffers.values() if b.place == "arena"]
        return -(-max(ends, default=0) // ALIGNMENT) * ALIGNMENT
