"""The steps of a weight reference: transformations between the source and the weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from ..errors import Error
from ..ir.dtypes import dtype as check_dtype
from ..ir.mesh import MOST_RANKS, Mesh
from .declare import Axes, Declared, Dtype, Order, Sizes, bracketed


class StepBase(Declared, ABC):
    """A transformation of a tensor, written `.keyword(arguments)`."""

    registry: ClassVar[dict[str, Any]] = {}

    @abstractmethod
    def fits(self, ndim: int) -> bool:
        """Whether the step is one of a tensor of `ndim` dimensions."""

    @abstractmethod
    def result_shape(self, shape: Sizes, mesh: Mesh) -> Sizes:
        """The shape after the step, which fits the number of dimensions of `shape`."""

    def __str__(self) -> str:
        return f".{self.call_text()}"


class _Resize(StepBase):
    """A step that changes the size of the dimension `dim`."""

    dim: int

    @abstractmethod
    def resized(self, size: int, mesh: Mesh) -> int:
        """The size after the step."""

    def fits(self, ndim: int) -> bool:
        return 0 <= self.dim < ndim

    def result_shape(self, shape: Sizes, mesh: Mesh) -> Sizes:
        size = self.resized(shape[self.dim], mesh)
        return (*shape[: self.dim], size, *shape[self.dim + 1 :])


@dataclass(frozen=True)
class Slice(StepBase):
    """`[0:64, :]`: a range per dimension; None is all of it."""

    ranges: tuple[tuple[int, int] | None, ...]

    def __post_init__(self) -> None:
        if any(part is not None and not 0 <= part[0] <= part[1] for part in self.ranges):
            raise Error(f"{self} is not a valid slice; ranges are begin:end, counted from 0")

    def __str__(self) -> str:
        return bracketed(":" if part is None else f"{part[0]}:{part[1]}" for part in self.ranges)

    def fits(self, ndim: int) -> bool:
        return len(self.ranges) == ndim

    def result_shape(self, shape: Sizes, mesh: Mesh) -> Sizes:
        parts = [part or (0, size) for size, part in zip(shape, self.ranges, strict=True)]
        for size, (_, end) in zip(shape, parts, strict=True):
            if end > size:
                raise Error(f"{self} reaches outside a dimension of {size}")
        return tuple(end - begin for begin, end in parts)


@dataclass(frozen=True)
class Shard(_Resize, keyword="shard"):
    """`.shard(0, tp)`: this rank's shard of a dimension, of ceil(n / N) elements, zero-padded."""

    dim: int
    axes: Axes

    def resized(self, size: int, mesh: Mesh) -> int:
        return -(-size // mesh.group_size(self.axes))


@dataclass(frozen=True)
class Cyclic(_Resize, keyword="cyclic"):
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

    def resized(self, size: int, mesh: Mesh) -> int:
        return -(-size // self.group_size) * self.group_size


@dataclass(frozen=True)
class Pad(_Resize, keyword="pad"):
    """`.pad(0, 1)`: zeros appended to a dimension, `count` elements of it."""

    dim: int
    count: int

    def __post_init__(self) -> None:
        if self.count < 0:
            raise Error(f"{self}: expected a count of at least 0; a slice removes elements")

    def resized(self, size: int, mesh: Mesh) -> int:
        return size + self.count


@dataclass(frozen=True)
class Transpose(StepBase, keyword="transpose"):
    """`.transpose(1, 0)`: dimensions in another order."""

    order: Order

    def fits(self, ndim: int) -> bool:
        return sorted(self.order) == list(range(ndim))

    def result_shape(self, shape: Sizes, mesh: Mesh) -> Sizes:
        return tuple(shape[i] for i in self.order)


@dataclass(frozen=True)
class Unsqueeze(StepBase, keyword="unsqueeze"):
    """`.unsqueeze(0)`: a new dimension of size 1, along which references may be joined."""

    dim: int

    def fits(self, ndim: int) -> bool:
        return 0 <= self.dim <= ndim

    def result_shape(self, shape: Sizes, mesh: Mesh) -> Sizes:
        return (*shape[: self.dim], 1, *shape[self.dim :])


@dataclass(frozen=True)
class Cast(StepBase, keyword="cast"):
    """`.cast(f32)`: conversion to another dtype."""

    dtype: Dtype

    def __post_init__(self) -> None:
        check_dtype(self.dtype)

    def fits(self, ndim: int) -> bool:
        return True

    def result_shape(self, shape: Sizes, mesh: Mesh) -> Sizes:
        return shape


Step: TypeAlias = Slice | Shard | Cyclic | Pad | Transpose | Unsqueeze | Cast
