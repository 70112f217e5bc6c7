"""Launches at any sizes: what the kernels of operations give, and the planner binds to sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

from irc.ir.core import Op, Value
from irc.ir.types import TensorType

from .core import Kernel, Library, Settings
from .regime import Regime

Grid: TypeAlias = tuple[int, int, int]
Sizes: TypeAlias = Mapping[str, int]


@dataclass(frozen=True)
class Template:
    """One launch of a kernel, before its sizes are known.

    The kernel's arguments are pointers to `reads`, `writes`, `scratch`, `zeros` and, of a kernel
    that writes to other ranks along the mesh axes `peers`, to what is known of their memory; then
    the `symbols` as `int`. `scratch` is memory that only this launch needs; `zeros` is memory of
    its own, zero before the first step, which the kernel leaves zero. `in_place`: a written value
    -> the read value in whose memory it lies; the kernel writes the elements that change. `grid`
    and `shared` are functions of the sizes of all symbols. `waits`: whether the kernel calls
    `wait_for_previous` before it reads what kernels in front of it wrote, so that it may start
    early. `early`: what of `reads` it reads before that: values that no kernel writes during a
    step, or rows of a cache that earlier steps wrote.
    """

    kernel: Kernel
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]
    symbols: tuple[str, ...]
    grid: Callable[[Sizes], Grid]
    block: int = 256
    shared: Callable[[Sizes], int] = lambda sizes: 0
    cluster: int = 1
    scratch: tuple[TensorType, ...] = ()
    in_place: Mapping[Value, Value] = field(default_factory=dict[Value, Value])
    operations: tuple[Op, ...] = ()
    waits: bool = False
    early: tuple[Value, ...] = ()
    zeros: tuple[TensorType, ...] = ()
    peers: str = ""


@dataclass(frozen=True)
class CallTemplate:
    """One call of a library, before its sizes are known.

    Its pointers are `reads` and `writes`. `settings` are functions of the sizes.
    """

    in_place: ClassVar[Mapping[Value, Value]] = {}
    scratch: ClassVar[tuple[TensorType, ...]] = ()
    zeros: ClassVar[tuple[TensorType, ...]] = ()
    peers: ClassVar[str] = ""

    library: Library
    function: str
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]
    settings: Callable[[Sizes], Settings]
    operations: tuple[Op, ...] = ()


AnyTemplate: TypeAlias = Template | CallTemplate


# Makes the launches of one operation from operands in memory: the launches, or why not, or None
# where there is nothing to say. The first that fits is taken.
Launcher: TypeAlias = Callable[[Any, Regime], "Sequence[AnyTemplate] | str | None"]
LAUNCHES: dict[type[Op], list[Launcher]] = {}


def launches_of(*classes: type[Op], order: int = 0) -> Callable[[Launcher], Launcher]:
    """Register a maker of launches that read operands from memory, or what these are made of by
    dequantize and layout operations.

    Those of a lower `order` are asked first. A composite operation that none takes is expanded.
    """

    def register(maker: Launcher) -> Launcher:
        _ORDERS[maker] = order
        for cls in classes:
            makers = LAUNCHES.setdefault(cls, [])
            makers.append(maker)
            makers.sort(key=_ORDERS.__getitem__)
        return maker

    return register


_ORDERS: dict[Launcher, int] = {}


# Makes the launches of one operation, where `stored` of the regime are the values in memory.
Maker: TypeAlias = Callable[[Any, Regime], Sequence[AnyTemplate]]
KERNELS: dict[type[Op], Maker] = {}


def kernels_of(*classes: type[Op]) -> Callable[[Maker], Maker]:
    """Register the maker of launches that may compute operands inside their kernels."""

    def register(maker: Maker) -> Maker:
        for cls in classes:
            assert cls not in KERNELS, cls.opname
            KERNELS[cls] = maker
        return maker

    return register
