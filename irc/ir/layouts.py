"""Global and local arrays and types: how a global type distributes a tensor over the mesh.

A dimension of n sharded over a group of N ranks has ceil(n / N) elements on every rank; what the
last ranks have beyond the end is padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from ..errors import Error
from .dims import Dim, DimLike, Shape, exact_divide
from .mesh import Mesh
from .types import Axes, TensorType

Array: TypeAlias = np.ndarray[Any, Any]


def local_dim(size: DimLike, group_size: int) -> DimLike:
    """The shard size of a dimension; an Error if it is symbolic and may not divide evenly."""
    if not isinstance(size, Dim):
        return -(-size // group_size)
    part = exact_divide(size, group_size)
    if part is None:
        raise Error(
            f"the dimension {size} is sharded over {group_size} ranks, but it cannot be shown to "
            f"be a multiple of {group_size}"
        )
    return part


def local_shape(type: TensorType, mesh: Mesh) -> Shape:
    """The shape of one rank's shard."""
    pairs = zip(type.shape, type.axes, strict=True)
    return tuple(local_dim(n, mesh.group_size(a)) if a else n for n, a in pairs)


def local_type(type: TensorType, mesh: Mesh) -> TensorType:
    """The type of one rank's shard."""
    return TensorType(type.dtype, local_shape(type, mesh)) if type.sharded else type


def recorded_type(type: TensorType, mesh: Mesh) -> TensorType:
    """The type of one rank's part with its global type, where axes of one rank are left out."""
    wide = [name for name, size in mesh.axes if size > 1]
    axes = tuple(tuple(axis for axis in over if axis in wide) for over in type.axes)
    partial = tuple(axis for axis in type.partial if axis in wide)
    return local_type(type, mesh).part_of(TensorType(type.dtype, type.shape, axes, partial))


def uneven(size: DimLike, group_size: int) -> bool:
    """Whether the last ranks have padding."""
    return not isinstance(size, Dim) and size % group_size != 0


def split_array(array: Array, axes: Sequence[Axes], mesh: Mesh, rank: int) -> Array:
    """The shard of a global array on `rank`, padded with zeros."""
    for dim, over in enumerate(axes):
        if over:
            array = _shard(array, dim, mesh.group_size(over), mesh.index(rank, over))
    return array


def _shard(array: Array, dim: int, group_size: int, index: int) -> Array:
    shard = array[(slice(None),) * dim + (_elements(array.shape[dim], group_size, index),)]
    padding = -(-array.shape[dim] // group_size) - shard.shape[dim]
    ends = [(0, padding if i == dim else 0) for i in range(array.ndim)]
    return np.pad(shard, ends) if padding else shard


def _elements(size: int, group_size: int, index: int) -> slice:
    """The elements of a dimension in one shard, without padding."""
    most = -(-size // group_size)
    return slice(min(index * most, size), min((index + 1) * most, size))


def join_arrays(
    parts: Sequence[Array], axes: Sequence[Axes], mesh: Mesh, shape: Sequence[int]
) -> Array:
    """The global array of `shape` from the shards of all ranks, without padding.

    Of ranks that hold the same shard the first one's is used.
    """
    joined = np.empty(shape, parts[0].dtype)
    for rank in reversed(range(mesh.ranks)):
        places = [
            _elements(size, mesh.group_size(over), mesh.index(rank, over))
            for size, over in zip(shape, axes, strict=True)
        ]
        kept = joined[tuple(places)]
        kept[...] = parts[rank][tuple(slice(n) for n in kept.shape)]
    return joined
