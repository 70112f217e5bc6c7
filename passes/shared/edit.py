"""Small edits that passes make in place."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, MutableMapping, Sequence
from typing import Any, TypeVar, cast

from irc.ir.core import Function, Module, Op, Result, Value
from irc.ir.declare import types_of
from irc.ir.dims import Dim
from irc.ops import Return
from irc.pipeline import Stats
from irc.rewrite import permit

Made = TypeVar("Made", bound=Op)


def insert_before(new: Made, op: Op) -> Made:
    """Put a new operation in front of another one, as written at its place."""
    assert op.parent is not None
    new.loc = op.loc
    op.parent.insert(new, op)
    return new


def same_types(new: Op, replaced: Sequence[Value]) -> bool:
    """Whether the results of a new operation have the types of those that it replaces."""
    pairs = zip(new.results, replaced, strict=False)
    return all(result.type is value.type for result, value in pairs)


def known_before(value: Value, op: Op) -> bool:
    """Whether a value is defined before an operation, at whose position it will be used."""
    later = op.next
    while value.producer is not None and later is not None:
        if later is value.producer:
            return False
        later = later.next
    return True


def only_user(value: Value) -> Op | None:
    """The operation that uses a value once, where nothing else uses it; else None."""
    return next(iter(value.users)) if sum(value.users.values()) == 1 else None


def used_once(value: Value) -> bool:
    """Whether a value is the operand of one operation, in one place."""
    return only_user(value) is not None


def change(op: Op, **attributes: Any) -> None:
    """Give an operation other attributes before its results get their types anew."""
    for name, value in attributes.items():
        setattr(op, name, value)


def attribute_symbols(op: Op) -> set[str]:
    """The symbols in the attributes of an operation."""
    symbols: set[str] = set()
    for value in op.attributes.values():
        items = cast("tuple[Any, ...]", value) if isinstance(value, tuple) else (value,)
        symbols.update(name for item in items if isinstance(item, Dim) for name in item.symbols())
    return symbols


def retype(op: Op) -> None:
    """Infer the types of the results of an operation anew."""
    for result, type in zip(op.results, types_of(op), strict=True):
        result.type = type


def merge_equal(function: Function, name: str, key: Callable[[Op], object], stats: Stats) -> None:
    """Erase every operation of the key of an earlier one, whose results take its place.

    Operations of the key None are kept.
    """
    seen: dict[object, Op] = {}
    for op in function:
        op_key, types = key(op), tuple([result.type for result in op.results])
        first = op if op_key is None else seen.setdefault((op_key, types), op)
        if first is op or not permit(name, op):
            continue
        for old, new in zip(op.results, first.results, strict=True):
            old.replace_by(new)
        op.erase()
        stats.count("merged")


def copy_before(
    op: Op, function: Function, before: Op | None, copies: MutableMapping[Value, Value]
) -> None:
    """Put a copy of an operation into a function, over `copies` of its operands.

    The results are added to `copies`.
    """
    copy = op.rebuilt([copies.get(value, value) for value in op.operands])
    function.insert(copy, before)
    for old, new in zip(op.results, copy.results, strict=True):
        new.name = old.name
        copies[old] = new


def named_results(function: Function) -> list[Result]:
    """The declared results of a function, each with its name."""
    declared = function.results or [Result()] * len(function.returned)
    names = function.result_names()
    pairs = zip(names, declared, strict=True)
    return [Result(name, result.alias, result.varies) for name, result in pairs]


def set_results(function: Function, values: Sequence[Value], results: Sequence[Result]) -> None:
    """Return other values, under other declarations."""
    last = function.last
    assert last is not None
    new = Return(values)
    new.loc = last.loc
    last.erase()
    function.append(new)
    function.results = tuple(results)


def insert_functions(module: Module, new: Iterable[Function], before: Function) -> None:
    """Put functions before another one of a module, which calls them or is the main one."""
    functions = list(module.functions.values())
    at = functions.index(before)
    ordered = [*functions[:at], *new, *functions[at:]]
    module.functions.clear()
    module.functions.update((function.name, function) for function in ordered)


def free_name(name: str, taken: Container[str]) -> str:
    """`name`, with a number from 2 on where it is taken."""
    free, count = name, 2
    while free in taken:
        free, count = f"{name}_{count}", count + 1
    return free
