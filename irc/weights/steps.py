"""The steps of a weight reference: what is done to a tensor between its source and its use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from ..dims import Shape
from ..dtypes import dtype as check_dtype
from ..errors import Error
from ..mesh import Mesh

if TYPE_CHECKING:
    from .sources import Ref


@dataclass(frozen=True)
class Slice:
    """`[0:64, :]`: a range per dimension, None for a whole one."""

    ranges: tuple[tuple[int, int] | None, ...]

    def __post_init__(self) -> None:
        if any(part is not None and not 0 <= part[0] <= part[1] for part in self.ranges):
            raise Error(f"{self} is no slice; ranges are begin:end, counted from 0")

    def __str__(self) -> str:
        return f"[{', '.join(':' if r is None else f'{r[0]}:{r[1]}' for r in self.ranges)}]"


@dataclass(frozen=True)
class Shard:
    """`.shard(0, tp)`: this rank's part of one dimension; parts are ceil-sized, the last padded."""

    dim: int
    axes: tuple[str, ...]

    def __str__(self) -> str:
        return f".shard({self.dim}, {'.'.join(self.axes)})"


@dataclass(frozen=True)
class Deal:
    """`.deal(0, 4)`: a dimension dealt like cards to so many equal parts, each with zeros behind.

    Of n elements every part gets R = ceil(n / ways): element r*R + q was element q*ways + r. A
    `.shard(0, tp)` behind it leaves rank r with its elements r, r + ways, r + 2*ways, ...
    """

    dim: int
    ways: int

    def __post_init__(self) -> None:
        if self.ways < 1:
            raise Error(f"{self} deals to {self.ways} parts; there must be at least one")

    def __str__(self) -> str:
        return f".deal({self.dim}, {self.ways})"


@dataclass(frozen=True)
class Pad:
    """`.pad(0, 1)`: so many elements of zeros behind a dimension."""

    dim: int
    count: int

    def __post_init__(self) -> None:
        if self.count < 0:
            raise Error(f"{self} pads with {self.count} elements; use a slice to take some away")

    def __str__(self) -> str:
        return f".pad({self.dim}, {self.count})"


@dataclass(frozen=True)
class Transpose:
    """`.transpose(1, 0)`: dimensions in another order."""

    order: tuple[int, ...]

    def __str__(self) -> str:
        return f".transpose({', '.join(map(str, self.order))})"


@dataclass(frozen=True)
class Unsqueeze:
    """`.unsqueeze(0)`: a new dimension of size 1, along which references may be joined."""

    dim: int

    def __str__(self) -> str:
        return f".unsqueeze({self.dim})"


@dataclass(frozen=True)
class Cast:
    """`.cast(f32)`: converted element type."""

    dtype: str

    def __post_init__(self) -> None:
        check_dtype(self.dtype)

    def __str__(self) -> str:
        return f".cast({self.dtype})"


Step: TypeAlias = Slice | Shard | Deal | Pad | Transpose | Unsqueeze | Cast


def step_shape(shape: Shape, step: Step, mesh: Mesh, ref: Ref | None = None) -> Shape:
    """The shape after one step; an Error where the step does not fit."""
    match step:
        case Cast():
            return shape
        case Transpose(order):
            if sorted(order) != list(range(len(shape))):
                raise Error(f"{step} does not reorder the {len(shape)} dimensions of {ref}")
            return tuple(shape[i] for i in order)
        case Unsqueeze(dim):
            if not 0 <= dim <= len(shape):
                raise Error(f"{step} names a dimension that {ref} cannot have")
            return (*shape[:dim], 1, *shape[dim:])
        case Slice(ranges):
            return _sliced(shape, ranges, step)
        case Shard(dim) | Deal(dim) | Pad(dim):
            if not 0 <= dim < len(shape):
                raise Error(f"{step} names a dimension that {ref} does not have")
            size = shape[dim]
            if not isinstance(size, int):
                raise Error(f"{step} changes a dimension of unknown size")
            return (*shape[:dim], resized(size, step, mesh), *shape[dim + 1 :])


def resized(size: int, step: Shard | Deal | Pad, mesh: Mesh) -> int:
    """The size after a step of the dimension that it names."""
    match step:
        case Shard(_, axes):
            return -(-size // mesh.ways(axes))
        case Deal(_, ways):
            return -(-size // ways) * ways
        case Pad(_, count):
            return size + count


def _sliced(shape: Shape, ranges: tuple[tuple[int, int] | None, ...], step: Step) -> Shape:
    if len(ranges) != len(shape):
        raise Error(f"{step} has {len(ranges)} ranges for a tensor of {len(shape)} dimensions")
    sizes: list[int] = []
    for size, part in zip(shape, ranges, strict=True):
        if not isinstance(size, int):
            raise Error(f"{step} slices a dimension of unknown size")
        begin, end = part or (0, size)
        if not 0 <= begin <= end <= size:
            raise Error(f"{step} reaches outside a dimension of {size}")
        sizes.append(end - begin)
    return tuple(sizes)
