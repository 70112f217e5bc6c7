"""Operations that become others in the local view: collectives, lookups, experts, topk."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from irc import ops
from irc.errors import Error
from irc.ir.core import Op, Value
from irc.ir.declare import expanded_results, placeholder
from irc.ir.dims import DimLike
from irc.ir.dtypes import dtype as dtype_called
from irc.ir.expansion import in_order
from irc.ir.layouts import local_dim, local_shape, local_type
from irc.ir.types import Axes, TensorType
from irc.ops.collective import Exchange

from .builder import Builder
from .by_rule import local_operation
from .cyclic import cyclic_embedding
from .lookups import embedding

Form: TypeAlias = Callable[[Builder, Op], tuple[Value, ...]]


def _collective(builder: Builder, op: Op) -> tuple[Value, ...]:
    """The same with its group_size, and equal shards; the operand where the group is one rank."""
    assert isinstance(op, Exchange)
    axes, x = op.axes, builder.local(op.x)
    group_size = builder.mesh.group_size(axes)
    if group_size == 1:
        return (x,)
    wanted = local_shape(op.result.type, builder.mesh)
    if op.scatters:
        dim: int = getattr(op, op.scatters) % x.type.ndim
        x = builder.padded(x, dim, wanted[dim] * group_size)
        _check_outer(builder, builder.type(op.x), dim, axes, x.type.shape[dim])
    axis = ".".join(builder.wide(axes))
    x = builder.add(op.rebuilt([x], axis=axis, group_size=group_size))
    if op.gathers:
        joined: int = getattr(op, op.gathers) % x.type.ndim
        _check_outer(builder, op.result.type, joined, (), x.type.shape[joined])
        x = builder.trimmed(x, joined, wanted[joined])
    return (x,)


def _check_outer(builder: Builder, type: TensorType, dim: int, axes: Axes, parts: DimLike) -> None:
    """A dimension that other axes shard as well must divide evenly."""
    outer = type.axes[dim]
    if outer and parts != local_dim(type.shape[dim], builder.mesh.group_size(outer)):
        raise Error(
            f"dimension {dim} of {type} is sharded over {'.'.join(outer)} and then over "
            f"{'.'.join(axes) or 'another axis'}, which needs a size that divides evenly; pad it"
        )


def _shard_slice(builder: Builder, op: Op) -> tuple[Value, ...]:
    assert isinstance(op, ops.ShardSlice)
    x, axes = op.x, op.axes
    dim = op.dim % x.type.ndim
    part = local_shape(op.result.type, builder.mesh)[dim]
    group_size = builder.mesh.group_size(axes)
    _check_outer(builder, builder.type(x), dim, axes, part * group_size)
    own = isinstance(x.producer, ops.MoeDispatch) and len(x.users) == 1
    if own and dim == 0 and group_size > 1:
        return (_part_of_buffer(builder, builder.local(x), axes, part),)
    return (builder.part(builder.local(x), dim, axes, part),)


def _part_of_buffer(builder: Builder, buffer: Value, axes: Axes, part: DimLike) -> Value:
    """The buffer of this rank's experts alone."""
    dispatch = buffer.producer
    assert isinstance(dispatch, ops.MoeDispatch) and isinstance(part, int)
    first = _first_expert(builder, dispatch.first, axes, part)
    own = ops.MoeDispatch(
        *(dispatch.x, dispatch.chosen, dispatch.slots),
        experts=part,
        first=first,
        parts=dispatch.parts,
        capacity=dispatch.capacity,
    )
    dispatch.erase()
    return builder.add(own)


def _first_expert(builder: Builder, given: Value | None, axes: Axes, part: DimLike) -> Value:
    """The number of this rank's first expert, where those of all ranks begin at `given`, or 0."""
    if given is None:
        return builder.start(axes, part)
    return builder.add(ops.Add(given, builder.start(axes, part, given.type.dtype)))


def _moe_combine(builder: Builder, op: Op) -> tuple[Value, ...]:
    """Experts are numbered from the first of this rank; others add nothing."""
    assert isinstance(op, ops.MoeCombine)
    axes = builder.type(op.buffer).axes[0]
    if builder.mesh.group_size(axes) == 1:
        return local_operation(builder, op)
    buffer = builder.local(op.buffer)
    given = None if op.first is None else builder.local(op.first)
    first = _first_expert(builder, given, axes, buffer.type.shape[0])
    operands = [builder.local(value) for value in (op.chosen, op.slots, op.weights)]
    local = local_type(op.result.type.replace(partial=()), builder.mesh)
    parts = op.localized((local,))["parts"]
    return builder.add_all(ops.MoeCombine(buffer, *operands, first=first, parts=parts))


def _sharded_topk(builder: Builder, op: Op) -> tuple[Value, ...]:
    """The k largest of this rank, then of those of all ranks, which are in order of position."""
    assert isinstance(op, ops.ShardedTopk)
    type, axes, x = builder.type(op.x), op.axes, builder.local(op.x)
    dim, group_size = op.dim % type.ndim, builder.mesh.group_size(axes)
    size, part = type.shape[dim], x.type.shape[dim]
    assert isinstance(size, int) and isinstance(part, int)
    if group_size == 1:
        return builder.add_all(ops.Topk(x, k=op.k, dim=dim))
    if size % group_size:
        x = builder.masked(x, dim, size, axes, _lowest(type.dtype))
    values, places = builder.add_all(ops.Topk(x, k=min(op.k, part), dim=dim))
    places = builder.add(ops.Add(places, builder.start(axes, part)))
    values, places = (
        builder.add(ops.AllGather(v, axis=op.axis, dim=dim, group_size=group_size))
        for v in (values, places)
    )
    best, chosen = builder.add_all(ops.Topk(values, k=op.k, dim=dim))
    return best, builder.add(ops.GatherElements(places, chosen, dim=dim))


def _sharded_max(builder: Builder, op: Op) -> tuple[Value, ...]:
    """The largest of this rank, then of all ranks."""
    assert isinstance(op, ops.ShardedMax)
    type, axes, x = builder.type(op.x), op.axes, builder.local(op.x)
    dim, group_size = op.dim % type.ndim, builder.mesh.group_size(axes)
    size = type.shape[dim]
    smallest = isinstance(op.x.producer, ops.Abs) and builder.padding.state(op.x, dim) == "zero"
    if isinstance(size, int) and size % group_size and not smallest:
        x = builder.masked(x, dim, size, axes, _lowest(type.dtype))
    largest = builder.add(ops.ReduceMax(x, dims=(dim,), keep=True))
    if group_size == 1:
        return (largest,)
    return builder.add_all(ops.AllReduce(largest, axis=op.axis, op="max", group_size=group_size))


def _lowest(dtype: str) -> float:
    """The least value of a dtype."""
    kind = dtype_called(dtype)
    if kind.is_float:
        return float("-inf")
    return -(2 ** (kind.bits - 1)) if kind.kind == "int" else 0


def _call(builder: Builder, op: Op) -> tuple[Value, ...]:
    assert isinstance(op, ops.Call)
    operands = [builder.local(value) for value in op.values]
    return builder.add_all(op.rebuilt(operands, callee=builder.localized[op.callee]))


def _fused_sum(builder: Builder, op: Op) -> tuple[Value, ...]:
    """The same with its group_size; its expansion where the group is one rank."""
    assert isinstance(op, ops.AllReduceAdd | ops.AllReduceRmsNorm)
    group_size = builder.mesh.group_size(op.axes)
    operands = [builder.local(value) for value in op.operands]
    if group_size > 1:
        return builder.add_all(op.rebuilt(operands, group_size=group_size))
    total = builder.add(ops.Add(operands[0], operands[1]))
    if isinstance(op, ops.AllReduceAdd):
        return (total,)
    return builder.add(ops.RmsNorm(total, operands[2], eps=op.eps, offset=op.offset)), total


def _fused_linear(builder: Builder, op: Op) -> tuple[Value, ...]:
    """By its rule; over mesh axes the parts of its expansion, each by its own form."""
    assert isinstance(op, ops.FusedLinear)
    if not op.axis:
        return local_operation(builder, op)
    operands = [(Value(builder.type(v), None, i), v) for i, v in enumerate(op.operands)]
    builder.values |= {stand_in: builder.local(value) for stand_in, value in operands}
    root = placeholder(op, tuple(stand_in for stand_in, _ in operands)).expand()
    results: tuple[Value, ...] = ()
    for part in in_order(expanded_results(root)):
        results = form_of(part)(builder, part)
        builder.values |= dict(zip(part.results, results, strict=True))
    return results


def _return(builder: Builder, op: Op) -> tuple[Value, ...]:
    return builder.add_all(op.rebuilt([builder.local(value) for value in op.operands]))


_FORMS: dict[str, Form] = {
    "shard_slice": _shard_slice,
    "sharded_topk": _sharded_topk,
    "sharded_max": _sharded_max,
    "embedding": embedding,
    "cyclic_embedding": cyclic_embedding,
    "all_reduce_add": _fused_sum,
    "all_reduce_rms_norm": _fused_sum,
    "fused_linear": _fused_linear,
    "call": _call,
    "moe_combine": _moe_combine,
    "return": _return,
}


def form_of(op: Op) -> Form:
    """The function that lowers an operation to the local view."""
    return _FORMS.get(op.opname, _collective if isinstance(op, Exchange) else local_operation)
