"""Shapes as scripts write them: names of symbols, -1, numpy indices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from ..dims import Dim, DimLike, Shape, exact_divide, product
from ..errors import Error
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
    """A shape; `((2, 3),)` is taken for `(2, 3)`."""
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = cast("Sequence[Any]", sizes[0])
    return tuple(as_dim(size) for size in sizes)


def inferred_shape(old: Shape, sizes: Sequence[Any]) -> Shape:
    """The shape that `sizes` means for the elements of `old`: one size may be -1."""
    shape = as_shape(sizes)
    holes = [i for i, size in enumerate(shape) if size == -1]
    if not holes:
        return shape
    if len(holes) > 1:
        raise Error(f"reshape: only one size may be -1, not {len(holes)}")
    known = product(tuple(size for size in shape if size != -1))
    size = exact_divide(product(old), known)
    if size is None:
        raise Error(
            f"reshape: [{', '.join(map(str, old))}] has {product(old)} elements, which {known} "
            "does not divide for every size; write the sizes out"
        )
    return tuple(size if i == holes[0] else other for i, other in enumerate(shape))


def split_sizes(shape: Shape, sizes: int | Sequence[int], dim: int) -> tuple[int, ...]:
    """The sizes of the pieces of dimension `dim`; a single size stands for equal pieces."""
    if not isinstance(sizes, int):
        return tuple(sizes)
    if not -len(shape) <= dim < len(shape):
        raise Error(f"split: there is no dimension {dim} in [{', '.join(map(str, shape))}]")
    whole = shape[dim]
    if not isinstance(whole, int):
        raise Error(f"split: dimension {dim} is {whole}; give the sizes of the pieces")
    if sizes < 1 or whole % sizes:
        raise Error(f"split: {whole} is no multiple of {sizes}; give the sizes of the pieces")
    return (sizes,) * (whole // sizes)


@dataclass
class Plan:
    """What an index does: slices (dim, start, stop, step), then dims dropped, then dims added."""

    cuts: list[tuple[int, DimLike, DimLike, int]]
    dropped: tuple[int, ...]
    added: tuple[int, ...]


def plan_index(shape: Shape, index: Any) -> Plan:
    """The operations that `x[index]` stands for, x being of shape `shape`."""
    items = list(cast("tuple[Any, ...]", index)) if isinstance(index, tuple) else [index]
    items = _without_ellipsis(items, len(shape), shape)
    cuts: list[tuple[int, DimLike, DimLike, int]] = []
    dropped: list[int] = []
    added: list[int] = []
    dim = place = 0  # in x, and in the result
    for item in items:
        if item is None:
            added.append(place)
            place += 1
            continue
        cut = _cut(shape[dim], item, dim)
        if cut is not None:
            cuts.append((dim, *cut))
        if isinstance(item, slice):
            place += 1
        else:
            dropped.append(dim)
        dim += 1
    return Plan(cuts, tuple(dropped), tuple(added))


def _without_ellipsis(items: list[Any], rank: int, shape: Shape) -> list[Any]:
    """One entry per dimension, `...` and what is left out spelled as whole slices."""
    dots = [i for i, item in enumerate(items) if item is Ellipsis]
    if len(dots) > 1:
        raise Error("an index has at most one ...")
    used = sum(1 for item in items if item is not None and item is not Ellipsis)
    if used > rank:
        raise Error(f"{used} indices for the {rank} dimensions of [{', '.join(map(str, shape))}]")
    at = dots[0] if dots else len(items)
    return [*items[:at], *[slice(None)] * (rank - used), *items[at + 1 :]]


def _cut(size: DimLike, item: Any, dim: int) -> tuple[DimLike, DimLike, int] | None:
    """(start, stop, step) of one dimension, None where it stays whole."""
    if not isinstance(item, slice):
        start = _from_end(as_dim(item), size)
        if isinstance(start, int) and isinstance(size, int) and not 0 <= start < size:
            raise Error(f"index {item} is outside dimension {dim}, which has {size}")
        return None if size == 1 else (start, start + 1, 1)
    first, last, step = _ends(cast("Any", item))
    if not isinstance(step, int) or step < 1:
        raise Error("the step of a slice is a positive number; to reverse, use F.flip")
    start = _bound(first, size)
    stop = size if last is None else _bound(last, size)
    if isinstance(start, int) and isinstance(stop, int):
        stop = max(start, stop)
    return None if (start, stop, step) == (0, size, 1) else (start, stop, step)


def _ends(item: Any) -> tuple[Any, Any, Any]:
    step = 1 if item.step is None else item.step
    return 0 if item.start is None else item.start, item.stop, step


def _bound(end: Any, size: DimLike) -> DimLike:
    """One end of a slice, cut to the dimension where both are known, as numpy does."""
    end = _from_end(as_dim(end), size)
    return min(max(end, 0), size) if isinstance(end, int) and isinstance(size, int) else end


def _from_end(at: DimLike, size: DimLike) -> DimLike:
    return at + size if isinstance(at, int) and at < 0 else at
