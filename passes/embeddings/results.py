"""Results that a rewritten model gives besides its own: what callers have to look at."""

from __future__ import annotations

from collections.abc import Iterable

from irc.core import Function, Module, Op, Result, Value
from irc.mesh import Mesh
from irc.ops import Add, AllReduce, Cast, Embedding, Not, ReduceSum, Return
from irc.results import EXACT, OUTSIDE, OVERFLOW, UNKNOWN

from .policy import between
from .tables import table_of, table_shape

# What ids pass through on their way from an argument, unchanged but for their place.
_MOVES = frozenset(
    (
        "all_gather",
        "cast",
        "expand",
        "reshape",
        "shard_slice",
        "slot_ids",
        "squeeze",
        "transpose",
        "unsqueeze",
    )
)


def add_result(function: Function, name: str, value: Value) -> None:
    """Return one more value, under a name that is not taken."""
    names, aliases = function.result_names(), [r.alias for r in function.results]
    aliases = aliases or [None] * len(names)
    kept = [Result(n, alias) for n, alias in zip(names, aliases, strict=True)]
    last = function.last
    assert last is not None
    new = Return([*last.operands, value])
    new.loc = last.loc
    last.erase()
    function.append(new)
    function.results = (*kept, Result(name))


def count_outside(function: Function, ops: Iterable[Embedding], mesh: Mesh) -> int:
    """Count the ids outside the tables, per argument they come from, as results of the function;
    how many results were added."""
    counts: dict[str, Value] = {}
    taken = function.result_names()
    for op in ops:
        name = f"{source_name(op.ids)}{OUTSIDE}"
        if name in taken:
            continue
        count = _counted(function, op, mesh)
        if name in counts:
            count = _put(function, Add(counts[name], count))
        counts[name] = count
    for name, count in counts.items():
        add_result(function, name, count)
    return len(counts)


def source_name(ids: Value) -> str:
    """The argument that ids come from, UNKNOWN where it is not one alone."""
    op = ids.producer
    while op is not None and op.opname in _MOVES:
        ids = op.operands[0]
        op = ids.producer
    return ids.name if op is None and ids.name is not None else UNKNOWN


def _counted(function: Function, op: Embedding, mesh: Mesh) -> Value:
    """i32[]: how many ids of a lookup lie outside its table, on all ranks together."""
    ids, gather = op.ids, op.ids.producer
    if gather is not None and gather.opname == "all_gather":
        ids = gather.operands[0]  # every rank counts its own
    inside = _tree(function, between(ids, table_shape(table_of(op.table))[0]))
    count = _put(function, Cast(_put(function, Not(inside)), dtype="i32"))
    if count.type.rank:
        count = _put(function, ReduceSum(count, dims=tuple(range(count.type.rank))))
    over = tuple(axis for axis in mesh.names if axis in count.type.partial)
    return _put(function, AllReduce(count, axis=".".join(over))) if over else count


def _put(function: Function, op: Op) -> Value:
    function.insert(op, function.last)
    return op.result


def _tree(function: Function, root: Op) -> Value:
    """Insert a fresh expression, operands first."""
    for value in root.operands:
        producer = value.producer
        if producer is not None and producer.parent is None:
            _tree(function, producer)
    return _put(function, root)


def count_overflow(function: Function, lost: list[Value]) -> None:
    """The ids that found no room, as a result of the function."""
    total = lost[0]
    for value in lost[1:]:
        total = _put(function, Add(total, value))
    add_result(function, OVERFLOW, total)


def add_exact(module: Module, function: Function) -> Function:
    """A copy of the main function that has room for every id, for the calls that overflowed."""
    new = Function(EXACT, [(str(arg.name), arg.type) for arg in function.args])
    values: dict[Value, Value] = dict(zip(function.args, new.args, strict=True))
    names = function.result_names()
    kept = [i for i, name in enumerate(names) if name != OVERFLOW]
    for op in function:
        operands = [values.get(value, value) for value in op.operands]
        changes: dict[str, object] = {}
        if op.opname == "return":
            copy: Op = Return([operands[i] for i in kept])
        else:
            if op.opname == "cyclic_embedding":
                changes = {"capacity": 0, "queues": ()}
            copy = op.rebuilt(operands, **changes)
        copy.loc = op.loc
        new.append(copy)
        for old, result in zip(op.results, copy.results, strict=True):
            result.name = old.name
            values[old] = result
    new.results = tuple(Result(names[i], function.results[i].alias) for i in kept)
    known = list(module.functions.items())
    module.functions.clear()
    for name, each in known:
        if each is function:  # in front of it: behind all that it calls, and not the main one
            module.functions[EXACT] = new
        module.functions[name] = each
    return new
