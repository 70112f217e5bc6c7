"""The layouts of the results of an operation by its sharding rule, as in the global view."""

from __future__ import annotations

from typing import TypeAlias

from ..errors import Error
from ..ir.core import Op, Value
from ..ir.declare import placeholder
from ..ir.dtypes import is_float
from ..ir.mesh import Mesh
from ..ir.sharding import operand_words, parse_rule, result_words
from ..ir.types import Axes, TensorType
from ..ops import Cast, Pad, Slice
from ..ops.moe import Routed
from .layout import (
    NONE,
    WHOLE,
    Layout,
    Mark,
    Names,
    Place,
    axes_of,
    fits,
    global_shape,
    place_text,
    states_sizes,
)

Layouts: TypeAlias = tuple[Layout, ...]


class Ruled:
    """One operation under its sharding rule."""

    def __init__(self, op: Op, operands: Layouts, mesh: Mesh) -> None:
        view = _global_view(op, operands, mesh)
        text = view.sharding_rule()
        if text is None:
            raise Error("it has no sharding rule, so its operands must be replicated")
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
                broadcast = size == 1 and not place and word.startswith(".")
                if word != "1" and not broadcast and not layout.local:
                    seen.setdefault(word, []).append((name, place, layout.numbered))
        for word, uses in seen.items():
            places = [place for _, place, _ in uses if place]
            if not places:
                continue
            first = next(filter(states_sizes, places), places[0])
            for name, place, numbered in uses:
                if fits(place, first) or (not place and _within(numbered, first)):
                    continue
                other = next(n for n, p, _ in uses if p == first)
                here, there = place_text(place), place_text(first)
                raise Error(f"a dimension is {there} in {other} and {here} in {name}")
            where[word] = first
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
            check_once(layout)
            found.append(layout)
        return tuple(found)

    def _counted(self) -> Names:
        """The names of dimensions of operands that are the numbers of their elements."""
        rows = zip(self.words, self.op.operands, self.operands, strict=True)
        return frozenset(
            word
            for words, value, layout in rows
            if layout.local and not layout.uniform
            for word, size in zip(words, value.type.shape, strict=True)
            if size != 1  # one element, repeated along the dimension, is no number of elements
        )

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
        over = operands[op.operands.index(dict(op.named_operands())["chosen"])].dims[0]
        view.parts = view.parts * mesh.group_size(tuple(axes_of(over)))
    return view


def _within(axes: Axes, place: Place) -> bool:
    """Whether axes shard a place next to each other, in this order."""
    return bool(axes) and any(place[i : i + len(axes)] == axes for i in range(len(place)))


def check_once(layout: Layout) -> None:
    used = [axis for place in layout.dims for axis in axes_of(place)]
    used += [*layout.partial, *layout.numbered]
    for axis in used:
        if used.count(axis) > 1:
            raise Error(f"the ranks of {axis} hold shards of one operand and terms of another")
