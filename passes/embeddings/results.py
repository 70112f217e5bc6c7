"""Results added to a rewritten model: counts that callers check, and the function `exact`."""

from __future__ import annotations

from collections.abc import Iterable

from irc.ir.core import Function, Module, Op, Result, Value
from irc.ir.mesh import Mesh
from irc.ir.result_names import EXACT, OUT_OF_RANGE, OVERFLOW, UNKNOWN
from irc.ops import Add, AllReduce, Cast, CyclicEmbedding, Embedding, Not, ReduceSum, Return

from ..shared.edit import copy_before, insert_functions, named_results, set_results
from .policy import between
from .tables import table_of, table_shape


def add_result(function: Function, name: str, value: Value) -> None:
    """Return one more value, under a name that is not taken."""
    set_results(function, [*function.returned, value], [*named_results(function), Result(name)])


def count_outside(function: Function, ops: Iterable[Embedding], mesh: Mesh) -> int:
    """Count out-of-range ids, per argument they come from, as results of the function.

    Returns how many results were added.
    """
    counts: dict[str, Value] = {}
    taken = function.result_names()
    for op in ops:
        name = f"{source_name(function, op.ids)}{OUT_OF_RANGE}"
        if name in taken:
            continue
        count = _count(op, mesh)
        count = Add(counts[name], count) if name in counts else count
        counts[name] = _insert(function, count)
    for name, count in counts.items():
        add_result(function, name, count)
    return len(counts)


def source_name(function: Function, ids: Value) -> str:
    """The argument that ids are computed from, UNKNOWN where it is not a single one."""
    found = {ids}
    pending = [ids]
    while pending:
        op = pending.pop().producer
        new = {*op.operands} - found if op is not None else set[Value]()
        found |= new
        pending += new
    names = [arg.name for arg in function.args if arg in found]
    return names[0] if len(names) == 1 and names[0] is not None else UNKNOWN


def _count(op: Embedding, mesh: Mesh) -> Op:
    """i32[]: how many ids of a lookup are out of range, on all ranks together."""
    ids, gather = op.ids, op.ids.producer
    if gather is not None and gather.opname == "all_gather":
        ids = gather.operands[0]  # every rank counts its own
    inside = between(ids, table_shape(table_of(op.table))[0])
    count: Op = Cast(Not(inside), dtype="i32")
    if ids.type.ndim:
        count = ReduceSum(count, dims=tuple(range(ids.type.ndim)))
    over = tuple(axis for axis in mesh.names if axis in count.result.type.partial)
    return AllReduce(count, axis=".".join(over)) if over else count


def _insert(function: Function, root: Op) -> Value:
    """The result of a new expression, inserted at the end, operands first."""
    for value in root.operands:
        if value.producer is not None and value.producer.parent is None:
            _insert(function, value.producer)
    function.insert(root, function.last)
    return root.result


def count_overflow(function: Function, lost: list[Value]) -> None:
    """Add the number of ids beyond the capacity as a result of the function."""
    total = lost[0]
    for value in lost[1:]:
        total = _insert(function, Add(total, value))
    add_result(function, OVERFLOW, total)


def add_exact(module: Module, function: Function) -> Function:
    """A copy of the main function without a capacity, for the calls that overflowed."""
    new = Function(EXACT, [(str(arg.name), arg.type) for arg in function.args])
    values: dict[Value, Value] = dict(zip(function.args, new.args, strict=True))
    results = named_results(function)
    kept = [i for i, result in enumerate(results) if result.name != OVERFLOW]
    for op in function:
        if isinstance(op, CyclicEmbedding):
            copy_before(op, new, None, values, capacity=0, queues=(), distinct=False)
        elif op.opname != "return":
            copy_before(op, new, None, values)
    end = Return([values.get(value, value) for value in map(function.returned.__getitem__, kept)])
    end.loc = function.last.loc if function.last is not None else None
    new.append(end)
    new.results = tuple(results[i] for i in kept)
    # before it: after all functions that it calls, and not the main one
    insert_functions(module, [new], function)
    return new
