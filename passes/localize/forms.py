"""Operations whose local form is not the same operation: collectives, lookups, parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from irc.core import Op, Value
from irc.dims import DimLike
from irc.dtypes import dtype as dtype_called
from irc.errors import Error
from irc.layouts import local_dim, local_shape, local_type
from irc.ops import (
    Add,
    AllGather,
    AllReduceRmsNorm,
    Call,
    GatherElements,
    MoeCombine,
    MoeDispatch,
    RmsNorm,
    ShardedTopk,
    ShardSlice,
    Topk,
)
from irc.ops.collective import Collective
from irc.types import Axes, TensorType

from .builder import Builder
from .cyclic import cyclic_embedding
from .lookups import embedding
from .plain import plain

Form: TypeAlias = Callable[[Builder, Op], tuple[Value, ...]]


def _with_ways(builder: Builder, op: Op) -> tuple[Value, ...]:
    """The same with its ways; nothing where the group is one rank."""
    ways = builder.mesh.ways(_axes(op))
    x = builder.local(op.operands[0])
    return (x,) if ways == 1 else builder.add_all(op.rebuilt([x], ways=ways))


def _all_gather(builder: Builder, op: Op) -> tuple[Value, ...]:
    return _moved(builder, op, None, op.attributes["dim"])


def _reduce_scatter(builder: Builder, op: Op) -> tuple[Value, ...]:
    return _moved(builder, op, op.attributes["dim"], None)


def _all_to_all(builder: Builder, op: Op) -> tuple[Value, ...]:
    return _moved(builder, op, op.attributes["split"], op.attributes["concat"])


def _moved(builder: Builder, op: Op, split: int | None, joined: int | None) -> tuple[Value, ...]:
    """A collective that cuts one dimension into equal parts and joins the parts of another."""
    value, axes = op.operands[0], _axes(op)
    x, ways = builder.local(value), builder.mesh.ways(axes)
    if ways == 1:
        return (x,)
    wanted = local_shape(op.result.type, builder.mesh)
    if split is not None:
        split %= x.type.rank
        x = builder.padded(x, split, wanted[split] * ways)
        _check_outer(builder, value.type, split, axes, x.type.shape[split])
    x = builder.add(op.rebuilt([x], ways=ways))
    if joined is not None:
        joined %= x.type.rank
        _check_outer(builder, op.result.type, joined, (), x.type.shape[joined])
        x = builder.trimmed(x, joined, wanted[joined])
    return (x,)


def _check_outer(builder: Builder, type: TensorType, dim: int, axes: Axes, parts: DimLike) -> None:
    """Within a dimension that other axes split as well, the parts must fill theirs exactly."""
    outer = type.axes[dim]
    if outer and parts != local_dim(type.shape[dim], builder.mesh.ways(outer)):
        raise Error(
            f"dimension {dim} of {type} is split over {'.'.join(outer)} and then over "
            f"{'.'.join(axes) or 'another axis'}, which needs a size that divides evenly; pad it"
        )


def _shard_slice(builder: Builder, op: Op) -> tuple[Value, ...]:
    assert isinstance(op, ShardSlice)
    x, axes = op.x, op.axes
    dim = op.dim % x.type.rank
    part = local_shape(op.result.type, builder.mesh)[dim]
    ways = builder.mesh.ways(axes)
    _check_outer(builder, x.type, dim, axes, part * ways)
    if dim == 0 and isinstance(x.producer, MoeDispatch) and len(x.users) == 1 and ways > 1:
        return (_part_of_buffer(builder, builder.local(x), axes, part),)
    return (builder.part(builder.local(x), dim, axes, part),)


def _part_of_buffer(builder: Builder, buffer: Value, axes: Axes, part: DimLike) -> Value:
    """The buffer of this rank's experts alone, in place of that of all."""
    whole = buffer.producer
    assert isinstance(whole, MoeDispatch) and isinstance(part, int)
    first = builder.start(axes, part)
    if whole.first is not None:
        first = builder.add(Add(whole.first, first))
    found = MoeDispatch(
        *(whole.x, whole.chosen, whole.slots),
        experts=part,
        first=first,
        parts=whole.parts,
        capacity=whole.capacity,
    )
    whole.erase()
    return builder.add(found)


def _moe_combine(builder: Builder, op: Op) -> tuple[Value, ...]:
    """Experts are counted from the first one that this rank has; others add nothing."""
    assert isinstance(op, MoeCombine)
    axes = builder.type(op.buffer).axes[0]
    if builder.mesh.ways(axes) == 1:
        return plain(builder, op)
    buffer = builder.local(op.buffer)
    first = builder.start(axes, buffer.type.shape[0])
    if op.first is not None:
        first = builder.add(Add(builder.local(op.first), first))
    operands = [builder.local(value) for value in (op.chosen, op.slots, op.weights)]
    local = local_type(op.result.type.replace(partial=()), builder.mesh)
    parts = op.localized((local,))["parts"]
    return builder.add_all(MoeCombine(buffer, *operands, first=first, parts=parts))


def _sharded_topk(builder: Builder, op: Op) -> tuple[Value, ...]:
    """The k largest of this rank, and of these of all ranks, which are in order of position."""
    assert isinstance(op, ShardedTopk)
    type, axes, x = op.x.type, op.axes, builder.local(op.x)
    dim, ways = op.dim % type.rank, builder.mesh.ways(axes)
    size, part = type.shape[dim], x.type.shape[dim]
    assert isinstance(size, int) and isinstance(part, int)
    if ways == 1:
        return builder.add_all(Topk(x, k=op.k, dim=dim))
    if size % ways:
        x = builder.masked(x, dim, size, axes, _lowest(type.dtype))
    values, places = builder.add_all(Topk(x, k=min(op.k, part), dim=dim))
    places = builder.add(Add(places, builder.start(axes, part)))
    values, places = (
        builder.add(AllGather(v, axis=op.axis, dim=dim, ways=ways)) for v in (values, places)
    )
    best, chosen = builder.add_all(Topk(values, k=op.k, dim=dim))
    return best, builder.add(GatherElements(places, chosen, dim=dim))


def _lowest(dtype: str) -> float:
    """What no true element lies below."""
    kind = dtype_called(dtype)
    if kind.is_float:
        return float("-inf")
    return -(2 ** (kind.bits - 1)) if kind.kind == "int" else 0


def _call(builder: Builder, op: Op) -> tuple[Value, ...]:
    assert isinstance(op, Call)
    operands = [builder.local(value) for value in op.values]
    return builder.add_all(op.rebuilt(operands, callee=builder.made[op.callee]))


def _reduce_norm(builder: Builder, op: Op) -> tuple[Value, ...]:
    """The same with its ways; addition and norm alone where the group is one rank."""
    assert isinstance(op, AllReduceRmsNorm)
    ways = builder.mesh.ways(op.axes)
    operands = [builder.local(value) for value in op.operands]
    if ways > 1:
        return builder.add_all(op.rebuilt(operands, ways=ways))
    total = builder.add(Add(operands[0], operands[1]))
    return builder.add(RmsNorm(total, operands[2], eps=op.eps, offset=op.offset)), total


def _return(builder: Builder, op: Op) -> tuple[Value, ...]:
    return builder.add_all(op.rebuilt([builder.local(value) for value in op.operands]))


def _rooted(builder: Builder, op: Op) -> tuple[Value, ...]:
    dim = op.attributes.get("dim")
    if op.opname == "collective_gather":
        return _moved(builder, op, None, dim)
    if op.opname == "collective_scatter":
        return _moved(builder, op, dim, None)
    return _with_ways(builder, op)


def _axes(op: Op) -> Axes:
    assert isinstance(op, Collective)
    return op.axes


FORMS: dict[str, Form] = {
    "all_reduce": _with_ways,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _rooted,
    "reduce": _rooted,
    "collective_gather": _rooted,
    "collective_scatter": _rooted,
    "shard_slice": _shard_slice,
    "sharded_topk": _sharded_topk,
    "embedding": embedding,
    "cyclic_embedding": cyclic_embedding,
    "all_reduce_rms_norm": _reduce_norm,
    "call": _call,
    "moe_combine": _moe_combine,
    "return": _return,
}
