"""Launches at any sizes: what the kernels of operations give, and the planner binds to sizes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

from irc.ir.core import Op, Value
from irc.ir.types import TensorType

from .core import Argument, Kernel, Launch, Library

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
    early. `tuning`: the other kernels that could compute it.
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
    zeros: tuple[TensorType, ...] = ()
    peers: str = ""
    tuning: Tuning | None = None

    def launch(self, kernel: str, pointers: Iterable[Argument], symbols: Sizes) -> Launch:
        """The launch at the sizes of all symbols; `kernel` is the name of the kernel in a plan."""
        return Launch(
            kernel,
            self.grid(symbols),
            self.block,
            (*pointers, *(symbols[name] for name in self.symbols)),
            self.shared(symbols),
            self.cluster,
            programmatic=self.waits,
        )


@dataclass(frozen=True)
class Tuning:
    """The kernels that `irc bench kernels` times for one launch; see tuning.py.

    `key`: what the choice depends on. `variants`: the launches by the name of the choice, first the
    one that rules give. `index`: what integers that the kernels read are to be, such as positions.
    """

    key: str
    variants: Callable[[], Mapping[str, Template]]
    index: int = 0


Settings: TypeAlias = Mapping[str, "int | float | str | tuple[int, ...]"]


@dataclass(frozen=True)
class CallTemplate:
    """One call of a library, before its sizes are known.

    Its pointers are `reads` and `writes`. `settings` are functions of the sizes.
    """

    in_place: ClassVar[Mapping[Value, Value]] = {}
    scratch: ClassVar[tuple[TensorType, ...]] = ()
    zeros: ClassVar[tuple[TensorType, ...]] = ()
    tuning: ClassVar[Tuning | None] = None
    peers: ClassVar[str] = ""

    library: Library
    function: str
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]
    settings: Callable[[Sizes], Settings]
    operations: tuple[Op, ...] = ()


AnyTemplate: TypeAlias = Template | CallTemplate


@dataclass(frozen=True)
class Fused:
    """Launches that compute several operations at once.

    `covers` are the operations that need no launches of their own any more: what uses a result of
    them is covered, too, or the launches write that result.
    """

    templates: tuple[AnyTemplate, ...]
    covers: tuple[Op, ...]


# Tries to fuse operations around one of its class, at given sizes: the launches, or why not, or
# None where there is nothing to say. The first that fits is taken.
Fusion: TypeAlias = Callable[[Any, Sizes], "Fused | str | None"]
FUSIONS: dict[type[Op], list[Fusion]] = {}


def fusion(*classes: type[Op], order: int = 0) -> Callable[[Fusion], Fusion]:
    """Register a fusion around operations of these classes.

    Those of a lower `order` are tried first, then those that were registered before.
    """

    def register(function: Fusion) -> Fusion:
        _ORDER[function] = order
        for cls in classes:
            rules = FUSIONS.setdefault(cls, [])
            rules.append(function)
            rules.sort(key=_ORDER.__getitem__)
        return function

    return register


_ORDER: dict[Fusion, int] = {}


# Makes the launches of one operation. `stored` are the values in memory; operands that are not
# among them are computed by their elements, inside the kernel (codegen/body.py).
Maker: TypeAlias = Callable[[Any, Collection[Value]], Sequence[AnyTemplate]]
KERNELS: dict[type[Op], Maker] = {}


def kernels_of(*classes: type[Op]) -> Callable[[Maker], Maker]:
    """Register the maker of the launches of operations."""

    def register(maker: Maker) -> Maker:
        for cls in classes:
            assert cls not in KERNELS, cls.opname
            KERNELS[cls] = maker
        return maker

    return register
