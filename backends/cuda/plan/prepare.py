"""The operations that a plan is made of: a copy of a function, without calls and expandable ones.

Collectives work along dimension 0, as those of NCCL; layout operations around them say the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module
from pkgutil import walk_packages
from typing import Any, cast

from irc import ops
from irc.backends.base import Unsupported
from irc.backends.cuda import codegen
from irc.backends.cuda.codegen.body import ELEMENTS
from irc.backends.lowering import STRUCTURE
from irc.backends.onnx.backend import check_module
from irc.ir.core import Function, Module, Op, Value, reached
from irc.ir.dims import Shape, exact_divide, product
from irc.ir.expansion import expansion
from irc.ops.collective import Exchange
from irc.passes.dce import Dce
from irc.passes.inline import Inline
from irc.passes.shared.edit import copy_before
from irc.pipeline import Stats
from irc.rewrite import replace
from irc.text import parse_module
from irc.text.printer import names_of, print_module

from .template import KERNELS, LAUNCHES


@cache
def load_tables() -> None:
    """Import every module of codegen, which fill the tables of operations."""
    for module in walk_packages(codegen.__path__, codegen.__name__ + "."):
        import_module(module.name)


def covers(cls: type[Op]) -> bool:
    """Whether operations of a class run without their expansion."""
    load_tables()
    return (
        cls in ELEMENTS
        or cls in KERNELS
        or cls.opname in STRUCTURE
        or (issubclass(cls, Exchange) and cls is not ops.ShardSlice)
    )


def unsupported(module: Module) -> list[Unsupported]:
    """Every operation without elements, kernels or an expansion in such."""
    seen: set[Function] = set()
    problems: list[Unsupported] = []
    for function in module.functions.values():
        for op in reached(function, seen):
            if (reason := _missing(op)) is not None:
                problems.append(Unsupported(op, reason))
    return problems


def _missing(op: Op) -> str | None:
    if covers(type(op)):
        return _refused(op) if isinstance(op, Exchange) else None
    if not op.composite:
        return "has no kernel"
    for part in expansion(op).ops:
        if (inner := _missing(part)) is not None:
            return f"has no kernel, and its expansion needs {part.opname}, which {inner}"
    return None


def _refused(op: Exchange) -> str | None:
    if op.x.type.dtype in ("i4", "u4", "f4e2m1"):
        return f"cannot move {op.x.type.dtype} between GPUs; cast it to i8 first"
    return None


def prepared(module: Module, origins: dict[Value, str] | None = None) -> Module:
    """A copy of a module in which every operation has elements, kernels or a library call.

    `origins` gets the names that the module's text has for values of the copy, or for the result
    of the operation that they are a part of.
    """
    check_module(module)
    load_tables()
    copy = parse_module(print_module(module, locs=True), module.name)
    origins = {} if origins is None else origins
    for function in copy.functions.values():
        origins |= names_of(function)
    Inline().run(copy, Stats())
    _localize(copy)
    for function in copy.functions.values():
        for op in function:
            simplified(op, origins)
    Dce().run(copy, Stats())
    return copy


def _localize(module: Module) -> None:
    """Leave values the shapes that a rank has, without what they are shards of."""
    values = [value for f in module.functions.values() for op in f for value in op.results]
    values += [arg for function in module.functions.values() for arg in function.args]
    for value in (*values, *module.weights.values()):
        value.type = value.type.replicated


def exchanges(ops: Iterable[Op]) -> Iterator[Exchange]:
    """The collectives among operations and their expansions."""
    for op in ops:
        if isinstance(op, Exchange):
            yield op
        elif op.composite and not covers(type(op)):
            yield from exchanges(expansion(op).ops)


def expand(op: Op, origins: dict[Value, str]) -> list[Op]:
    """Put simpler operations in place of one that has no kernels; what is left, in order."""
    name, parts = origins.get(op.results[0], "") if op.results else "", list[Op]()
    if isinstance(op, Exchange):
        moved = _along_first(op)
        if moved is not None:
            parts = replace(op, moved)
    elif not covers(type(op)) and op.composite:
        parts = replace(op, op.expand())
    origins |= {value: name for part in parts for value in part.results if name}
    return [left for part in parts for left in simplified(part, origins)]


def simplified(op: Op, origins: dict[Value, str]) -> list[Op]:
    """What is left of an operation that is expanded unless there are makers of launches for it."""
    if type(op) in LAUNCHES and not isinstance(op, Exchange):
        return [op]
    parts = expand(op, origins)
    return [op] if op.parent is not None else parts


def copied(function: Function, origins: Mapping[Value, str]) -> tuple[Function, dict[Value, str]]:
    """A copy of a function over the same weights, and the origins of its values."""
    copy = Function(function.name, [(str(arg.name), arg.type) for arg in function.args])
    copy.results = function.results
    values: dict[Value, Value] = dict(zip(function.args, copy.args, strict=True))
    for op in function:
        copy_before(op, copy, None, values)
    return copy, {new: origins[old] for old, new in values.items() if old in origins}


def _along_first(op: Exchange) -> Op | Value | None:
    """The collective along dimension 0 between layout operations; None where it is so already."""
    if op.group_size <= 1:  # 0 in the global view, which has one rank here
        return op.x
    move = _MOVES.get(type(op))
    return None if move is None else move(op)


def _gather(op: Exchange) -> Op | None:
    dim = cast("Any", op).dim % op.x.type.ndim
    if not dim:
        return None
    joined = type(op)(op.x, **{**op.attributes, "dim": 0})
    return _shards_to(joined, op.group_size, op.x.type.shape, dim)


def _scatter(op: Exchange) -> Op | None:
    dim = cast("Any", op).dim % op.x.type.ndim
    if not dim:
        return None
    shards = _shards_from(op.x, op.group_size, op.result.type.shape, dim)
    return type(op)(shards, **{**op.attributes, "dim": 0})


def _all_to_all(op: Exchange) -> Op | None:
    assert isinstance(op, ops.AllToAll)
    shape = op.x.type.shape
    split, join = op.split % len(shape), op.concat % len(shape)
    if not split and not join:
        return None
    size = exact_divide(shape[split], op.group_size)
    assert size is not None  # the operation's types say so
    shard = (*shape[:split], size, *shape[split + 1 :])
    x = _shards_from(op.x, op.group_size, shard, split) if split else op.x
    moved = ops.AllToAll(x, axis=op.axis, split=0, concat=0, group_size=op.group_size)
    return _shards_to(moved, op.group_size, shard, join) if join else moved


_MOVES: dict[type[Op], Callable[[Exchange], Op | None]] = {
    ops.AllGather: _gather,
    ops.CollectiveGather: _gather,
    ops.ReduceScatter: _scatter,
    ops.CollectiveScatter: _scatter,
    ops.AllToAll: _all_to_all,
}


def _shards_from(x: Value, count: int, shard: Shape, dim: int) -> Op:
    """`x`, which holds shards of this shape along `dim`, with them along dimension 0 instead."""
    before, rest = product(shard[:dim]), product(shard[dim:])
    apart = x if before == 1 else _turned(ops.Reshape(x, shape=(before, count, rest)))
    return ops.Reshape(apart, shape=(shard[0] * count, *shard[1:]))


def _turned(x: Op) -> Op:
    return ops.Transpose(x, order=(1, 0, 2))


def _shards_to(x: Op, count: int, shard: Shape, dim: int) -> Op:
    """The inverse: shards along dimension 0, joined along `dim`."""
    before, rest = product(shard[:dim]), product(shard[dim:])
    apart = x if before == 1 else _turned(ops.Reshape(x, shape=(count, before, rest)))
    return ops.Reshape(apart, shape=(*shard[:dim], shard[dim] * count, *shard[dim + 1 :]))
