"""Whole arrays and types against one rank's: how a global type lays a tensor out over the mesh.

A dimension of n split over N ways has ceil(n / N) elements on every rank; what the last ranks have
beyond the end is padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from .dims import Dim, DimLike, Shape, exact_divide
from .errors import Error
from .mesh import Mesh
from .types import Axes, TensorType

Array: TypeAlias = np.ndarray[Any, Any]


def local_dim(size: DimLike, ways: int) -> DimLike:
    """One rank's part of a dimension; an Error where a symbolic one is no multiple of `ways`."""
    if not isinstance(size, Dim):
        return -(-size // ways)
    part = exact_divide(size, ways)
    if part is None:
        raise Error(
            f"the dimension {size} is split over {ways} ranks, but it cannot be shown to be a "
            f"multiple of {ways}"
        )
    return part


def local_shape(type: TensorType, mesh: Mesh) -> Shape:
    """The shape of one rank's part."""
    pairs = zip(type.shape, type.axes, strict=True)
    return tuple(local_dim(n, mesh.ways(a)) if a else n for n, a in pairs)


def local_type(type: TensorType, mesh: Mesh) -> TensorType:
    """The type of one rank's part."""
    return TensorType(type.dtype, local_shape(type, mesh)) if type.sharded else type


def uneven(size: DimLike, ways: int) -> bool:
    """Whether the last ranks have padding."""
    return not isinstance(size, Dim) and size % ways != 0


def split_array(array: Array, axes: Sequence[Axes], mesh: Mesh, rank: int) -> Array:
    """The part of a whole array that `rank` holds, zeros where it has padding."""
    for dim, over in enumerate(axes):
        if over:
            array = _part(array, dim, mesh.ways(over), mesh.index(rank, over))
    return array


def _part(array: Array, dim: int, ways: int, index: int) -> Array:
    size = -(-array.shape[dim] // ways)
    begin, end = (min(i * size, array.shape[dim]) for i in (index, index + 1))
    part = array[(slice(None),) * dim + (slice(begin, end),)]
    if end - begin == size:
        return part
    ends = [(0, size - (end - begin) if i == dim else 0) for i in range(array.ndim)]
    return np.pad(part, ends)


def join_arrays(
    parts: Sequence[Array], axes: Sequence[Axes], mesh: Mesh, shape: Sequence[int]
) -> Array:
    """The whole array of `shape` from the parts of all ranks, padding left out.

    Ranks that hold the same part must agree; the first one's is taken.
    """
    whole = np.empty(shape, parts[0].dtype)
    for rank in reversed(range(mesh.ranks)):
        places: list[slice] = []
        for dim, over in enumerate(axes):
            if not over:
                places.append(slice(None))
                continue
            size = -(-shape[dim] // mesh.ways(over))
            begin = mesh.index(rank, over) * size
            places.append(slice(min(begin, shape[dim]), min(begin + size, shape[dim])))
        kept = whole[tuple(places)]
        kept[...] = parts[rank][tuple(slice(n) for n in kept.shape)]
    return whole
