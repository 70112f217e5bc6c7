"""`localize`: from the global view to the text that every rank runs."""

from __future__ import annotations

from irc.errors import Error
from irc.ir.core import Function, Module, Op, Result, Value, Weight
from irc.ir.layouts import local_shape, local_type, recorded_type
from irc.ir.types import TensorType
from irc.ir.weight_parts import weight_part
from irc.ops import Call
from irc.pipeline import Pass, Stats, register
from irc.weights import Pad, Shard, with_shape

from .builder import Builder
from .forms import form_of
from .lookups import spare_rows


@register("localize")
class Localize(Pass):
    """Shapes become one rank's, collectives their group_size, weights their shards.

    One text serves every rank: what differs is computed from `rank`. A dimension that does not
    divide is ceil-sized on every rank; where the padding could reach a result it is masked. Every
    local value keeps its global type.
    """

    view = "global"

    def run(self, module: Module, stats: Stats) -> None:
        if module.local:
            raise Error("the module is in the local view already; localize once")
        types = {weight: weight.type for weight in module.weights.values()}
        zeros: dict[Value, int] = {}
        for weight in module.weights.values():
            _cut(module, weight, zeros)
            stats.count("weights", weight.type is not types[weight])
        localized: dict[Function, Function] = {}
        for name, function in list(module.functions.items()):
            builder = _builder(module, function, types, localized, zeros)
            localized[function] = _localized(builder, function, stats)
            module.functions[name] = localized[function]
        module.local = True


def _cut(module: Module, weight: Weight, zeros: dict[Value, int]) -> None:
    """Give a weight the local type and the steps that take its shard.

    A table gets rows of zeros behind where lookups request it.
    """
    type = local = weight.type
    recorded = recorded_type(type, module.mesh)
    ref = with_shape(weight.ref, type.shape, type.dtype)
    if type.sharded:
        local = local_type(type, module.mesh)
        for dim, axes in enumerate(type.axes):
            if axes:
                ref = ref.then(Shard(dim, axes))
    rows = local.shape[0] if local.ndim == 2 else None
    spare = spare_rows(weight, rows) if isinstance(rows, int) else 0
    if isinstance(rows, int) and spare:
        zeros[weight] = rows
        ref = ref.then(Pad(0, spare))
        local = local.replace(shape=(rows + spare, *local.shape[1:]))
    if local is not type:
        kept = local if spare else recorded
        weight.ref, weight.type = ref, weight_part(ref, kept, module.mesh)


def _builder(
    module: Module,
    function: Function,
    types: dict[Weight, TensorType],
    localized: dict[Function, Function],
    zeros: dict[Value, int],
) -> Builder:
    """A builder of the function in the local view, whose arguments stand for the global ones."""
    mesh = module.mesh
    args = [(str(arg.name), recorded_type(_complete(arg, function), mesh)) for arg in function.args]
    new = Function(function.name, args)
    new.results = tuple(Result(r.name, r.alias) for r in function.results)
    values: dict[Value, Value] = dict(zip(function.args, new.args, strict=True))
    return Builder(module, new, values, types, localized, zeros, _padded(module, function))


def _padded(module: Module, function: Function) -> set[Value]:
    """The arguments whose padding is zeros: those of callers, not states or stage inputs."""
    if any(isinstance(op, Call) and op.callee is function for op in module.ops()):
        return set()
    states = set(function.aliases().values())
    return {arg for arg in function.args if arg.index not in states}


def _localized(builder: Builder, function: Function, stats: Stats) -> Function:
    """The function in the local view; the old one is emptied."""
    new = builder.function
    for op in function:
        _operation(builder, op)
    for value in function.returned:
        _complete(value, function)
    stats.count("operations", sum(1 for _ in new))
    for op in reversed(function):
        op.erase()
    return new


def _complete(value: Value, function: Function) -> TensorType:
    if value.type.partial:
        raise Error(
            f"%{value.name} of @{function.name} is {value.type}, a partial sum; an all_reduce has "
            "to finish it (the pass shard adds one)"
        )
    return value.type


def _operation(builder: Builder, op: Op) -> None:
    builder.loc = op.loc
    try:
        for old, new in zip(op.results, form_of(op)(builder, op), strict=True):
            _record(builder, old, new)
            builder.values[old] = new
            if new.producer is not None:
                new.name = new.name if new in builder.kept else old.name
    except Error as error:
        raise error.at(op) from None


def _record(builder: Builder, old: Value, new: Value) -> None:
    """Give a local value the global type that it is part of."""
    wanted = local_shape(old.type, builder.mesh)
    if new.type.shape != wanted:
        raise Error(
            f"one rank's shard of {old.type} is {list(wanted)}, but it would compute "
            f"{new.type.replicated}; these sizes do not divide: gather the value before, or pad "
            "its dimensions"
        )
    if new not in builder.kept and new.producer is not None:
        new.type = recorded_type(old.type, builder.mesh)
