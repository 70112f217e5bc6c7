"""`Ref`: a weight reference, that is a source with steps; one class per kind of source."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from ..errors import Error
from ..ir.dims import Shape
from ..ir.dtypes import dtype as check_dtype
from ..ir.string_literals import quote
from ..ir.types import TensorType
from .steps import Cast, Step


@dataclass(frozen=True)
class Ref(ABC):
    """A source and the steps that follow it."""

    steps: tuple[Step, ...] = field(default=(), kw_only=True)

    def then(self, step: Step) -> Ref:
        """This reference with one more step."""
        return replace(self, steps=(*self.steps, step))

    def files(self) -> Iterator[str]:
        """The names of the files that are read, in order, with duplicates."""
        return (s.file for s in self.sources() if isinstance(s, (FileRef, BytesRef)))

    @property
    def inputs(self) -> tuple[Ref, ...]:
        """The references that this one joins or is computed from."""
        return ()

    def with_inputs(self, inputs: Sequence[Ref]) -> Ref:
        """This reference with other inputs."""
        return self

    def sources(self) -> Iterator[Ref]:
        """The sources of the inputs, or this reference if it has none."""
        if not self.inputs:
            yield self
        for each in self.inputs:
            yield from each.sources()

    def every_step(self) -> Iterator[Step]:
        """The steps of the inputs, then its own."""
        for each in self.inputs:
            yield from each.every_step()
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

    def source_text(self) -> str:
        return f"@{self.file}[{quote(self.key)}]"


@dataclass(frozen=True)
class BytesRef(Ref):
    """`bytes(@model, 4096, f32[8, 16])`: a row-major tensor at a byte offset of any file.

    A byte holds two elements of four bits, the first in its low half.
    """

    file: str
    offset: int
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        if self.offset < 0:
            raise Error(f"{self}: the offset must be at least 0")

    def source_text(self) -> str:
        return f"bytes(@{self.file}, {self.offset}, {TensorType(self.dtype, self.shape)})"


@dataclass(frozen=True)
class ConcatRef(Ref):
    """`concat(a, b; 0)`: references joined along one dimension."""

    parts: tuple[Ref, ...]
    dim: int

    @property
    def inputs(self) -> tuple[Ref, ...]:
        return self.parts

    def with_inputs(self, inputs: Sequence[Ref]) -> Ref:
        return replace(self, parts=tuple(inputs))

    def source_text(self) -> str:
        return f"concat({', '.join(map(str, self.parts))}; {self.dim})"


@dataclass(frozen=True)
class ZerosRef(Ref):
    """`zeros([64, 256], f32)`: zeros, for padded heads and rows."""

    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        check_dtype(self.dtype)

    def source_text(self) -> str:
        return f"zeros([{', '.join(map(str, self.shape))}], {self.dtype})"


@dataclass(frozen=True)
class RandomRef(Ref):
    """`random("layers.0.weight", 7, 0.02)`: normal numbers that depend on key and seed only.

    Without a `shape` it has that of the weight; with one, as in `random("k", 7, 0.02, [4, 8])`,
    it may also be sliced and joined.
    """

    key: str
    seed: int
    scale: float
    shape: tuple[int, ...] | None = None

    def source_text(self) -> str:
        return f"random({quote(self.key)}, {self.seed}, {self.scale!r}{_shape_text(self.shape)})"


@dataclass(frozen=True)
class UnboundRef(Ref):
    """`unbound("layers.0.weight")`: a parameter without a checkpoint.

    `shape` is needed where the reference is sliced or joined.
    """

    key: str
    shape: tuple[int, ...] | None = None

    def source_text(self) -> str:
        return f"unbound({quote(self.key)}{_shape_text(self.shape)})"


def _shape_text(shape: tuple[int, ...] | None) -> str:
    return "" if shape is None else f", [{', '.join(map(str, shape))}]"


def pinned(ref: Ref, shape: Shape, dtype: str) -> Ref:
    """`ref`, the reference of a weight of this shape and dtype, ready to be sliced and joined.

    An unbound or random reference without shape and steps gets the shape, and random numbers a
    cast to the dtype; any other reference is returned unchanged.
    """
    if not isinstance(ref, (RandomRef, UnboundRef)) or ref.shape is not None or ref.steps:
        return ref
    sizes = tuple(size for size in shape if isinstance(size, int))
    found = replace(ref, shape=sizes)
    return found.then(Cast(dtype)) if isinstance(found, RandomRef) else found
