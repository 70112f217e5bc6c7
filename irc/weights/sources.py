"""`Ref`: a weight reference, that is a source with steps; one class per kind of source."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar, TypeAlias

from ..errors import Error
from ..ir.dims import Shape
from ..ir.dtypes import dtype as check_dtype
from ..ir.mesh import Mesh
from ..ir.string_literals import quote
from ..ir.types import TensorType
from .declare import Along, Declared, Dtype, File, Sizes, TypeDtype, TypeShape, bracketed
from .steps import Cast, Shard, Step, Transpose, Unsqueeze


@dataclass(frozen=True)
class Ref(Declared, ABC):
    """A source and the steps that follow it. The arguments that are references are its inputs."""

    registry: ClassVar[dict[str, Any]] = {}
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
        return tuple([getattr(self, name) for name in _input_names(type(self))])

    def with_inputs(self, inputs: Sequence[Ref]) -> Ref:
        """This reference with other inputs."""
        names = _input_names(type(self))
        return replace(self, **dict(zip(names, inputs, strict=True))) if names else self

    def sources(self) -> Iterator[Ref]:
        """The sources of the inputs, or this reference if it has none."""
        if not self.inputs:
            yield self
        for part in self.inputs:
            yield from part.sources()

    def every_step(self) -> Iterator[Step]:
        """The steps of the inputs, then its own."""
        for part in self.inputs:
            yield from part.every_step()
        yield from self.steps

    def source_text(self) -> str:
        """The source without its steps."""
        return self.call_text()

    def __str__(self) -> str:
        return self.source_text() + "".join(map(str, self.steps))

    def source_shape(self, shapes: Sequence[Sizes]) -> Sizes | None:
        """The shape of the source, by those of the inputs; None if only its file states it."""
        return None

    def source_dtype(self, dtypes: Sequence[str | None]) -> str | None:
        """The dtype of the source, by those of the inputs; None where it is not known."""
        return None

    def input_ndims(self, ndim: int) -> Sequence[int]:
        """The number of dimensions of every input, for a source of `ndim`."""
        return [ndim] * len(self.inputs)

    def check(self, type: TensorType, mesh: Mesh) -> None:
        """An Error unless this is a reference of a weight of `type`, as far as no file tells."""
        for step in self.every_step():
            for axis in step.axes if isinstance(step, Shard) else ():
                if axis not in mesh.names:
                    raise Error(f"{step} names the axis {axis}, which the mesh ({mesh}) lacks")
        check_steps(self, type.ndim)
        shape, dtype = ref_shape(self, mesh), ref_dtype(self)
        shape, dtype = type.shape if shape is None else shape, dtype or type.dtype
        if (shape, dtype) != (type.shape, type.dtype):
            raise Error(f"{self} is {dtype}{bracketed(shape)}, but the weight is {type}")


@cache
def _input_names(kind: type[Ref]) -> tuple[str, ...]:
    """The arguments that are references."""
    return tuple(name for name, argument in kind.arguments.items() if argument is Ref)


@dataclass(frozen=True)
class FileRef(Ref):
    """`@ckpt["model.norm.weight"]`: a tensor of a checkpoint file."""

    file: str
    key: str

    def source_text(self) -> str:
        return f"@{self.file}[{quote(self.key)}]"


@dataclass(frozen=True)
class BytesRef(Ref, keyword="bytes"):
    """`bytes(@model, 4096, f32[8, 16])`: a row-major tensor at a byte offset of any file.

    A byte holds two elements of four bits, the first in its low half.
    """

    file: File
    offset: int
    dtype: TypeDtype
    shape: TypeShape

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        if self.offset < 0:
            raise Error(f"{self}: the offset must be at least 0")

    def source_shape(self, shapes: Sequence[Sizes]) -> Sizes:
        return self.shape

    def source_dtype(self, dtypes: Sequence[str | None]) -> str:
        return self.dtype


@dataclass(frozen=True)
class ConcatRef(Ref, keyword="concat"):
    """`concat(@ckpt["a"], @ckpt["b"]; 0)`: references joined along one dimension."""

    parts: tuple[Ref, ...]
    dim: Along

    @property
    def inputs(self) -> tuple[Ref, ...]:
        return self.parts

    def with_inputs(self, inputs: Sequence[Ref]) -> Ref:
        return replace(self, parts=tuple(inputs))

    def source_shape(self, shapes: Sequence[Sizes]) -> Sizes:
        dim = self.dim
        rest = {(len(shape), *shape[:dim], *shape[dim + 1 :]) for shape in shapes}
        if len(rest) != 1 or not 0 <= dim < len(shapes[0]):
            raise Error(f"{self} joins tensors of shapes {', '.join(map(str, shapes))}")
        return (*shapes[0][:dim], sum(shape[dim] for shape in shapes), *shapes[0][dim + 1 :])

    def source_dtype(self, dtypes: Sequence[str | None]) -> str | None:
        names = sorted({dtype or "" for dtype in dtypes})
        if len(names) > 1 and names[0]:
            raise Error(f"{self} joins {' and '.join(names)}; cast the parts to one dtype")
        return dtypes[0] if len(names) == 1 else None


@dataclass(frozen=True)
class ZerosRef(Ref, keyword="zeros"):
    """`zeros([64, 256], f32)`: zeros, for padded heads and rows."""

    shape: Sizes
    dtype: Dtype

    def __post_init__(self) -> None:
        check_dtype(self.dtype)

    def source_shape(self, shapes: Sequence[Sizes]) -> Sizes:
        return self.shape

    def source_dtype(self, dtypes: Sequence[str | None]) -> str:
        return self.dtype


@dataclass(frozen=True)
class RandomRef(Ref, keyword="random"):
    """`random("layers.0.weight", 7, 0.02)`: normal numbers that depend on key and seed only.

    Without a `shape` it has that of the weight; with one, as in `random("k", 7, 0.02, [4, 8])`,
    it may also be sliced and joined.
    """

    key: str
    seed: int
    scale: float
    shape: Sizes | None = None

    def source_shape(self, shapes: Sequence[Sizes]) -> Sizes | None:
        return self.shape


@dataclass(frozen=True)
class UnboundRef(Ref, keyword="unbound"):
    """`unbound("layers.0.weight")`: a parameter without a checkpoint.

    `shape` is needed where the reference is sliced or joined.
    """

    key: str
    shape: Sizes | None = None

    def source_shape(self, shapes: Sequence[Sizes]) -> Sizes | None:
        return self.shape


# (shape, dtype) of a source without inputs and steps; None where it is not known.
Known: TypeAlias = Callable[[Ref], tuple[Sizes | None, str | None]]


def stated(source: Ref) -> tuple[Sizes | None, str | None]:
    """(shape, dtype) that a source itself states; a tensor of a file states neither."""
    return source.source_shape(()), source.source_dtype(())


def check_steps(ref: Ref, ndim: int) -> None:
    """An Error where a step does not fit the dimensions of a reference of `ndim` at its end."""
    ndim -= sum(isinstance(step, Unsqueeze) for step in ref.steps)
    for part, part_ndim in zip(ref.inputs, ref.input_ndims(ndim), strict=True):
        check_steps(part, part_ndim)
    for step in ref.steps:
        _check_step(step, ndim)
        ndim += isinstance(step, Unsqueeze)


def _check_step(step: Step, ndim: int) -> None:
    if not step.fits(ndim):
        raise Error(f"{step} does not fit {ndim} dimensions, which are counted from 0")


def ref_shape(ref: Ref, mesh: Mesh, known: Known = stated) -> Sizes | None:
    """The shape after all steps, equal on every rank; None if it is not known.

    An Error names a step that does not fit, or parts that cannot be concatenated.
    """
    shapes = shapes_of(ref, mesh, known)
    return shapes[-1] if shapes else None


def shapes_of(ref: Ref, mesh: Mesh, known: Known = stated) -> list[Sizes]:
    """The shape of the source and after every step; none if it is not known."""
    inputs = [ref_shape(part, mesh, known) for part in ref.inputs]
    sizes = [shape for shape in inputs if shape is not None]
    if len(sizes) < len(inputs):
        return []
    shape = ref.source_shape(sizes) if sizes else known(ref)[0]
    if shape is None:
        return []
    shapes = [shape]
    for step in ref.steps:
        _check_step(step, len(shapes[-1]))
        shapes.append(step.result_shape(shapes[-1], mesh))
    return shapes


def ref_dtype(ref: Ref, known: Known = stated) -> str | None:
    """The dtype after all steps; None if it is not known."""
    for step in reversed(ref.steps):
        if isinstance(step, Cast):
            return step.dtype
    if not ref.inputs:
        return known(ref)[1]
    return ref.source_dtype([ref_dtype(part, known) for part in ref.inputs])


def shape_before(shape: Sequence[int], ref: Ref) -> Sizes | None:
    """The shape of the source, from `shape` after all steps; None if they slice or pad."""
    for step in reversed(ref.steps):
        if isinstance(step, Transpose) and step.fits(len(shape)):
            shape = [shape[step.order.index(i)] for i in range(len(shape))]
        elif not isinstance(step, Cast):
            return None
    return tuple(shape)


def with_shape(ref: Ref, shape: Shape, dtype: str) -> Ref:
    """`ref`, the reference of a weight of this shape and dtype, ready to be sliced and joined.

    An unbound or random reference without shape and steps gets the shape, and random numbers a
    cast to the dtype; any other reference is returned unchanged.
    """
    if not isinstance(ref, (RandomRef, UnboundRef)) or ref.shape is not None or ref.steps:
        return ref
    sizes = tuple(size for size in shape if isinstance(size, int))
    steps = (Cast(dtype),) if isinstance(ref, RandomRef) else ()
    return replace(ref, shape=sizes, steps=steps)
