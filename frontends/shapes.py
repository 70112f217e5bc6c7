"""Shapes and indices as scripts write them: symbol names, -1, numpy indexing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, cast

from ..errors import Error
from ..ir.dims import Dim, DimLike, Shape, exact_divide, product
from ..text.literals import parse_dim


def as_dim(size: Any) -> DimLike:
    """A size: an int, a Dim, or the text of one, such as "S" or "2*S"."""
    if isinstance(size, str):
        return parse_dim(size)
    if isinstance(size, Dim):
        return size
    if isinstance(size, bool) or not hasattr(size, "__index__"):
        raise Error(f"a size is an int or the name of a symbol, not {size!r}")
    return int(size.__index__())


def as_shape(sizes: Sequence[Any]) -> Shape:
    """A shape; `((2, 3),)` means `(2, 3)`."""
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = cast("Sequence[Any]", sizes[0])
    return tuple(as_dim(size) for size in sizes)


def inferred_shape(old: Shape, sizes: Sequence[Any]) -> Shape:
    """The shape `sizes` for the elements of `old`; one size may be -1."""
    shape = as_shape(sizes)
    inferred = [i for i, size in enumerate(shape) if size == -1]
    if not inferred:
        return shape
    if len(inferred) > 1:
        raise Error(f"reshape: only one size may be -1, not {len(inferred)}")
    left, given = [*old], [size for size in shape if size != -1]
    for size in [*given]:
        if size in left:  # also sums, which nothing else can be divided by
            left.remove(size)
            given.remove(size)
    size = exact_divide(product(tuple(left)), product(tuple(given)))
    if size is None:
        raise Error(
            f"reshape: the elements of [{', '.join(map(str, old))}] do not fill "
            f"[{', '.join(map(str, shape))}] for every size; write the sizes out"
        )
    return tuple(size if i == inferred[0] else other for i, other in enumerate(shape))


def split_sizes(shape: Shape, sizes: int | Sequence[int], dim: int) -> tuple[int, ...]:
    """The sizes of the pieces of dimension `dim`; a single size stands for equal pieces."""
    if not isinstance(sizes, int):
        return tuple(sizes)
    if not -len(shape) <= dim < len(shape):
        raise Error(f"split: there is no dimension {dim} in [{', '.join(map(str, shape))}]")
    total = shape[dim]
    if not isinstance(total, int):
        raise Error(f"split: dimension {dim} is {total}; give the sizes of the pieces")
    if sizes < 1 or total % sizes:
        raise Error(f"split: {total} is not a multiple of {sizes}; give the sizes of the pieces")
    return (sizes,) * (total // sizes)


Slices: TypeAlias = list[tuple[int, DimLike, DimLike, int]]  # dim, start, stop, step


def plan_index(shape: Shape, index: Any) -> tuple[Slices, tuple[int, ...], tuple[int, ...]]:
    """(slices, dropped dims, then added dims) of `x[index]`, for x of shape `shape`."""
    items = list(cast("tuple[Any, ...]", index)) if isinstance(index, tuple) else [index]
    items = _without_ellipsis(items, len(shape), shape)
    slices: Slices = []
    dropped: list[int] = []
    added: list[int] = []
    dim = place = 0  # positions in x and in the result
    for item in items:
        if item is None:
            added.append(place)
            place += 1
            continue
        bounds = _slice(shape[dim], item, dim)
        if bounds is not None:
            slices.append((dim, *bounds))
        if isinstance(item, slice):
            place += 1
        else:
            dropped.append(dim)
        dim += 1
    return slices, tuple(dropped), tuple(added)


def _without_ellipsis(items: list[Any], ndim: int, shape: Shape) -> list[Any]:
    """One item per dimension; `...` and missing items become `:`."""
    dots = [i for i, item in enumerate(items) if item is Ellipsis]
    if len(dots) > 1:
        raise Error("an index has at most one ...")
    used = sum(1 for item in items if item is not None and item is not Ellipsis)
    if used > ndim:
        raise Error(f"{used} indices for the {ndim} dimensions of [{', '.join(map(str, shape))}]")
    at = dots[0] if dots else len(items)
    return [*items[:at], *[slice(None)] * (ndim - used), *items[at + 1 :]]


def _slice(size: DimLike, item: Any, dim: int) -> tuple[DimLike, DimLike, int] | None:
    """(start, stop, step) of one dimension, None where all of it is taken."""
    if not isinstance(item, slice):
        start = _from_end(as_dim(item), size)
        if isinstance(start, int) and isinstance(size, int) and not 0 <= start < size:
            raise Error(f"index {item} is outside dimension {dim}, which has {size}")
        return None if size == 1 else (start, start + 1, 1)
    ends = cast("Any", item)
    step = 1 if ends.step is None else ends.step
    if not isinstance(step, int) or step < 1:
        raise Error("the step of a slice is a positive number; to reverse, use F.flip")
    start = 0 if ends.start is None else _bound(ends.start, size)
    stop = size if ends.stop is None else _bound(ends.stop, size)
    if isinstance(start, int) and isinstance(stop, int):
        stop = max(start, stop)
    return None if (start, stop, step) == (0, size, 1) else (start, stop, step)


def _bound(end: Any, size: DimLike) -> DimLike:
    """One end of a slice, clamped to the dimension where both are known, as in numpy."""
    end = _from_end(as_dim(end), size)
    return min(max(end, 0), size) if isinstance(end, int) and isinstance(size, int) else end


def _from_end(at: DimLike, size: DimLike) -> DimLike:
    return at + size if isinstance(at, int) and at < 0 else at
