"""Weight references: which bytes of which checkpoint file, and the steps that make the tensor.

A reference is a source (a tensor in a file, a concatenation of references, seeded random numbers,
or nothing yet) followed by steps. It never holds the bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from .dims import Shape
from .dtypes import dtype as check_dtype
from .errors import Error
from .mesh import Mesh
from .strings import quote


@dataclass(frozen=True)
class Slice:
    """`[0:64, :]`: a range per dimension, None for a whole one."""

    ranges: tuple[tuple[int, int] | None, ...]

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
class Transpose:
    """`.transpose(1, 0)`: dimensions in another order."""

    order: tuple[int, ...]

    def __str__(self) -> str:
        return f".transpose({', '.join(map(str, self.order))})"


@dataclass(frozen=True)
class Cast:
    """`.cast(f32)`: converted element type."""

    dtype: str

    def __post_init__(self) -> None:
        check_dtype(self.dtype)

    def __str__(self) -> str:
        return f".cast({self.dtype})"


Step: TypeAlias = Slice | Shard | Transpose | Cast


@dataclass(frozen=True)
class Ref(ABC):
    """A source and the steps that follow it."""

    steps: tuple[Step, ...] = field(default=(), kw_only=True)

    def then(self, step: Step) -> Ref:
        """This reference followed by one more step."""
        return replace(self, steps=(*self.steps, step))

    def files(self) -> Iterator[str]:
        """The names of the files that are read, in order, with repetitions."""
        return iter(())

    def sources(self) -> Iterator[Ref]:
        """The references that this one is made of, itself where it joins none."""
        yield self

    def every_step(self) -> Iterator[Step]:
        """The steps of the references that this one joins, then its own."""
        yield from self.steps

    @abstractmethod
    def source_text(self) -> str:
        """The source without its steps."""

    def __str__(self) -> str:
        return self.source_text() + "".join(map(str, self.steps))


@dataclass(frozen=True)
class FileRef(Ref):
    """`@ckpt["model.norm.weight"]`: a tensor of a checkpoint file."""

    file: str
    key: str

    def files(self) -> Iterator[str]:
        yield self.file

    def source_text(self) -> str:
        return f"@{self.file}[{quote(self.key)}]"


@dataclass(frozen=True)
class ConcatRef(Ref):
    """`concat(a, b; 0)`: references joined along one dimension."""

    parts: tuple[Ref, ...]
    dim: int

    def files(self) -> Iterator[str]:
        for part in self.parts:
            yield from part.files()

    def sources(self) -> Iterator[Ref]:
        for part in self.parts:
            yield from part.sources()

    def every_step(self) -> Iterator[Step]:
        for part in self.parts:
            yield from part.every_step()
        yield from self.steps

    def source_text(self) -> str:
        return f"concat({', '.join(map(str, self.parts))}; {self.dim})"


@dataclass(frozen=True)
class RandomRef(Ref):
    """`random("layers.0.weight", 7, 0.02)`: normal numbers that depend on name and seed only.

    Without a `shape` it takes that of the weight; with one, as in `random("k", 7, 0.02, [4, 8])`,
    it may be cut and joined as well.
    """

    key: str
    seed: int
    scale: float
    shape: tuple[int, ...] | None = None

    def source_text(self) -> str:
        return f"random({quote(self.key)}, {self.seed}, {self.scale!r}{_shape_text(self.shape)})"


@dataclass(frozen=True)
class UnboundRef(Ref):
    """`unbound("layers.0.weight")`: a parameter that no checkpoint was given for yet.

    A `shape` is for the same as that of random numbers, which may take its place.
    """

    key: str
    shape: tuple[int, ...] | None = None

    def source_text(self) -> str:
        return f"unbound({quote(self.key)}{_shape_text(self.shape)})"


def _shape_text(shape: tuple[int, ...] | None) -> str:
    return "" if shape is None else f", [{', '.join(map(str, shape))}]"


def pinned(ref: Ref, shape: Shape, dtype: str) -> Ref:
    """`ref`, the reference of a weight of this shape and dtype, fit to be cut and joined.

    A parameter without values or random numbers, without a shape and steps of their own, get the
    shape, and the numbers the dtype; any other stays as it is.
    """
    if not isinstance(ref, (RandomRef, UnboundRef)) or ref.shape is not None or ref.steps:
        return ref
    sizes = tuple(size for size in shape if isinstance(size, int))
    found = replace(ref, shape=sizes)
    return found.then(Cast(dtype)) if isinstance(found, RandomRef) else found


def step_shape(shape: Shape, step: Step, mesh: Mesh, ref: Ref | None = None) -> Shape:
    """The shape after one step; an Error where the step does not fit."""
    match step:
        case Cast():
            return shape
        case Transpose(order):
            if sorted(order) != list(range(len(shape))):
                raise Error(f"{step} does not reorder the {len(shape)} dimensions of {ref}")
            return tuple(shape[i] for i in order)
        case Shard(dim, axes):
            if not 0 <= dim < len(shape):
                raise Error(f"{step} names a dimension that {ref} does not have")
            size, ways = shape[dim], mesh.ways(axes)
            if not isinstance(size, int):
                raise Error(f"{step} splits a dimension of unknown size")
            return (*shape[:dim], -(-size // ways), *shape[dim + 1 :])
        case Slice(ranges):
            return _sliced(shape, ranges, step)


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
