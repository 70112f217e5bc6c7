"""The layout of a value of the local view: of which global value it is one rank's part.

The lattice and the proof that the rules keep it are on decision page 0015.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from ..errors import Error
from ..ir.core import Weight
from ..ir.dims import DimLike, Shape
from ..ir.mesh import Mesh
from ..ir.types import Axes, TensorType
from ..weights import ConcatRef, Cyclic, Ref, Shard, Slice, Transpose, Unsqueeze, ref_shape

Names: TypeAlias = frozenset[str]  # mesh axes
# One dimension, row by row: axes of the mesh, and local sizes between them. What follows the last
# entry is local. ("tp",) is sharded over tp; (4, "tp") is 4 rows, each sharded over tp.
Place: TypeAlias = tuple[object, ...]
NONE: Names = frozenset()
WHOLE: Place = ()


class Mark(Enum):
    """Entries of places that are more than a row of axes and sizes."""

    EVERY = 1  # all local elements: (EVERY, "tp") is the cyclic distribution
    QUEUES = 2  # behind the axes: every rank has blocks for all ranks, each at a place of its own
    REPLIES = 3  # every rank has the blocks that all ranks have for it
    LARGEST = 4  # behind the axes: every rank has the largest element of its shard


@dataclass(frozen=True)
class Joined:
    """The only entry of a place: shards one after the other, with their local sizes."""

    sizes: tuple[DimLike | None, ...]
    places: tuple[Place, ...]


@dataclass(frozen=True)
class Layout:
    """The global value of a local one.

    `dims` has a place per dimension. The global value is the sum over the ranks of `partial`. Over
    `numbered` every rank has another value, made of its number and replicated values; numbers of
    `relative` count within the shard of a rank. `root` is the only rank, along axes, that has the
    value. A `local` value is made of sizes and constants: that of any shard of these sizes. All its
    elements are equal if `uniform`, and 0 if `zero`.
    """

    dims: tuple[Place, ...]
    partial: Names = NONE
    numbered: Axes = ()
    relative: Names = NONE
    root: tuple[Axes, int] | None = None
    local: bool = False
    uniform: bool = False
    zero: bool = False

    @property
    def axes(self) -> Names:
        """The axes over which the value may differ between ranks."""
        root = self.root[0] if self.root else ()
        return self.placed | self.partial | self.relative | {*self.numbered, *root}

    @property
    def placed(self) -> Names:
        """The axes that shard a dimension."""
        return frozenset(axis for place in self.dims for axis in axes_of(place))

    @property
    def plain(self) -> bool:
        """Whether the value is the same on all ranks."""
        return not (any(self.dims) or self.partial or self.numbered or self.relative or self.root)

    def without(self, axes: Iterable[str]) -> Layout:
        """The layout where these axes have one rank."""
        gone = {*axes}
        if not self.axes & gone:
            return self
        return Layout(
            tuple([tuple([e for e in place if e not in gone]) for place in self.dims]),
            self.partial - gone,
            tuple([axis for axis in self.numbered if axis not in gone]),
            self.relative - gone,
            None if self.root and gone.issuperset(self.root[0]) else self.root,
        )


def same(rank: int, local: bool = False, uniform: bool = False, zero: bool = False) -> Layout:
    """The layout of a replicated value of `rank` dimensions."""
    return Layout((WHOLE,) * rank, local=local, uniform=uniform, zero=zero)


def axes_of(place: Place) -> list[str]:
    """The mesh axes of a place, slowest first."""
    if place and isinstance(place[0], Joined):
        every = [axis for part in place[0].places for axis in axes_of(part)]
        return list(dict.fromkeys(every))
    return [entry for entry in place if isinstance(entry, str)]


def place_text(place: Place) -> str:
    """`replicated`, or `sharded over cp.tp`."""
    return f"sharded over {'.'.join(axes_of(place))}" if place else "replicated"


def is_simple(place: Place) -> bool:
    """Whether a place is a row of axes and sizes."""
    return not any(isinstance(entry, (Mark, Joined)) for entry in place)


def states_sizes(place: Place) -> bool:
    """Whether all shards that are joined have known sizes; a tensor of a file states none."""
    return not place or not isinstance(place[0], Joined) or None not in place[0].sizes


def fits(place: Place, other: Place) -> bool:
    """Whether two places may be the same: unknown sizes of joined shards fit any."""
    one, two = (each[0] if each else None for each in (place, other))
    if not isinstance(one, Joined) or not isinstance(two, Joined):
        return place == other
    if len(one.sizes) != len(two.sizes) or not all(map(fits, one.places, two.places)):
        return False
    return all(a == b or None in (a, b) for a, b in zip(one.sizes, two.sizes, strict=True))


def global_shape(shape: Shape, layout: Layout, mesh: Mesh) -> Shape:
    """The sizes of the global value, padding of shards included."""
    pairs = zip(shape, layout.dims, strict=True)
    return tuple([n * mesh.group_size(tuple(axes_of(p))) if p else n for n, p in pairs])


def layout_of_type(type: TensorType, mesh: Mesh) -> Layout:
    """The layout of a local value of this global type."""
    wide = _wide(mesh)
    return Layout(
        tuple([tuple([axis for axis in axes if axis in wide]) for axes in type.axes]),
        wide.intersection(type.partial),
    )


def layout_of_weight(weight: Weight, mesh: Mesh) -> Layout:
    """The layout of a weight, by the shard steps of its reference."""
    rank = weight.type.ndim
    if not any(isinstance(step, Shard) for step in weight.ref.every_step()):
        return same(rank)
    wide = _wide(mesh)
    try:
        return Layout(tuple(_cut(weight.ref, rank, wide, mesh)))
    except Error as error:
        raise Error(f"weight @{weight.name}: {error.message}") from None


def _wide(mesh: Mesh) -> Names:
    return frozenset([name for name, size in mesh.axes if size > 1])


def _cut(ref: Ref, rank: int, wide: Names, mesh: Mesh) -> list[Place]:
    """The place of every dimension after all steps of a reference of this rank."""
    own = rank - sum(isinstance(step, Unsqueeze) for step in ref.steps)
    places: list[Place] = [WHOLE] * own
    if isinstance(ref, ConcatRef):
        parts = [_cut(part, own, wide, mesh) for part in ref.parts]
        places = [_concatenated(i, ref, [part[i] for part in parts], mesh) for i in range(own)]
    cyclic: dict[int, int] = {}
    for step in ref.steps:
        if isinstance(step, Cyclic):
            cyclic[step.dim] = step.group_size
        elif isinstance(step, Shard):
            axes = tuple([axis for axis in step.axes if axis in wide])
            dealt = cyclic.pop(step.dim, 1) == mesh.group_size(axes) > 1
            places[step.dim] = (*places[step.dim], *((Mark.EVERY,) if dealt else ()), *axes)
        elif isinstance(step, Transpose):
            places = [places[i] for i in step.order]
        elif isinstance(step, Unsqueeze):
            places.insert(step.dim, WHOLE)
        elif isinstance(step, Slice):
            for part, place in zip(step.ranges, places, strict=True):
                if part is not None and place:
                    raise Error(f"{step} slices a dimension behind its .shard; slice it before")
    return places


def _concatenated(dim: int, ref: ConcatRef, places: list[Place], mesh: Mesh) -> Place:
    if dim != ref.dim:
        if len({*places}) > 1:
            raise Error(f"the parts of {ref} are sharded differently in dimension {dim}")
        return places[0]
    shapes = [ref_shape(part, mesh) for part in ref.parts]
    return joined([None if shape is None else shape[dim] for shape in shapes], places)


def joined(sizes: Sequence[DimLike | None], places: Sequence[Place]) -> Place:
    """The place of shards of these local sizes one after the other."""
    if not any(places):
        return WHOLE
    return places[0] if len(places) == 1 else (Joined(tuple(sizes), tuple(places)),)
