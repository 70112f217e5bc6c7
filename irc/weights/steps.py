"""The steps of a weight reference: transformations between the source and the weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from ..errors import Error
from ..ir.dims import Shape
from ..ir.dtypes import dtype as check_dtype
from ..ir.mesh import MOST_RANKS, Mesh

if TYPE_CHECKING:
    from .sources import Ref


@dataclass(frozen=True)
class Slice:
    """`[0:64, :]`: a range per dimension; None is all of it."""

    ranges: tuple[tuple[int, int] | None, ...]

    def __post_init__(self) -> None:
        if any(part is not None and not 0 <= part[0] <= part[1] for part in self.ranges):
            raise Error(f"{self} is no slice; ranges are begin:end, counted from 0")

    def __str__(self) -> str:
        return f"[{', '.join(':' if r is None else f'{r[0]}:{r[1]}' for r in self.ranges)}]"


@dataclass(frozen=True)
class Shard:
    """`.shard(0, tp)`: this rank's shard of a dimension, of ceil(n / N) elements, zero-padded."""

    dim: int
    axes: tuple[str, ...]

    def __str__(self) -> str:
        return f".shard({self.dim}, {'.'.join(self.axes)})"


@dataclass(frozen=True)
class Cyclic:
    """`.cyclic(0, 4)`: a cyclic distribution of a dimension over equal parts, each zero-padded.

    A part has R = ceil(n / group_size) of the n elements: element r*R + q of the result is element
    q*group_size + r. A following `.shard(0, tp)` leaves rank r the elements r, r + group_size, ...
    """

    dim: int
    group_size: int

    def __post_init__(self) -> None:
        if not 1 <= self.group_size <= MOST_RANKS:
            raise Error(
                f"{self} distributes over {self.group_size} parts; expected 1 to {MOST_RANKS}"
            )

    def __str__(self) -> str:
        return f".cyclic({self.dim}, {self.group_size})"


@dataclass(frozen=True)
class Pad:
    """`.pad(0, 1)`: zeros appended to a dimension, `count` elements of it."""

    dim: int
    count: int

    def __post_init__(self) -> None:
        if self.count < 0:
            raise Error(f"{self}: expected a count of at least 0; a slice removes elements")

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
    """`.cast(f32)`: conversion to another dtype."""

    dtype: str

    def __post_init__(self) -> None:
        check_dtype(self.dtype)

    def __str__(self) -> str:
        return f".cast({self.dtype})"


Step: TypeAlias = Slice | Shard | Cyclic | Pad | Transpose | Unsqueeze | Cast


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
        case Shard(dim) | Cyclic(dim) | Pad(dim):
            if not 0 <= dim < len(shape):
                raise Error(f"{step} names a dimension that {ref} does not have")
            size = shape[dim]
            if not isinstance(size, int):
                raise Error(f"{step} changes a dimension of unknown size")
            return (*shape[:dim], _resized(size, step, mesh), *shape[dim + 1 :])


def _resized(size: int, step: Shard | Cyclic | Pad, mesh: Mesh) -> int:
    match step:
        case Shard(_, axes):
            return -(-size // mesh.group_size(axes))
        case Cyclic(_, group_size):
            return -(-size // group_size) * group_size
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
