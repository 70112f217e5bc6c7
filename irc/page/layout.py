"""Places of the nodes of a graph: levels by the longest path, within one by their operands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean as mean
from typing import Any, NamedTuple, TypeAlias

from ..ir.core import Op
from ..ir.types import TensorType

MOST = 200  # nodes of a graph
COLUMNS = 8  # nodes beside one another; a level of more has several rows


What: TypeAlias = "int | tuple[int, int, int]"


class Graph(NamedTuple):
    """Nodes (what, x, y) and edges (from, to, type of the value): x counts halves of a node."""

    width: int
    height: int
    nodes: tuple[tuple[Any, int, int], ...]
    edges: tuple[tuple[int, int, int], ...]


def graph_of(
    ops: Sequence[Op], whats: Sequence[What], number: Callable[[TensorType], int]
) -> Graph:
    """The graph in which the operations that are the same `what` are one node.

    That is the number of an operation, or (scope, first layer, last layer), of which the node has
    the number of operations as well. `number` is that of a type.
    """
    nodes = {what: i for i, what in enumerate(dict.fromkeys(whats))}
    node = {op: nodes[what] for op, what in zip(ops, whats, strict=True)}
    types: dict[tuple[int, int], int] = {}
    for op in ops:
        for value in op.operands:
            source = node.get(value.producer) if value.producer is not None else None
            if source is not None and source != node[op]:
                types.setdefault((source, node[op]), number(value.type))
    places = placed(len(nodes), list(types))
    width = max((x for x, _ in places), default=-2) + 2
    height = max((y for _, y in places), default=-1) + 1
    counts = Counter(whats)
    drawn = tuple(
        (what if isinstance(what, int) else (what[0], counts[what], *what[1:]), x, y)
        for what, (x, y) in zip(nodes, places, strict=True)
    )
    return Graph(width, height, drawn, tuple((a, b, type) for (a, b), type in types.items()))


def placed(count: int, edges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The place (x, y) of every node, of which there are `count`; edges backwards do not count."""
    before: list[list[int]] = [[] for _ in range(count)]
    after: list[list[int]] = [[] for _ in range(count)]
    for source, target in edges:
        if source < target:
            before[target].append(source)
            after[source].append(target)
    level = [0] * count
    for node in range(count):
        level[node] = 1 + max((level[i] for i in before[node]), default=-1)
    for node in range(count):
        if not before[node] and after[node]:  # beside what uses it first
            level[node] = min(level[i] for i in after[node]) - 1
    rows: dict[int, list[int]] = {}
    for node in range(count):
        rows.setdefault(level[node], []).append(node)
    widest = min(COLUMNS, max(map(len, rows.values()), default=0))
    places, y = [(0, 0)] * count, 0
    for _, nodes in sorted(rows.items()):
        nodes.sort(key=lambda n: mean([places[i][0] for i in before[n]] or [widest]))
        for start in range(0, len(nodes), COLUMNS):
            row = nodes[start : start + COLUMNS]
            for i, node in enumerate(row):
                places[node] = widest - len(row) + 2 * i, y
            y += 1
    return places
