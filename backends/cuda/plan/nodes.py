"""The launches of a function at given sizes, in an order in which every value is there in time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush

from irc.ir.core import Function, Op, Value, Weight
from irc.ir.dims import Dim, bind, product
from irc.ops.collective import Exchange
from irc.rewrite import replace

from .regime import Regime
from .repeated import Made, Repeated, tree_of
from .storage import Storage, leaves, view_of
from .template import KERNELS, LAUNCHES, AnyTemplate, CallTemplate, Sizes

# Rows from which on a weight is unpacked into memory: then a fast product saves more than the
# elements cost that are written and read once more.
UNPACKING = 24


@dataclass(frozen=True, eq=False)
class Node:
    """The launches of one operation; `position` is where it stands in the function."""

    position: int
    templates: tuple[AnyTemplate, ...]

    @property
    def reads(self) -> dict[Value, None]:
        """What it reads that it does not write itself, views as what they are views of."""
        own = {view_of(value) for template in self.templates for value in template.writes}
        values = (view_of(v) for template in self.templates for v in read_by(template))
        return {value: None for value in values if value not in own}

    @property
    def writes(self) -> dict[Value, None]:
        """What it writes."""
        return {value: None for template in self.templates for value in template.writes}


def read_by(template: AnyTemplate) -> tuple[Value, ...]:
    """What a launch reads, with what it updates in place."""
    return tuple(dict.fromkeys((*template.reads, *template.in_place.values())))


class Launches:
    """The nodes of a function for a regime, and why values are stored and operations not fused.

    `expand` puts simpler operations in place of a composite one, and gives those. `stored` has the
    reason per value in memory, `declined` that of makers per operation.
    """

    def __init__(
        self,
        function: Function,
        regime: Regime,
        expand: Callable[[Op], list[Op]],
        fuse: bool = True,
    ) -> None:
        self.function, self._regime = function, regime
        self.declined: list[tuple[Op, str]] = []
        self._repeated = Repeated()
        fused = self._made(expand, fuse)
        self._positions = {op: i for i, op in enumerate(function)}
        live, needed = self._live(fused)
        read: set[Value] = set()
        written: list[Value] = []
        nodes: list[Node] = []
        for op, templates in fused.items():
            kept = tuple(t for t in templates if any(value in needed for value in t.writes))
            if kept:
                nodes.append(Node(self._positions[op], kept))
                read.update(value for template in kept for value in read_by(template))
                written += [value for template in kept for value in template.writes]
        self.stored = regime.stored = Storage(function, live, read, written).reasons
        self.nodes = in_order(_weights_late([*self._others(live), *nodes]))

    def _made(
        self, expand: Callable[[Op], list[Op]], fuse: bool
    ) -> dict[Op, tuple[AnyTemplate, ...]]:
        """The launches of operations that read operands from memory; composite operations without
        any are expanded."""
        launches: dict[Op, tuple[AnyTemplate, ...]] = {}
        parts: dict[object, Op] = {}
        waiting = list(self.function)[::-1]
        while waiting:
            op = waiting.pop()
            templates = self._asked(op) if fuse else None
            if templates is not None:
                launches[op] = templates
            elif op.composite:
                fresh = expand(op)
                waiting += reversed([part for part in fresh if not _merged(part, parts)])
        return launches

    def _asked(self, op: Op) -> tuple[AnyTemplate, ...] | None:
        """The launches of the first maker that has some."""
        makers = LAUNCHES.get(type(op), ())
        tree = tree_of(op, _is_computed, self._about) if makers else None
        for maker in makers:
            assert tree is not None
            answer = self._repeated(maker, tree, partial(maker, op, self._regime))
            if answer is None:
                continue
            refusal = answer if isinstance(answer, str) else self._refusal(op, answer)
            if refusal or isinstance(answer, str):
                self.declined.append((op, refusal))
            else:
                return tuple(answer)
        return None

    def _about(self, value: Value) -> Hashable:
        """What makers may look at of a value that is in memory or computed apart."""
        producer = value.producer
        made_by = "" if producer is None else f"{producer.opname} {producer.attributes}"
        return self._regime.is_constant(value), isinstance(value, Weight), made_by, is_weight(value)

    def _refusal(self, op: Op, templates: Sequence[AnyTemplate]) -> str:
        """Why launches are not taken: ranks cannot write to each other's memory, or few rows do not
        pay for weights that are unpacked into memory."""
        apart, rows = self._regime.apart, product(op.operands[0].type.shape[:-1])
        for template in templates:
            if template.peers in apart:
                return apart[template.peers]
            for value in template.reads:
                if is_weight(value) and self._regime.bucket(rows, (UNPACKING - 1,)) is not None:
                    return f"%{value.name or '_'} would be unpacked into memory for few rows"
        return ""

    def _live(self, fused: Mapping[Op, Sequence[AnyTemplate]]) -> tuple[list[Op], set[Value]]:
        """The other operations that have to run, in order; the values that are read."""
        writers = {v: t for templates in fused.values() for t in templates for v in t.writes}
        running: set[Op] = set()
        seen: set[Value] = set()
        waiting = list(self.function.returned)
        while waiting:
            value = waiting.pop()
            if value in seen:
                continue
            seen.add(value)
            if value in writers:
                waiting += read_by(writers[value])
            elif value.producer is not None:
                running.add(value.producer)
                waiting += value.producer.operands
        return [op for op in self.function if op in running], seen

    def _others(self, live: Iterable[Op]) -> Iterable[Node]:
        for op in live:
            if isinstance(op, Exchange):
                yield self._launched(op, "collective", partial(_collective, op))
            elif type(op) in KERNELS:
                yield self._launched(
                    op, KERNELS[type(op)], partial(KERNELS[type(op)], op, self._regime)
                )
            elif not (op.is_view and self._in_memory(view_of(op.results[0]))):
                for value in op.results:
                    if value in self.stored:
                        yield self._elementwise(op, value)

    def _elementwise(self, op: Op, value: Value) -> Node:
        from ..codegen.kernels import elementwise

        return self._launched(op, value.index, lambda: [elementwise([value], self.stored)])

    def _launched(self, op: Op, about: Hashable, make: Callable[[], Made]) -> Node:
        """The launches of an operation, whose operands are stored or computed in its kernels."""
        tree = tree_of(op, self._in_memory, lambda value: isinstance(value, Weight))
        templates = self._repeated(about, tree, make)
        assert templates is not None and not isinstance(templates, str)
        return Node(self._positions[op], tuple(templates))

    def _in_memory(self, value: Value) -> bool:
        return value.producer is None or value in self.stored


def _is_computed(value: Value) -> bool:
    """Whether makers of launches from memory do not look through what computes a value."""
    producer = value.producer
    return producer is None or not (producer.cheap or producer.moves_data)


def _merged(part: Op, parts: dict[object, Op]) -> bool:
    """Whether an operation of an expansion is given up for an equal one of an earlier expansion."""
    if not part.pure or part.parent is None:
        return False
    key = type(part), part.operands, part.present, repr(part.attributes)
    first = parts.setdefault(key, part)
    if first is part or first.parent is None:
        parts[key] = part
        return False
    replace(part, first.results)
    return True


def is_weight(value: Value) -> bool:
    """Whether a value is computed from weights alone."""
    reads_weight, work = False, [value] if value.producer is not None else []
    while work:
        operand = work.pop()
        if isinstance(operand, Weight):
            reads_weight = True
        elif operand.producer is None:
            return False
        else:
            work += operand.producer.operands
    return reads_weight


def _collective(op: Exchange) -> list[CallTemplate]:
    """The NCCL call of a collective along dimension 0."""
    name, count = op.opname.removeprefix("collective_"), product(op.x.type.shape)

    def settings(sizes: Sizes) -> Mapping[str, int | str]:
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

    return [CallTemplate("nccl", name, (op.x,), op.results, settings, operations=(op,))]


def _weights_late(nodes: Sequence[Node]) -> list[Node]:
    """The nodes, those that compute weights at the position of the first that reads them: so few
    unpacked weights are in memory at a time."""
    first: dict[Value, int] = {}
    moved: list[Node] = []
    for node in sorted(nodes, key=lambda node: -node.position):
        if node.writes and all(map(is_weight, node.writes)):
            position = min(first.get(value, node.position) for value in node.writes)
            node = Node(position, node.templates)
        moved.append(node)
        for value in node.reads:
            first[value] = min(first.get(value, node.position), node.position)
    return moved


def in_order(nodes: Sequence[Node]) -> list[Node]:
    """The nodes, each behind those it depends on, by position.

    What updates a value in place comes behind what reads the value, where that is possible.
    """
    try:
        return _sorted(nodes, _depends(nodes, updates=True))
    except CycleError:
        return _sorted(nodes, _depends(nodes))


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
    sorter = TopologicalSorter(dict(enumerate(before)))
    sorter.prepare()
    ready: list[tuple[int, int]] = []
    order: list[Node] = []
    while sorter.is_active():
        for i in sorter.get_ready():
            heappush(ready, (nodes[i].position, i))
        i = heappop(ready)[1]
        order.append(nodes[i])
        sorter.done(i)
    return order


def computed(template: AnyTemplate, stored: Mapping[Value, str]) -> dict[Op, None]:
    """The operations that a launch computes, those inside its kernel included, in order."""
    operations: dict[Op, None] = dict.fromkeys(template.operations)
    for value in template.writes:
        if value.producer is not None:
            operations[value.producer] = None
    for op in list(operations):
        for operand in op.operands:
            operations |= leaves(operand, stored.__contains__)[1]
    return operations
