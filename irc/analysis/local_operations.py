"""The layout of the results of a local operation, from the layouts of its operands.

An operation has a layout where it is one rank's part of the same operation on global values: by
its sharding rule, or as one of the idioms of irc's passes. Everything else is an Error.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TypeAlias

from ..errors import Error
from ..ir.core import Op
from ..ir.dims import DimLike
from ..ir.dtypes import is_float
from ..ir.mesh import Mesh
from ..ir.types import Axes
from ..ops import (
    Concat,
    Constant,
    Dequantize,
    Embedding,
    Full,
    Gather,
    Iota,
    MoeDispatch,
    Pad,
    Quantize,
    ReduceMax,
    Reshape,
    ScatterElements,
    Split,
    Where,
)
from ..ops.quant import block_sizes
from .layout import NONE, WHOLE, Joined, Layout, Mark, Place, axes_of, joined, same
from .local_rules import Layouts, Ruled, check_once
from .reshaped import reshaped

Special: TypeAlias = Callable[[Op, Layouts, Mesh], "Layouts | None"]


def local_layouts(op: Op, operands: Layouts, mesh: Mesh) -> Layouts:
    """The layout of every result of an operation that does not communicate."""
    if all(layout.plain for layout in operands):
        return _plain(op, operands)
    roots = {layout.root for layout in operands if layout.root}
    if roots:
        return _on_root(op, operands, mesh, roots)
    if not op.moves_data and any(Mark.LARGEST in place for x in operands for place in x.dims):
        raise Error(
            "its operand is the largest of each shard, not of all: an all_reduce is missing"
        )
    special = _SPECIAL.get(type(op))
    found = special(op, operands, mesh) if special else None
    return Ruled(op, operands, mesh).results() if found is None else found


def _plain(op: Op, operands: Layouts) -> Layouts:
    values = [*op.values] if isinstance(op, Constant) else []
    if isinstance(op, Full) or len({*values}) == 1:
        zero = not (op.value if isinstance(op, Full) else values[0])
        return (same(op.results[0].type.ndim, local=True, uniform=True, zero=zero),)
    local = (
        isinstance(op, Iota)
        or _is_folded_iota(values)
        or (bool(operands) and all(o.local for o in operands))
    )
    uniform = local and bool(operands) and op.moves_data and all(o.uniform for o in operands)
    uniform &= not isinstance(op, Pad)
    zero = uniform and all(layout.zero for layout in operands)
    known = {"local": local, "uniform": uniform, "zero": zero}
    return tuple([same(result.type.ndim, **known) for result in op.results])


def _is_folded_iota(values: list[bool | int | float]) -> bool:
    return len(values) > 1 and all(
        type(value) is int and value == values[0] + i for i, value in enumerate(values)
    )


def _on_root(op: Op, operands: Layouts, mesh: Mesh, roots: set[tuple[Axes, int]]) -> Layouts:
    """What the root computes from its values; zeros elsewhere stay a partial sum."""
    if len(roots) > 1:
        raise Error("its operands are on different roots")
    (root,) = roots
    axes = {*root[0]}
    if all(axes <= layout.partial for layout in operands if layout.root):
        with suppress(Error):
            terms = [replace(layout, root=None) for layout in operands]
            found = local_layouts(op, tuple(terms), mesh)
            return tuple([replace(layout, root=root) for layout in found])
    known = [layout.without(axes) if layout.root else layout for layout in operands]
    if any(layout.axes & axes for layout in known):
        raise Error("only its root has an operand, and other ranks have parts of another")
    return tuple([replace(layout, root=root) for layout in local_layouts(op, tuple(known), mesh)])


def _reshape(op: Op, operands: Layouts, mesh: Mesh) -> Layouts:
    x = op.operands[0].type.shape
    dims = reshaped(x, operands[0].dims, op.results[0].type.shape)
    return (replace(operands[0], dims=dims),)


def _where(op: Op, operands: Layouts, mesh: Mesh) -> Layouts | None:
    """Chosen by the number of a rank, a replicated value or zeros are terms of a sum."""
    mask, *branches = operands
    others = [layout for layout in branches if not layout.zero]
    axes = frozenset(mask.numbered)
    chosen = is_float(op.results[0].type.dtype) and len(others) == 1 and axes
    if not chosen or others[0].axes & axes or mask.placed or mask.partial:
        return None
    (found,) = Ruled(op, (replace(mask, numbered=()), *branches), mesh).results()
    return (replace(found, partial=found.partial | axes),)


def _concat(op: Op, operands: Layouts, mesh: Mesh) -> Layouts | None:
    """Shards one after the other are known as such."""
    at = op.attributes["dim"] % op.results[0].type.ndim
    places = [layout.dims[at] for layout in operands]
    if not any(places) or any(layout.numbered for layout in operands):
        return None
    rest = [replace(o, dims=(*o.dims[:at], WHOLE, *o.dims[at + 1 :])) for o in operands]
    (found,) = Ruled(op, tuple(rest), mesh).results()
    sizes: list[DimLike] = [value.type.shape[at] for value in op.operands]
    place = joined(sizes, places)
    return (replace(found, dims=(*found.dims[:at], place, *found.dims[at + 1 :])),)


def _split(op: Op, operands: Layouts, mesh: Mesh) -> Layouts | None:
    """Shards that were joined are taken apart."""
    (x,) = operands
    at = op.attributes["dim"] % op.operands[0].type.ndim
    place = x.dims[at]
    if not place or not isinstance(place[0], Joined):
        return None
    sizes, inner = place[0].sizes, place[0].places
    pairs = list(zip(sizes, op.attributes["sizes"], strict=False))
    unlike = any(size not in (None, wanted) for size, wanted in pairs)
    if unlike or len(sizes) != len(op.attributes["sizes"]):
        raise Error(f"it splits shards of {sizes} at other places")
    return tuple([replace(x, dims=(*x.dims[:at], each, *x.dims[at + 1 :])) for each in inner])


def _gather(op: Op, operands: Layouts, mesh: Mesh) -> Layouts | None:
    """The shard of a rank: a replicated dimension is cut in equal parts, and one chosen."""
    x, index = operands
    rank, cut = op.operands[1].producer, op.operands[0].producer
    if rank is None or rank.opname != "rank" or not index.numbered:
        return None
    at, shape = op.attributes["dim"] % op.operands[0].type.ndim, op.operands[0].type.shape
    group_size = mesh.group_size(index.numbered)
    if not isinstance(cut, Reshape) or at + 1 == len(shape):
        return None
    whole = cut.operands[0].type.shape[at : at + 1]  # another where reshapes were merged
    if shape[at] != group_size and (not whole or shape[at] * shape[at + 1] != whole[0]):
        return None
    outer, inner = x.dims[at : at + 2]
    if shape[at] != group_size or inner or not all(isinstance(axis, str) for axis in outer):
        raise Error(f"it takes a shard by the number of one of {group_size} ranks")
    place = (*outer, *index.numbered)
    dims = (*x.dims[:at], place, *x.dims[at + 2 :])
    found = replace(x, dims=dims, local=x.local and x.uniform)
    check_once(found)
    return (found,)


def _embedding(op: Op, operands: Layouts, mesh: Mesh) -> Layouts | None:
    """Rows of a cyclic table for those that ask, and rows that came back for those who asked."""
    ids, table = operands
    place, columns = table.dims
    axes = {*axes_of(place)}
    if ids.numbered and table.plain:
        raise Error("its ids count from the first row of a shard, but its table is replicated")
    if not place or (place[0] is not Mark.EVERY and place[-1] is not Mark.QUEUES):
        return None
    known = ids.placed | {*ids.numbered}
    if place[-1] is Mark.QUEUES:
        if not axes <= known:
            raise Error(
                f"its table holds the rows of each rank of {'.'.join(axes)}, its ids do not"
            )
        return (Layout((*ids.dims, columns), NONE, ids.numbered),)
    first = ids.dims[0] if len(ids.dims) == 1 else WHOLE
    asked = first and first[-1] is Mark.REPLIES and axes <= {*axes_of(first)}
    if not asked and {*ids.numbered} != axes:
        raise Error(f"its table is cyclic over {'.'.join(axes)}, but its ids are not for its rows")
    over = tuple(dict.fromkeys([*axes_of(first), *ids.numbered]))
    return (Layout(((*over, Mark.REPLIES), columns)),)


def _scatter(op: Op, operands: Layouts, mesh: Mesh) -> Layouts | None:
    """Numbers at places of its own: the queues of a rank."""
    x, indices, updates = operands
    over = axes_of(indices.dims[0]) if len(indices.dims) == 1 else []
    if not x.uniform or len(indices.dims) != 1 or {*axes_of(updates.dims[0])} - {*over}:
        return None
    numbered = indices.numbered or updates.numbered
    return (Layout(((*over, Mark.QUEUES) if over else WHOLE,), NONE, numbered),)


def _dispatch(op: Op, operands: Layouts, mesh: Mesh) -> Layouts | None:
    """With `first` by the number of the rank, a rank has the buffer of its own experts."""
    named = dict(zip([name for name, _ in op.named_operands()], operands, strict=True))
    first = named.get("first")
    if first is None or not first.numbered:
        return None
    others = [same(0) if layout is first else layout for layout in operands]
    (found,) = Ruled(op, tuple(others), mesh).results()
    found = replace(found, dims=(first.numbered, *found.dims[1:]))
    check_once(found)
    return (found,)


def _reduce_max(op: Op, operands: Layouts, mesh: Mesh) -> Layouts | None:
    """The largest of a shard, in its place; an all_reduce makes it the largest of all."""
    (x,) = operands
    over = [dim % len(x.dims) for dim in op.attributes["dims"]]
    placed = [dim for dim in over if x.dims[dim]]
    if not op.attributes["keep"] or len(placed) != 1:
        return None
    place = x.dims[placed[0]]
    if not all(isinstance(entry, str) for entry in place):
        return None
    dims = [WHOLE if dim == placed[0] else each for dim, each in enumerate(x.dims)]
    (found,) = Ruled(op, (replace(x, dims=tuple(dims)),), mesh).results()
    dims = [(*place, Mark.LARGEST) if dim == placed[0] else d for dim, d in enumerate(found.dims)]
    return (replace(found, dims=tuple(dims)),)


def _scaled(op: Op, operands: Layouts, mesh: Mesh) -> Layouts | None:
    """Scales of shards that were joined are joined as their blocks are."""
    shape = op.operands[0].type.shape
    known: list[Layout] = []
    for value, layout in zip(op.operands, operands, strict=True):
        sizes = block_sizes(shape, value.type.shape)
        dims = [_in_elements(p, size) for p, size in zip(layout.dims, sizes, strict=True)]
        known.append(replace(layout, dims=tuple(dims)))
    return Ruled(op, tuple(known), mesh).results()


def _in_elements(place: Place, block: DimLike | None) -> Place:
    """The place of elements from that of their blocks."""
    if not place or not isinstance(place[0], Joined) or not isinstance(block, int):
        return place
    sizes = tuple([None if size is None else size * block for size in place[0].sizes])
    return (Joined(sizes, tuple([_in_elements(p, block) for p in place[0].places])),)


_SPECIAL: dict[type[Op], Special] = {
    Reshape: _reshape,
    Where: _where,
    Concat: _concat,
    Split: _split,
    Gather: _gather,
    ReduceMax: _reduce_max,
    Dequantize: _scaled,
    Quantize: _scaled,
    Embedding: _embedding,
    ScatterElements: _scatter,
    MoeDispatch: _dispatch,
}
