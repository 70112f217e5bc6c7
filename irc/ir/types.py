"""Tensor types: dtype, shape and sharding in one interned value, so that equality is identity."""

from __future__ import annotations

from typing import TypeAlias
from weakref import WeakValueDictionary

from ..errors import Error
from .dims import LARGEST, Dim, Shape
from .dtypes import dtype as check_dtype

MOST_DIMS = 64  # as many as numpy has
Axes: TypeAlias = tuple[str, ...]  # the mesh axes that shard one dimension, slowest first
_Key: TypeAlias = "tuple[str, Shape, tuple[Axes, ...], Axes, Axes, TensorType | None]"


class TensorType:
    """`bf16[B, 4096@tp]{sum dp}`, or in the local view `bf16[B, 2048] of bf16[B, 4096@tp]`.

    `axes` has an entry per dimension: the mesh axes that shard it (`4096@cp.tp` is sharded over cp,
    each shard over tp). `partial` holds, sorted, the axes over which it is a partial sum: the
    value is the sum over the ranks of those axes. Over the axes of `varying`, slowest first, the
    ranks have values of their own, which are no parts of one global value, such as their number.

    A local type has a plain dtype and shape; `of` is the global type of the value that it is one
    rank's part of, and None where that is replicated.
    """

    __slots__ = (
        "__weakref__",
        "_text",
        "axes",
        "dtype",
        "of",
        "partial",
        "shape",
        "sharded",
        "varying",
    )
    dtype: str
    shape: Shape
    axes: tuple[Axes, ...]
    partial: Axes
    varying: Axes
    of: TensorType | None
    sharded: bool  # whether any axis shards it, is partial or varying

    def __new__(
        cls,
        dtype: str,
        shape: Shape,
        axes: tuple[Axes, ...] = (),
        partial: Axes = (),
        varying: Axes = (),
        of: TensorType | None = None,
    ) -> TensorType:
        axes = axes or ((),) * len(shape)
        key = (dtype, shape, axes, partial, varying, of)
        interned = _INTERNED.get(key)
        if interned is not None:
            return interned
        _check(dtype, shape, axes, (*partial, *varying))
        partial = tuple(sorted(partial))
        self = object.__new__(cls)
        self.dtype, self.shape, self.axes, self.of = dtype, shape, axes, of
        self.partial, self.varying = partial, varying
        self.sharded = bool(partial or varying) or any(axes)
        self._text = _render(self)
        # a partial sum written in another order is the same type
        return _INTERNED.setdefault((dtype, shape, axes, partial, varying, of), self)

    def __reduce__(self) -> tuple[type[TensorType], _Key]:
        return TensorType, (
            *(self.dtype, self.shape, self.axes, self.partial),
            *(self.varying, self.of),
        )

    def __repr__(self) -> str:
        return self._text

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def replace(
        self,
        dtype: str | None = None,
        shape: Shape | None = None,
        axes: tuple[Axes, ...] | None = None,
        partial: Axes | None = None,
        varying: Axes | None = None,
    ) -> TensorType:
        """This type with some fields changed; a local type of another shape is replicated."""
        of = self.of if shape is None else None
        return TensorType(
            self.dtype if dtype is None else dtype,
            self.shape if shape is None else shape,
            self.axes if axes is None else axes,
            self.partial if partial is None else partial,
            self.varying if varying is None else varying,
            of if of is None or dtype is None else of.replace(dtype=dtype),
        )

    @property
    def replicated(self) -> TensorType:
        """The same dtype and shape, the same on all ranks."""
        if self.sharded or self.of is not None:
            return TensorType(self.dtype, self.shape)
        return self

    @property
    def global_type(self) -> TensorType:
        """The global type: that of which a local type is a part, and any other itself."""
        return self if self.of is None else self.of

    def part_of(self, global_type: TensorType) -> TensorType:
        """The local type of this dtype and shape that is one rank's part of a global type."""
        return TensorType(self.dtype, self.shape, of=global_type if global_type.sharded else None)

    @property
    def spread(self) -> Axes:
        """The mesh axes over which ranks may have different values."""
        return (*(a for axes in self.axes for a in axes), *self.partial, *self.varying)


_INTERNED: WeakValueDictionary[_Key, TensorType] = WeakValueDictionary()


def _check(dtype: str, shape: Shape, axes: tuple[Axes, ...], others: Axes) -> None:
    check_dtype(dtype)
    if len(axes) != len(shape):
        raise Error(f"{len(shape)} dimensions but {len(axes)} entries of axes")
    if len(shape) > MOST_DIMS:
        raise Error(f"a type has {len(shape)} dimensions; expected at most {MOST_DIMS}")
    for dim in shape:
        if type(dim) is not int and not isinstance(dim, Dim):
            raise Error(f"a dimension is an int or a symbol, not {dim!r}")
        if isinstance(dim, int) and dim < 0:
            raise Error(f"a dimension cannot be negative, but this shape has {dim}")
        if isinstance(dim, int) and dim > LARGEST:
            raise Error(f"the dimension {dim} is too large; sizes have 63 bits")
        if isinstance(dim, Dim) and any(abs(n) > LARGEST for _, n in dim.terms):
            raise Error(f"the dimension {dim} is too large; sizes have 63 bits")
    used = [axis for group in axes for axis in group] + list(others)
    for axis in used:
        if used.count(axis) > 1:
            raise Error(
                f"mesh axis {axis!r} is used twice in one type; an axis shards one dimension"
            )


def _render(type: TensorType) -> str:
    dims = [
        f"{d}@{'.'.join(a)}" if a else str(d) for d, a in zip(type.shape, type.axes, strict=True)
    ]
    kinds = {"sum": type.partial, "varies": type.varying}
    notes = ", ".join(f"{kind} {' '.join(axes)}" for kind, axes in kinds.items() if axes)
    text = f"{type.dtype}[{', '.join(dims)}]" + (f"{{{notes}}}" if notes else "")
    if type.of is None:
        return text
    # what has no shards has one shape in both views
    return f"{text} of {type.of}" if any(type.of.axes) else repr(type.of)
