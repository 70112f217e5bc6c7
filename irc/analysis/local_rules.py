"""The layout of the results of a local operation, from the layouts of its operands.

An operation has a layout where it is one rank's part of the same operation on global values, by
the sharding rule of the global view; everything else is an Error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from ..errors import Error
from ..ir.core import Op, Value
from ..ir.declare import placeholder
from ..ir.dtypes import is_float
from ..ir.mesh import Mesh
from ..ir.sharding import operand_words, parse_rule, result_words
from ..ir.types import Axes, TensorType
from ..ops import (
    Cast,
    Concat,
    Constant,
    Embedding,
    Full,
    Gather,
    Iota,
    MoeDispatch,
    Pad,
    Reshape,
    ScatterElements,
    Slice,
    Split,
    Where,
)
from ..ops.moe import Routed
from .layout import (
    NONE,
    WHOLE,
    Layout,
    Mark,
    Names,
    Place,
    axes_of,
    global_shape,
    joined,
    place_text,
    same,
)
from .reshaped import reshaped

Layouts: TypeAlias = tuple[Layout, ...]
Special: TypeAlias = Callable[[Op, Layouts, Mesh], "Layouts | None"]


def local_layouts(op: Op, operands: Layouts, mesh: Mesh) -> Layouts:
    """The layout of every result of an operation that does not communicate."""
    if all(layout.plain for layout in operands):
        return _plain(op, operands)
    roots = {layout.root for layout in operands if layout.root}
    if roots:
        return _on_root(op, operands, mesh, roots)
    special = _SPECIAL.get(type(op))
    found = special(op, operands, mesh) if special else None
    return _Rule(op, operands, mesh).results() if found is None else found


def _plain(op: Op, operands: Layouts) -> Layouts:
    uniform = isinstance(op, Full) or (isinstance(op, Constant) and len({*op.values}) == 1)
    if uniform:
        zero = not (op.value if isinstance(op, Full) else op.values[0])
        return (same(op.results[0].type.ndim, local=True, uniform=True, zero=zero),)
    local = isinstance(op, Iota) or (bool(operands) and all(o.local for o in operands))
    uniform = local and bool(operands) and op.moves_data and all(o.uniform for o in operands)
    uniform &= not isinstance(op, Pad)
    zero = uniform and all(layout.zero for layout in operands)
    known = {"local": local, "uniform": uniform, "zero": zero}
    return tuple([same(result.type.ndim, **known) for result in op.results])


def _on_root(op: Op, operands: Layouts, mesh: Mesh, roots: set[tuple[Axes, int] | None]) -> Layouts:
    """What the root computes from its values; zeros elsewhere stay a partial sum."""
    if len(roots) > 1:
        raise Error("its operands are on different roots")
    (root,) = roots
    assert root is not None
    axes = {*root[0]}
    terms = [replace(layout, root=None) for layout in operands]
    known = [layout.without(axes) if layout.root else layout for layout in operands]
    try:
        if any(layout.root and not axes <= layout.partial for layout in operands):
            raise Error("the other ranks do not have zeros")
        found = local_layouts(op, tuple(terms), mesh)
    except Error:
        if any(layout.axes & axes for layout in known):
            raise
        found = local_layouts(op, tuple(known), mesh)
    return tuple([replace(layout, root=root) for layout in found])


class _Rule:
    """One operation under its sharding rule."""

    def __init__(self, op: Op, operands: Layouts, mesh: Mesh) -> None:
        view = _global_view(op, operands, mesh)
        text = view.sharding_rule()
        if text is None:
            raise Error("it has no sharding rule, so all its operands must be replicated")
        self.op, self.operands, self.rule = op, operands, parse_rule(text)
        named = operand_words(op, self.rule)
        self.names = [name for name, _ in named]
        self.words = [words for _, words in named]
        self.results_words = result_words(self.rule, [result.type for result in op.results])
        self.where = self._places()

    def _places(self) -> dict[str, Place]:
        """The place of every name; all operands that have the name must agree."""
        where: dict[str, Place] = {}
        seen: dict[str, list[tuple[str, Place, Axes]]] = {}
        for name, value, words, layout in zip(
            self.names, self.op.operands, self.words, self.operands, strict=True
        ):
            for word, size, place in zip(words, value.type.shape, layout.dims, strict=True):
                if word == "1" and place:
                    raise Error(f"it repeats a dimension of {name}, which is sharded")
                broadcast = size == 1 and not place and word.startswith(".")
                if word != "1" and not broadcast and not layout.local:
                    seen.setdefault(word, []).append((name, place, layout.numbered))
        for word, uses in seen.items():
            places = [place for _, place, _ in uses if place]
            for name, place, numbered in uses:
                if not places or place == places[0] or (not place and _within(numbered, places[0])):
                    continue
                other = next(n for n, p, _ in uses if p == places[0])
                here, there = place_text(place), place_text(places[0])
                raise Error(f"a dimension is {there} in {other} and {here} in {name}")
            if places:
                where[word] = places[0]
        return where

    def results(self) -> Layouts:
        """The layouts of the results, which differ in their dimensions only."""
        self._check_whole()
        kept = {word for words in self.results_words for word in words}
        lost = {a for word, place in self.where.items() if word not in kept for a in axes_of(place)}
        partial = frozenset(lost) | self._passed(lost)
        numbered = self._numbered()
        relative = NONE.union(*[layout.relative for layout in self.operands])
        if self.op.opname in ("add", "sub"):
            relative -= {a for layout in self.operands for a in layout.numbered}
        if self.op.opname == "cumsum":
            relative |= {*axes_of(self._along())}
        relative |= {a for word in self._counted() for a in axes_of(self.where.get(word, WHOLE))}
        found: list[Layout] = []
        for value, words in zip(self.op.results, self.results_words, strict=True):
            dims = tuple([self.where.get(word, WHOLE) for word in words])
            own = frozenset(axes_of(self._along())) if _is_place_of(self.op, value) else NONE
            if value.type.dtype == "bool":
                relative = NONE  # a decision about each element
            layout = Layout(dims, partial, numbered, relative | own)
            _check_once(layout)
            found.append(layout)
        return tuple(found)

    def _counted(self) -> Names:
        """The names of dimensions of operands that are the numbers of their elements."""
        pairs = zip(self.words, self.operands, strict=True)
        return NONE.union(*[ws for ws, layout in pairs if layout.local and not layout.uniform])

    def _along(self) -> Place:
        return self.where.get(next(iter(self.rule.replicated), ""), WHOLE)

    def _check_whole(self) -> None:
        """A dimension that must be replicated is; counts and the largest of a shard are its own."""
        if self.op.opname in ("topk", "cumsum"):
            return
        for name in sorted(self.rule.replicated & self.where.keys()):
            place = self.where[name]
            if isinstance(self.op, Slice) and place[-1] is Mark.QUEUES:
                continue
            raise Error(f"it needs a dimension replicated that is {place_text(place)}")
        for name in sorted(self.rule.positions & self.where.keys()):
            axes = tuple(axes_of(self.where[name]))
            if self.where[name] != axes or all(o.numbered != axes for o in self.operands):
                raise Error(
                    f"it must know where the shard of a rank begins: a dimension is "
                    f"{place_text(self.where[name])}, but no operand is made of that rank number"
                )

    def _numbered(self) -> Axes:
        """The axes over which the results differ by the number of the rank."""
        found: set[Axes] = set()
        for words, layout in zip(self.words, self.operands, strict=True):
            axes = layout.numbered
            if axes and not any(
                _within(axes, place)
                for word, place in self.where.items()
                if word in words or word in self.rule.positions or self.rule.is_elementwise
            ):
                found.add(axes)
        if len(found) > 1:
            raise Error("it mixes the numbers of a rank over different axes")
        return found.pop() if found else ()

    def _passed(self, lost: set[str]) -> Names:
        """The axes over which the results are terms of a sum because operands are."""
        rows = list(zip(self.names, self.operands, strict=True))
        for name, layout in rows:
            if name in self.op.addends and lost - layout.partial and not layout.zero:
                raise Error(
                    f"it adds its {name} once per rank of {' '.join(sorted(lost))}; "
                    "add it behind the all_reduce instead"
                )
        added = [
            (name, o.partial - (lost if name in self.op.addends else NONE)) for name, o in rows
        ]
        given = {name for name, axes in added if axes}
        if not given:
            return NONE
        axes = NONE.union(*[axes for _, axes in added])
        fits = next((group for group in additive_groups(self.op) if group >= given), None)
        if fits is None:
            raise Error(f"it takes as complete {_sum_over(axes)}, its {' and '.join(given)}")
        for (name, own), layout in zip(added, self.operands, strict=True):
            if name in fits and own != axes and not layout.zero:
                raise Error(f"it adds {name} to {_sum_over(axes)}, once per rank")
        return axes


def _sum_over(axes: Names) -> str:
    return f"the partial sum over {' '.join(sorted(axes))}"


def _is_place_of(op: Op, result: Value) -> bool:
    """Whether a result holds positions along the dimension of a topk."""
    return op.opname == "topk" and result.index == 1


def additive_groups(op: Op) -> tuple[frozenset[str], ...]:
    """Its `sums`; a cast between floats rounds each term, and padding with 0 adds nothing."""
    if isinstance(op, Pad) and op.value == 0:
        return (frozenset(["x"]),)
    if isinstance(op, Cast):
        floats = all(is_float(value.type.dtype) for value in (*op.operands, *op.results))
        return (frozenset(["x"]),) if floats else ()
    return op.sums


def _global_view(op: Op, operands: Layouts, mesh: Mesh) -> Op:
    """The operation over stand-ins of the global shapes, for the text of its rule."""
    stand_ins = tuple(
        [
            Value(TensorType(v.type.dtype, global_shape(v.type.shape, layout, mesh)), None, i)
            for i, (v, layout) in enumerate(zip(op.operands, operands, strict=True))
        ]
    )
    view = placeholder(op, stand_ins)
    view.results = op.results
    if isinstance(view, Routed):
        over = operands[op.operands.index(view_operand(op, "chosen"))].dims[0]
        view.parts = view.parts * mesh.group_size(tuple(axes_of(over)))
    return view


def view_operand(op: Op, name: str) -> Value:
    """The operand of this name."""
    return dict(op.named_operands())[name]


def _within(axes: Axes, place: Place) -> bool:
    """Whether axes shard a place next to each other, in this order."""
    return bool(axes) and any(place[i : i + len(axes)] == axes for i in range(len(place)))


def _check_once(layout: Layout) -> None:
    used = [axis for place in layout.dims for axis in axes_of(place)]
    used += [*layout.partial, *layout.numbered]
    for axis in used:
        if used.count(axis) > 1:
            raise Error(f"the ranks of {axis} hold shards of one operand and terms of another")


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
    (found,) = _Rule(op, (replace(mask, numbered=()), *branches), mesh).results()
    return (replace(found, partial=found.partial | axes),)


def _concat(op: Op, operands: Layouts, mesh: Mesh) -> Layouts | None:
    """Shards one after the other are known as such."""
    at = op.attributes["dim"] % op.results[0].type.ndim
    places = [layout.dims[at] for layout in operands]
    if not any(places) or any(layout.numbered for layout in operands):
        return None
    rest = [replace(o, dims=(*o.dims[:at], WHOLE, *o.dims[at + 1 :])) for o in operands]
    (found,) = _Rule(op, tuple(rest), mesh).results()
    place = joined([value.type.shape[at] for value in op.operands], places)
    return (replace(found, dims=(*found.dims[:at], place, *found.dims[at + 1 :])),)


def _split(op: Op, operands: Layouts, mesh: Mesh) -> Layouts | None:
    """Shards that were joined are taken apart."""
    (x,) = operands
    at = op.attributes["dim"] % op.operands[0].type.ndim
    place = x.dims[at]
    if len(place) != 1 or not isinstance(place[0], tuple):
        return None
    sizes, inner = place[0]
    if sizes != tuple(op.attributes["sizes"]):
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
    whole = isinstance(cut, Reshape) and cut.operands[0].type.shape[at : at + 1]
    if not whole or at + 1 == len(shape) or shape[at] * shape[at + 1] != whole[0]:
        return None
    outer, inner = x.dims[at : at + 2]
    if shape[at] != group_size or inner or not all(isinstance(axis, str) for axis in outer):
        raise Error(f"it takes a shard by the number of one of {group_size} ranks")
    place = (*outer, *index.numbered)
    found = replace(x, dims=(*x.dims[:at], place, *x.dims[at + 2 :]))
    _check_once(found)
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
                f"its table holds the rows of each rank of {place_text(place)}, its ids do not"
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
    (found,) = _Rule(op, tuple(others), mesh).results()
    found = replace(found, dims=(first.numbered, *found.dims[1:]))
    _check_once(found)
    return (found,)


_SPECIAL: dict[type[Op], Special] = {
    Reshape: _reshape,
    Where: _where,
    Concat: _concat,
    Split: _split,
    Gather: _gather,
    Embedding: _embedding,
    ScatterElements: _scatter,
    MoeDispatch: _dispatch,
}
