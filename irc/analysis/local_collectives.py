"""The layout of the result of a collective: it converts one layout into another exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..errors import Error
from ..ir.mesh import Mesh
from ..ir.types import Axes
from ..ops.collective import Collective, Exchange
from .layout import NONE, WHOLE, Layout, Mark, Place, axes_of, place_text


def exchanged(op: Collective, operands: Sequence[Layout], mesh: Mesh) -> Layout:
    """The layout of the result of a collective, or of `rank`; an Error about a wrong operand."""
    axes = tuple([axis for axis in op.axes if mesh.size(axis) > 1])
    if not isinstance(op, Exchange):
        return Layout((), numbered=axes)
    (x,) = operands
    if not axes:
        return x
    kind: str | None = getattr(op, "op", None)
    if x.relative & {*axes} and (kind != "max" or (*axes, Mark.LARGEST) not in x.dims):
        raise Error(f"its operand counts from the first element of each rank of {_over(axes)}")
    x = _from_root(op, x, axes)
    if kind is not None:
        x = _reduced(x, axes, kind, mesh.group_size(axes))
    elif x.partial & {*axes}:
        raise Error(
            f"its operand is a partial sum over {_over(axes)}, which only a reduction completes"
        )
    if not (kind or op.gathers):
        x = _replicated(x, axes)
    return _moved(op, x, axes)


def _over(axes: Axes) -> str:
    return ".".join(axes)


def _from_root(op: Exchange, x: Layout, axes: Axes) -> Layout:
    """A value that only a root has, where the collective takes it from there."""
    if x.root is None or not (op.root_receives or {*x.root[0]} & {*axes}):
        return x
    if op.root_sends and x.root == (axes, op.attributes["root"]):
        return x.without(axes)
    if {*x.root[0]} <= {*axes} <= x.partial and op.attributes.get("op") == "sum":
        return replace(x, root=None)
    raise Error(f"only rank {x.root[1]} of {_over(x.root[0])} has its operand")


def _reduced(x: Layout, axes: Axes, kind: str, group_size: int) -> Layout:
    """The layout of the operand when it is combined over the axes."""
    over = frozenset(axes)
    if kind == "max" and (*axes, Mark.LARGEST) in x.dims:
        largest = (*axes, Mark.LARGEST)
        dims = tuple([WHOLE if d == largest else d for d in x.dims])
        return replace(x, dims=dims, relative=x.relative - over)  # the largest of all counts
    if x.numbered and over >= {*x.numbered}:
        x, over = replace(x, numbered=()), over - {*x.numbered}
    if over & (x.placed | {*x.numbered}):
        wrong = sorted(over & (x.placed | {*x.numbered}))[0]
        raise Error(f"it takes the {kind} of different shards, those of the ranks of {wrong}")
    if kind != "sum" and over & x.partial:
        raise Error(
            f"it takes the {kind} of the partial sum over {' '.join(sorted(over & x.partial))}: "
            "only op=sum completes it"
        )
    missing = over - x.partial
    if missing and kind in ("sum", "prod") and not x.zero:
        made = f"{group_size} times the value" if kind == "sum" else f"its power of {group_size}"
        raise Error(
            f"it reduces a value that is the same on all ranks of {' '.join(sorted(missing))} "
            f"already; that makes {made}: leave it out"
        )
    return replace(x, partial=x.partial - over, uniform=x.uniform and not missing)


def _replicated(x: Layout, axes: Axes) -> Layout:
    """The operand of a collective that takes the value of one rank, the same on all."""
    if {*x.numbered} & {*axes} and not {*x.numbered} <= {*axes}:
        raise Error(f"its operand differs over more axes than {_over(axes)}")
    if x.placed & {*axes}:
        raise Error(f"its operand is sharded over {_over(axes)}, so that the other shards are lost")
    return x.without(x.numbered) if {*x.numbered} & {*axes} else x


def _moved(op: Exchange, x: Layout, axes: Axes) -> Layout:
    """Dimensions that are gathered lose the axes, those that are scattered get them."""
    dims, rank = list(x.dims), len(x.dims)
    gathered: int | None = getattr(op, op.gathers) % rank if op.gathers else None
    scattered: int | None = getattr(op, op.scatters) % rank if op.scatters else None
    if gathered is not None and gathered == scattered:
        dims[gathered] = _blocks(x, dims[gathered], axes)
        numbered = tuple([axis for axis in x.numbered if axis not in axes])
        return replace(x, dims=tuple(dims), numbered=numbered)
    numbered = x.numbered
    if gathered is not None:
        if numbered == axes:
            numbered = ()
        else:
            dims[gathered] = _gathered(dims[gathered], axes)
    if scattered is not None:
        if not all(isinstance(entry, str) for entry in dims[scattered]):
            raise Error(f"it scatters a dimension that is {place_text(dims[scattered])}")
        dims[scattered] = (*dims[scattered], *axes)
    partial = x.partial | ({*axes} if op.root_receives else NONE)
    root = (axes, op.attributes["root"]) if op.root_receives else x.root
    return replace(x, dims=tuple(dims), partial=partial, root=root, numbered=numbered)


def _gathered(place: Place, axes: Axes) -> Place:
    """A place without its innermost axes."""
    if place and place[-1] is Mark.REPLIES and place[-1 - len(axes) : -1] == axes:
        rest = place[: -1 - len(axes)]
        return (*rest, Mark.QUEUES) if rest else WHOLE
    if place[-len(axes) :] != axes or not all(isinstance(entry, str) for entry in place):
        raise Error(f"it gathers over {_over(axes)} a dimension that is {place_text(place)}")
    return place[: -len(axes)]


def _blocks(x: Layout, place: Place, axes: Axes) -> Place:
    """Blocks that are sent to their ranks: queues become replies, and back."""
    mark = place[-1] if place else None
    if {*x.numbered} == {*axes}:  # every rank made the blocks for all others
        return (*axes_of(place), *axes, Mark.QUEUES)
    if mark not in (Mark.QUEUES, Mark.REPLIES) or not {*axes} <= {*axes_of(place)}:
        raise Error("it exchanges blocks of a dimension that holds none for the other ranks")
    return (*place[:-1], Mark.REPLIES if mark is Mark.QUEUES else Mark.QUEUES)
