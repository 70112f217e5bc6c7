"""Modules as tables of numbers in which equal layers are stored once, over all passes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ..analysis.communication import messages_of
from ..analysis.cost import FREE, cost_of
from ..analysis.sizes import LocalSizes, typical_sizes
from ..analysis.topology import Topology
from ..analysis.topology_file import default_topology
from ..errors import Error
from ..ir.core import Function, Module, Op, Result, Value, Weight
from ..ir.string_literals import hint_shown, shown_name
from ..ir.types import TensorType
from ..text.printer import attributes_text
from .layout import MOST, Graph, What, graph_of

T = TypeVar("T", bound=Hashable)
Unit: TypeAlias = tuple[str, int]  # ("model.layers", 7), or (a scope, -1)
_Row: TypeAlias = tuple[Any, ...]  # see `Folder._row`


def unit_of(scope: str) -> Unit:
    """The layer that a scope is in, else its first two words."""
    words = scope.split(".")
    for i, word in enumerate(words):
        if word.isdecimal() and str(int(word)) == word:
            return ".".join(words[:i]), int(word)
    return ".".join(words[:2]), -1


def scope_of(op: Op) -> str:
    """The module path of an operation, "" without one."""
    return op.loc.scope if op.loc is not None else ""


def free_mark(texts: Sequence[str]) -> str:
    """A character that is in no text, nor escaped there."""
    marks = map(chr, range(0xE000, 0xF8FF))
    return next(m for m in marks if not any(m in t or f"\\u{ord(m):04x}" in t for t in texts))


@cache
def topology() -> Topology:
    """The machine that times are expected on."""
    return default_topology()


def rounded(number: float) -> float:
    """A number with four digits that count."""
    return float(f"{number:.4g}")


class Interned(dict[T, int]):
    """Values with numbers, each once."""

    def __call__(self, value: T) -> int:
        return self.setdefault(value, len(self))


class _Run(NamedTuple):
    """Operations of one unit that follow one another, and the values that they take from before.

    `names` are those of results and weights by (row, slot); slot -1 - i is that of operand i.
    """

    unit: Unit
    ops: list[Op]
    inputs: dict[int, int]
    names: dict[tuple[int, int], int]


class Folder:
    """The tables that all states of a page share; `add` gives the state of a module."""

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self.strings, self.types = Interned[str](), Interned[TensorType]()
        self.rows, self.graphs = Interned[_Row](), Interned[Graph]()
        self.hits, self.misses, self.kernels, self.signatures = (Interned[_Row]() for _ in range(4))
        self.blocks: list[dict[str, Any]] = []
        self.units: list[dict[str, Any]] = []
        self._block_numbers, self._unit_numbers = Interned[_Row](), Interned[_Row]()
        self._names: list[dict[tuple[int, int], int]] = []  # by block

    def tables(self) -> dict[str, Any]:
        """The shared tables, as the page has them."""
        names = ("strings", "rows", "graphs", "signatures", "hits", "misses", "kernels")
        return {
            "mark": self.mark,
            "blocks": self.blocks,
            "units": self.units,
            "types": list(map(_of_type, self.types)),
            **{name: list(getattr(self, name)) for name in names},
        }

    def add(self, module: Module) -> dict[str, Any]:
        """The state of a module: its functions as runs of blocks."""
        sizes = LocalSizes(module.mesh, typical_sizes(module))
        return {"functions": [self._function(f, sizes) for f in module.functions.values()]}

    def abstract(self, text: str, number: int) -> int:
        """A text with the mark for the first word, between dots, that is the layer's number."""
        if number >= 0:
            text = re.sub(rf"(?<![^.\"/]){number}(?![^.\"/])", self.mark, text, count=1)
        return self.strings(text)

    def folded(self, texts: Sequence[str]) -> tuple[_Row, int]:
        """Texts with the mark for the number of the first layer that they name, and the number."""
        number = re.search(r"(?<=\.)(0|[1-9]\d*)(?=[.\s]|$)", " ".join(texts))
        if number is None:
            return tuple(map(self.strings, texts)), -1
        word = re.compile(rf"(?<=\.){number[1]}(?!\w)")
        return tuple(self.strings(word.sub(self.mark, text)) for text in texts), int(number[1])

    # -- functions

    def _function(self, function: Function, sizes: LocalSizes) -> dict[str, Any]:
        ops = list(function)
        values = [*function.args, *(result for op in ops for result in op.results)]
        index = {value: i for i, value in enumerate(values)}
        runs: list[list[Any]] = []
        blocks: dict[Unit, list[int]] = {}
        members: dict[Unit, list[Op]] = {}
        for unit, group in groupby(ops, lambda op: unit_of(scope_of(op))):
            run = _Run(unit, list(group), {}, {})
            block = self._block(run, index, sizes)
            stored = self._names[block]
            changed = [(*key, name) for key, name in run.names.items() if stored[key] != name]
            prefix = -1 if unit[1] < 0 else self.strings(unit[0])
            overrides = [each for change in changed for each in change]
            runs.append([block, prefix, unit[1], list(run.inputs), overrides])
            blocks.setdefault(unit, []).append(block)
            members.setdefault(unit, []).extend(run.ops)
        layers: list[list[int]] = []
        nodes: dict[Unit, list[int]] = {}  # those of equal layers are one list
        for unit, unit_ops in members.items():
            entry = [
                self.strings(unit[0]),
                unit[1],
                unit[1],
                self._unit(blocks[unit], unit_ops, unit),
            ]
            last = layers[-1] if layers and unit[1] > 0 else [-1, -1, -1, -1]
            if [last[0], last[2] + 1, last[3]] == [entry[0], *entry[2:]]:
                last[2] += 1
            else:
                layers.append(entry)
            nodes[unit] = layers[-1]
        return {
            "name": function.name,
            "signature": self.signatures(self._signature(function)),
            "runs": runs,
            "layers": layers,
            "graphs": self._overview(ops, nodes),
        }

    def _signature(self, function: Function) -> _Row:
        """Names and types of arguments; names, types and aliased arguments of results."""
        args = [(self.strings(shown_name(str(a.name))), self.types(a.type)) for a in function.args]
        declared = function.results or (Result(),) * len(function.returned)
        results = [
            (self._named(each.name), self.types(value.type), self._named(each.alias))
            for each, value in zip(declared, function.returned, strict=True)
        ]
        return tuple(args), tuple(results)

    def _named(self, name: str | None) -> int:
        return self.strings(shown_name(name)) if name else -1

    def _block(self, run: _Run, index: Mapping[Value, int], sizes: LocalSizes) -> int:
        """The block of a run: the first one that differs in names only."""
        first = index[run.ops[0].results[0]] if run.ops[0].results else len(index)
        rows = [self._row(run, i, index, first) for i in range(len(run.ops))]
        weights = [self.types(v.type) for op in run.ops for v in op.operands if v.owner is None]
        key = (*map(_without_names, rows), tuple(weights), run.unit[1] < 0)
        block = self._block_numbers(key)
        if block == len(self.blocks):
            self.blocks.append({"rows": list(map(self.rows, rows)), **_costs(run.ops, sizes)})
            self._names.append(run.names)
        return block

    def _row(self, run: _Run, at: int, index: Mapping[Value, int], first: int) -> _Row:
        """One operation; operands are distances back in the run, inputs of the run, or weights."""
        op, number = run.ops[at], run.unit[1]
        own = index[op.results[0]] if op.results else len(index)
        operands: list[Any] = []
        for slot, value in enumerate(op.operands):
            if isinstance(value, Weight):
                name = run.names[at, -1 - slot] = self.abstract(value.name, number)
                operands.append((name,))
            elif index[value] >= first:
                operands.append(own - index[value])
            else:
                operands.append(-1 - run.inputs.setdefault(index[value], len(run.inputs)))
        results: list[int] = []
        for slot, value in enumerate(op.results):
            name = run.names[at, slot] = self._hint(value.name or "", run)
            results += [name, self.types(value.type)]
        return (
            self.strings(op.opname),
            self.abstract(scope_of(op), number),
            self.strings(op.loc.file) if op.loc is not None else -1,
            op.loc.line if op.loc is not None else 0,
            tuple(results),
            tuple(operands),
            tuple(map(self.strings, op.present)),
            self.strings(attributes_text(op).strip()),
        )

    def _hint(self, name: str, run: _Run) -> int:
        """The name of a result; with the mark where it is `layers_7`, or a cache as `k7`."""
        prefix, number = run.unit
        own = (f"{prefix.rpartition('.')[2]}_{number}", f"k{number}", f"v{number}")
        name = hint_shown(name)
        return self.strings(name.removesuffix(str(number)) + self.mark if name in own else name)

    # -- graphs

    def _unit(self, blocks: list[int], ops: Sequence[Op], unit: Unit) -> int:
        """The unit of these blocks, with the graphs of its scopes of several operations."""
        number = self._unit_numbers(tuple(blocks))
        if number < len(self.units):
            return number
        root = _path(*unit)
        inside = Counter(each for op in ops for each in _scopes(scope_of(op)) if _is_in(each, root))
        names = {each: each[len(root) :].lstrip(".") for each, n in inside.items() if n > 1}

        def child(scope: str, top: str) -> What | None:
            below = next((each for each in _scopes(scope) if len(each) > len(top)), "")
            return (self.abstract(below, unit[1]), -1, -1) if below else None

        graphs = self._graphs(ops, {root: "", **names}, child)
        self.units.append({"blocks": blocks, "graphs": graphs})
        return number

    def _overview(self, ops: Sequence[Op], nodes: Mapping[Unit, Sequence[int]]) -> dict[str, int]:
        """The graphs of the scopes above units, whose nodes are operations or units."""

        def layer(scope: str, top: str) -> What:
            (prefix, number), (_, first, last, _) = unit_of(scope), nodes[unit_of(scope)]
            path = _path(prefix, number if number < 0 else self.mark)
            return self.strings(path), first, last

        above = {scope: scope for unit in nodes for scope in _scopes(_path(*unit))[:-1]}
        return self._graphs(ops, {"": "", **above}, layer)

    def _graphs(
        self, ops: Sequence[Op], tops: Mapping[str, str], coarse: Callable[[str, str], What | None]
    ) -> dict[str, int]:
        """The graphs of scopes, by the names in `tops`.

        Nodes are operations if they are few, else what `coarse` makes of scopes. Where that is too
        much as well, graphs `name#0`, `name#1`, ... have a part of the operations each.
        """
        scopes, graphs = [scope_of(op) for op in ops], dict[str, int]()
        for top, name in tops.items():
            chosen = [i for i, scope in enumerate(scopes) if _is_in(scope, top)]
            whats: list[What] = [*chosen]
            if len(chosen) > MOST:
                whats = [coarse(scopes[i], top) or i for i in chosen]
            itself = {(self.strings(top), -1, -1)}
            if len(chosen) > MOST and (len(set(whats)) > MOST or set(whats) == itself):
                whats = [(self.strings(f"{name}#{n // MOST}"), -1, -1) for n in range(len(chosen))]
                for start in range(0, len(chosen), MOST):
                    few = chosen[start : start + MOST]
                    graph = graph_of([ops[i] for i in few], few, self.types)
                    graphs[f"{name}#{start // MOST}"] = self.graphs(graph)
            graphs[name] = self.graphs(graph_of([ops[i] for i in chosen], whats, self.types))
        return graphs


def _costs(ops: Iterable[Op], sizes: LocalSizes) -> dict[str, Any]:
    """Expected time and bytes of operations, -1 where a symbol has no size; what they send."""
    costs: dict[str, Any] = {"us": [], "bytes": [], "comm": {}}
    for at, op in enumerate(ops):
        try:
            cost = FREE if op.opname == "call" else cost_of(op, sizes)
            sent = messages_of(op, sizes, topology())
            us, moved = cost.time(topology().device), round(cost.bytes)
            us += sum(message.us for message in sent)
        except Error:
            us, moved, sent = -1, -1, []
        costs["us"].append(rounded(us))
        costs["bytes"].append(moved)
        for each in sent[:1]:
            figures = each.group_size, round(each.sent), rounded(each.us)
            costs["comm"][str(at)] = [each.kind, each.axis, *figures]
    return costs


def _of_type(type: TensorType) -> list[Any]:
    """The text, the axes that shard it, those of a partial sum or varying; the global text."""
    whole, is_shard = type.global_type, type.of is not None and any(type.of.axes)
    axes = sorted({axis for axes in whole.axes for axis in axes})
    return [str(type), axes, whole.partial, whole.varying, str(type.of) if is_shard else ""]


def _without_names(row: _Row) -> _Row:
    op, scope, file, line, results, operands, present, attributes = row
    kinds = tuple(0 if isinstance(each, tuple) else each for each in operands)
    return op, scope, file, line, results[1::2], kinds, present, attributes


def _path(prefix: str, number: int | str) -> str:
    return prefix if number == -1 else f"{prefix}.{number}".removeprefix(".")


def _is_in(scope: str, outer: str) -> bool:
    return not outer or scope == outer or scope.startswith(outer + ".")


def _scopes(scope: str) -> list[str]:
    """A scope and those that contain it, the outermost first."""
    words = scope.split(".")
    return [".".join(words[:n]) for n in range(1, len(words) + 1)]
