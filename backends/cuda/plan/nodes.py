"""The launches of a function at given sizes, in an order in which every value is there in time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from irc.analysis.cost import cost_of
from irc.analysis.sizes import LocalSizes
from irc.ir.core import Function, Op, Value, Weight
from irc.ir.dims import Dim, bind, product
from irc.ir.mesh import Mesh
from irc.ops.collective import Exchange

from .storage import Storage, leaves, view_of
from .template import FUSIONS, KERNELS, AnyTemplate, CallTemplate, Fused, Sizes

# Floating-point operations per element of a weight, from which on it is unpacked into memory: then
# a fast product saves more than the element costs that is written and read once more.
UNPACKING = 48


@dataclass(frozen=True, eq=False)
class Node:
    """The launches of one or several operations; `position` is that of the first of these."""

    position: int
    templates: tuple[AnyTemplate, ...]

    @property
    def reads(self) -> dict[Value, None]:
        """What it reads that it does not write itself, views as what they are views of."""
        own = {view_of(value) for template in self.templates for value in template.writes}
        found = (view_of(v) for template in self.templates for v in read_by(template))
        return {value: None for value in found if value not in own}

    @property
    def writes(self) -> dict[Value, None]:
        """What it writes."""
        return {value: None for template in self.templates for value in template.writes}


def read_by(template: AnyTemplate) -> tuple[Value, ...]:
    """What a launch reads, with what it updates in place."""
    return tuple(dict.fromkeys((*template.reads, *template.in_place.values())))


class Launches:
    """The nodes of a function at given sizes, and why values are stored and operations not fused.

    `apart`: mesh axes whose ranks do not share memory -> the reason. `stored` has the reason per
    value in memory, `declined` that of fusions per operation.
    """

    def __init__(
        self,
        function: Function,
        sizes: Sizes,
        fuse: bool = True,
        apart: Mapping[str, str] | None = None,
    ) -> None:
        self.function, self.sizes, self._apart = function, sizes, apart or {}
        self.declined: list[tuple[Op, str]] = []
        self._positions = {op: i for i, op in enumerate(function)}
        fused = self._fused() if fuse else []
        while True:
            live, needed = self._live(fused)
            used = [_with_readers(each, needed) for each in fused]
            storage = Storage(function, live, *_touched(used))
            self.stored: Mapping[Value, str] = storage.reasons
            launched = {self._node(each): each for each in used if each.templates}
            nodes = [*self._unfused(live), *launched]
            self.nodes = in_order(nodes)
            if len(self.nodes) == len(nodes):
                return
            stuck = [each for node, each in launched.items() if node not in set(self.nodes)][-1]
            self.declined.append((stuck.covers[0], "a result is needed before an operand"))
            fused = [each for each in fused if each.covers != stuck.covers]

    def _fused(self) -> list[Fused]:
        """The fusions, chosen from the last operation to the first."""
        chosen: list[Fused] = []
        covered: set[Op] = set()
        for op in reversed(self.function):
            if op in covered:
                continue
            for rule in FUSIONS.get(type(op), ()):
                found = rule(op, self.sizes)
                if isinstance(found, Fused):
                    found = _refused(found, covered, self.function) or found
                if isinstance(found, Fused):
                    found = _unpacked(found, self.sizes) or self._missing(found) or found
                if isinstance(found, Fused):
                    chosen.append(found)
                    covered.update(found.covers)
                    break
                if found:
                    self.declined.append((op, found))
        return chosen[::-1]

    def _missing(self, fused: Fused) -> str:
        """Why the ranks cannot write to each other's memory, where launches need that."""
        axes = (each.peers for each in fused.templates)
        return next((self._apart[each] for each in axes if each in self._apart), "")

    def _node(self, fused: Fused) -> Node:
        return Node(min(self._positions[op] for op in fused.covers), fused.templates)

    def _live(self, fused: Sequence[Fused]) -> tuple[list[Op], set[Value]]:
        """The operations that have to run and are not fused, in order; the values that are read."""
        writers = {v: t for each in fused for t in each.templates for v in t.writes}
        found: set[Op] = set()
        seen: set[Value] = set()
        work = list(self.function.returned)
        while work:
            value = work.pop()
            if value in seen:
                continue
            seen.add(value)
            if value in writers:
                work += read_by(writers[value])
            elif value.producer is not None:
                found.add(value.producer)
                work += value.producer.operands
        return [op for op in self.function if op in found], seen

    def _unfused(self, live: Iterable[Op]) -> Iterable[Node]:
        from ..codegen.kernels import elementwise

        for op in live:
            if isinstance(op, Exchange):
                yield Node(self._positions[op], (_collective(op),))
            elif type(op) in KERNELS:
                yield Node(self._positions[op], tuple(KERNELS[type(op)](op, self.stored)))
            elif not (op.is_view and self._in_memory(view_of(op.results[0]))):
                for value in op.results:
                    if value in self.stored:
                        yield Node(self._positions[op], (elementwise([value], self.stored),))

    def _in_memory(self, value: Value) -> bool:
        return value.producer is None or value in self.stored


def _with_readers(fused: Fused, needed: Collection[Value]) -> Fused:
    """The launches that write what is read."""
    kept = [each for each in fused.templates if any(value in needed for value in each.writes)]
    return Fused(tuple(kept), fused.covers)


def _touched(fused: Iterable[Fused]) -> tuple[set[Value], set[Value]]:
    templates = [template for each in fused for template in each.templates]
    written = {value for template in templates for value in template.writes}
    return {value for template in templates for value in read_by(template)}, written


def _refused(fused: Fused, covered: set[Op], function: Function) -> str:
    """Why operations cannot be fused, or nothing."""
    if taken := covered.intersection(fused.covers):
        return f"{next(iter(taken)).opname} is fused with others"
    written = {value for template in fused.templates for value in template.writes}
    inside = set(fused.covers)
    for op in fused.covers:
        for value in op.results:
            if value in written:
                continue
            if value in function.returned or not inside.issuperset(value.users):
                return f"the result of {op.opname} is used elsewhere, too"
    return ""


def _unpacked(fused: Fused, sizes: Sizes) -> str:
    """Why weights are better unpacked inside of kernels than into memory, or nothing."""
    local = LocalSizes(Mesh(), sizes)
    flops = sum(cost_of(op, local).flops for op in fused.covers)
    for template in fused.templates:
        for value in template.reads:
            if is_weight(value) and flops < UNPACKING * local.count(value.type):
                return f"%{value.name or '_'} would be unpacked into memory for few rows"
    return ""


def is_weight(value: Value) -> bool:
    """Whether a value is computed from weights alone."""
    found, work = False, [value] if value.producer is not None else []
    while work:
        each = work.pop()
        if isinstance(each, Weight):
            found = True
        elif each.producer is None:
            return False
        else:
            work += each.producer.operands
    return found


def _collective(op: Exchange) -> CallTemplate:
    """The NCCL call of a collective along dimension 0."""
    name = op.opname.removeprefix("collective_")

    def settings(sizes: Sizes) -> Mapping[str, int | str]:
        count = product(op.x.type.shape)
        elements = bind(count, sizes)
        assert not isinstance(elements, Dim)
        attributes = op.attributes
        return {
            "axis": op.axis,
            "dtype": op.x.type.dtype,
            "elements": elements,
            "ranks": op.group_size,
            "op": attributes.get("op", "none"),
            "root": attributes.get("root", -1),
        }

    return CallTemplate("nccl", name, (op.x,), op.results, settings, operations=(op,))


def in_order(nodes: Sequence[Node]) -> list[Node]:
    """The nodes, each behind those it depends on, by position; without those that need each other.

    What updates a value in place comes behind what reads the value, where that is possible.
    """
    found = _sorted(nodes, _depends(nodes, updates=True))
    return found if len(found) == len(nodes) else _sorted(nodes, _depends(nodes))


def _depends(nodes: Sequence[Node], updates: bool = False) -> list[set[int]]:
    writer = {value: i for i, node in enumerate(nodes) for value in node.writes}
    before = [{writer[v] for v in node.reads if v in writer} for node in nodes]
    if not updates:
        return before
    readers: dict[Value, list[int]] = {}
    for i, node in enumerate(nodes):
        for value in node.reads:
            readers.setdefault(value, []).append(i)
    for i, node in enumerate(nodes):
        for template in node.templates:
            for old in template.in_place.values():
                before[i].update(j for j in readers.get(view_of(old), ()) if j != i)
    return before


def _sorted(nodes: Sequence[Node], before: Sequence[set[int]]) -> list[Node]:
    after: list[list[int]] = [[] for _ in nodes]
    for i, needed in enumerate(before):
        for j in needed:
            after[j].append(i)
    left = [len(needed) for needed in before]
    ready = [(nodes[i].position, i) for i in range(len(nodes)) if not left[i]]
    heapify(ready)
    found: list[Node] = []
    while ready:
        _, i = heappop(ready)
        found.append(nodes[i])
        for j in after[i]:
            left[j] -= 1
            if not left[j]:
                heappush(ready, (nodes[j].position, j))
    return found


def computed(template: AnyTemplate, stored: Mapping[Value, str]) -> dict[Op, None]:
    """The operations that a launch computes, those inside its kernel included, in order."""
    found: dict[Op, None] = dict.fromkeys(template.operations)
    for value in template.writes:
        if value.producer is not None:
            found[value.producer] = None
    for op in list(found):
        for operand in op.operands:
            found |= leaves(operand, stored.__contains__)[1]
    return found
