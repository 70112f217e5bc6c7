"""Tensor types: dtype, shape and sharding in one interned value, so that equality is identity."""

from __future__ import annotations

from typing import TypeAlias
from weakref import WeakValueDictionary

from ..errors import Error
from .dims import LARGEST, Dim, Shape
from .dtypes import dtype as check_dtype

MOST_DIMS = 64  # as many as numpy has
Axes: TypeAlias = tuple[str, ...]  # the mesh axes that shard one dimension, slowest first
_Key: TypeAlias = tuple[str, Shape, tuple[Axes, ...], Axes]


class TensorType:
    """`bf16[B, S, 4096@tp]{sum tp}`.

    `axes` has an entry per dimension: the mesh axes that shard it (`4096@cp.tp` is sharded over cp,
    each shard over tp). `partial` holds, sorted, the axes over which it is a partial sum: the
    value is the sum over the ranks of those axes.
    """

    __slots__ = ("__weakref__", "_text", "axes", "dtype", "partial", "shape", "sharded")
    dtype: str
    shape: Shape
    axes: tuple[Axes, ...]
    partial: Axes
    sharded: bool  # whether any axis shards it or is partial

    def __new__(
        cls, dtype: str, shape: Shape, axes: tuple[Axes, ...] = (), partial: Axes = ()
    ) -> TensorType:
        axes = axes or ((),) * len(shape)
        key = (dtype, shape, axes, partial)
        known = _INTERNED.get(key)
        if known is not None:
            return known
        _check(dtype, shape, axes, partial)
        partial = tuple(sorted(partial))
        self = object.__new__(cls)
        self.dtype, self.shape, self.axes, self.partial = dtype, shape, axes, partial
        self.sharded = bool(partial) or any(axes)
        self._text = _render(dtype, shape, axes, partial)
        # a partial sum written in another order is the same type
        return _INTERNED.setdefault((dtype, shape, axes, partial), self)

    def __reduce__(self) -> tuple[type[TensorType], _Key]:
        return TensorType, (self.dtype, self.shape, self.axes, self.partial)

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
    ) -> TensorType:
        """This type with some fields changed."""
        return TensorType(
            self.dtype if dtype is None else dtype,
            self.shape if shape is None else shape,
            self.axes if axes is None else axes,
            self.partial if partial is None else partial,
        )

    @property
    def replicated(self) -> TensorType:
        """The same dtype and shape, neither sharded nor partial."""
        return TensorType(self.dtype, self.shape) if self.sharded else self


_INTERNED: WeakValueDictionary[_Key, TensorType] = WeakValueDictionary()


def _check(dtype: str, shape: Shape, axes: tuple[Axes, ...], partial: Axes) -> None:
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
    used = [axis for group in axes for axis in group] + list(partial)
    for axis in used:
        if used.count(axis) > 1:
            raise Error(
                f"mesh axis {axis!r} is used twice in one type; an axis shards one dimension"
            )


def _render(dtype: str, shape: Shape, axes: tuple[Axes, ...], partial: Axes) -> str:
    dims = [f"{d}@{'.'.join(a)}" if a else str(d) for d, a in zip(shape, axes, strict=True)]
    suffix = f"{{sum {' '.join(partial)}}}" if partial else ""
    return f"{dtype}[{', '.join(dims)}]{suffix}"
