"""Which part of a weight a rank has, by the shard steps of its reference."""

from __future__ import annotations

from ..weights import ConcatRef, Cyclic, Ref, Shard, Slice, Transpose, Unsqueeze
from .dims import DimLike
from .mesh import Mesh
from .types import Axes, TensorType


def weight_part(ref: Ref, type: TensorType, mesh: Mesh) -> TensorType:
    """The local type of a weight of this dtype and shape, with its global type.

    Rows that are distributed cyclically, and shards of different dimensions one behind the other,
    vary over the axes.
    """
    own = type.replicated
    if not any(isinstance(step, Shard) for step in ref.every_step()):
        return own
    varying: dict[str, None] = {}
    axes = _axes(ref, own.ndim, mesh, varying)
    axes = [tuple([axis for axis in over if axis not in varying]) for over in axes]
    sizes: list[DimLike] = [
        size * mesh.group_size(over) for size, over in zip(own.shape, axes, strict=True)
    ]
    if type.of is not None and type.of.axes == tuple(axes):
        sizes = list(type.of.shape)  # of uneven shards
    return own.part_of(TensorType(own.dtype, tuple(sizes), tuple(axes), varying=tuple(varying)))


def stored_part(ref: Ref, type: TensorType, mesh: Mesh) -> TensorType:
    """The type of a weight whose parts are stored in another way, to which `ref` refers.

    It varies over the axes of `type` where the shard steps do not give the part that `type` says:
    shards that lie one behind the other, or the bytes of one rank.
    """
    if type.of is None or weight_part(ref, type, mesh) is type:
        return type
    return type.part_of(type.replicated.replace(varying=type.of.spread))


def _axes(ref: Ref, ndim: int, mesh: Mesh, varying: dict[str, None]) -> list[Axes]:
    """The axes of every dimension after all steps of a reference; `varying` gets the others."""
    own = ndim - sum(isinstance(step, Unsqueeze) for step in ref.steps)
    places: list[Axes] = [()] * own
    if isinstance(ref, ConcatRef):
        parts = [_axes(part, own, mesh, varying) for part in ref.parts]
        for dim, over in enumerate(zip(*parts, strict=True)):
            places[dim] = over[0]
            if len({*over}) > 1:
                varying.update(dict.fromkeys(axis for axes in over for axis in axes))
    cyclic: dict[int, int] = {}
    for step in ref.steps:
        if isinstance(step, Cyclic):
            cyclic[step.dim] = step.group_size
        elif isinstance(step, Shard):
            axes = tuple([axis for axis in step.axes if mesh.size(axis) > 1])
            if cyclic.pop(step.dim, 1) == mesh.group_size(axes) > 1:
                varying.update(dict.fromkeys(axes))
            places[step.dim] += axes
        elif isinstance(step, Transpose):
            places = [places[dim] for dim in step.order]
        elif isinstance(step, Unsqueeze):
            places.insert(step.dim, ())
        elif isinstance(step, Slice):
            for part, over in zip(step.ranges, places, strict=True):
                varying.update(dict.fromkeys(over if part is not None else ()))
    return places
