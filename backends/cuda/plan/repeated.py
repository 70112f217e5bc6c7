"""Launches of operations that are alike, made once: the others get copies over their own values."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from irc.ir.core import Op, Value, Weight

from .template import AnyTemplate, Template

Made: TypeAlias = "Sequence[AnyTemplate] | str | None"
K = TypeVar("K", Value, Op)


@dataclass(frozen=True)
class Tree:
    """An operation with those that make its operands, up to values where it ends.

    Trees of equal `key` have the same operations, attributes and types at the same positions of
    `operations` and `values`.
    """

    key: Hashable
    operations: Sequence[Op]
    values: Sequence[Value]


def tree_of(root: Op, is_end: Callable[[Value], bool], about: Callable[[Value], Hashable]) -> Tree:
    """The tree of an operation; `about` says what matters of a value where it ends."""
    words: list[Hashable] = []
    operations: dict[Op, int] = {}
    values: dict[Value, int] = {}
    waiting: list[Op | Value] = [root]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Op):
            if node in operations:
                continue
            operations[node] = len(operations)
            words += [type(node), node.present, repr(node.attributes)]
            words += [(result.type, bool(result.users)) for result in node.results]
            for result in node.results:
                values.setdefault(result, len(values))
            waiting += reversed(node.operands)
            continue
        place = values.get(node)
        if place is not None:
            words.append(("again", place))
            continue
        values[node] = len(values)
        producer = node.producer
        if producer is None or is_end(node):
            words += [node.type, about(node)]
        else:
            words.append(producer.results.index(node))
            waiting.append(producer)
    return Tree(tuple(words), list(operations), list(values))


class Repeated:
    """Makes launches once for operations of equal trees."""

    def __init__(self) -> None:
        self._made: dict[Hashable, tuple[Made, Tree]] = {}

    def __call__(self, about: Hashable, tree: Tree, make: Callable[[], Made]) -> Made:
        """What `make` gives for the tree, or for another one of equal key and `about`."""
        launches, first = self._made.get((about, tree.key), (None, None))
        if first is None:
            launches = make()
            self._made[about, tree.key] = launches, tree
            return launches
        if launches is None or isinstance(launches, str):
            return launches
        moved = _moved(launches, first, tree)
        return make() if moved is None else moved


def _moved(launches: Sequence[AnyTemplate], first: Tree, tree: Tree) -> list[AnyTemplate] | None:
    """Launches over the values of another tree; None where they use anything beside the tree but
    memory of their own."""
    values = dict(zip(first.values, tree.values, strict=True))
    operations = dict(zip(first.operations, tree.operations, strict=True))
    for template in launches:
        if not operations.keys() >= set(template.operations):
            return None
        for value in (*template.reads, *template.writes, *template.in_place.values()):
            if value in values:
                continue
            if isinstance(value, Weight) or value.producer is not None:
                return None
            values[value] = Value(value.type, None, 0, value.name)
    return [_replaced(template, values, operations) for template in launches]


def _replaced(
    template: AnyTemplate, values: Mapping[Value, Value], operations: Mapping[Op, Op]
) -> AnyTemplate:
    reads, writes = _all(template.reads, values), _all(template.writes, values)
    computed = _all(template.operations, operations)
    if not isinstance(template, Template):
        return replace(template, reads=reads, writes=writes, operations=computed)
    in_place = {values[new]: values[old] for new, old in template.in_place.items()}
    early = _all(template.early, values)
    return replace(
        template, reads=reads, writes=writes, operations=computed, in_place=in_place, early=early
    )


def _all(items: Sequence[K], others: Mapping[K, K]) -> tuple[K, ...]:
    return tuple(others.get(item, item) for item in items)
