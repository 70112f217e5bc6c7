"""The local version of an operation of the global view, and whether there is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from irc.errors import Error
from irc.ir.core import Op, Value
from irc.ir.declare import placeholder, types_of
from irc.ir.dims import product
from irc.ir.layouts import local_shape, local_type
from irc.ir.mesh import Mesh
from irc.ir.types import Axes, TensorType
from irc.ops import DynamicScale, Reshape
from irc.ops.factors import factor_groups
from irc.ops.quant import QuantizedOp


def local_attributes(op: Op, mesh: Mesh) -> dict[str, Any]:
    """The attributes of the local version of an operation, whose types are global.

    An Error where the operation on shards of its operands does not give shards of its results.
    """
    if isinstance(op, Reshape):
        _check_reshape(op, mesh)
    if isinstance(op, (QuantizedOp, DynamicScale)):
        op.check_parts(mesh)
    return op.localized(tuple(_part(result.type, mesh) for result in op.results))


def fits(op: Op, mesh: Mesh) -> bool:
    """Whether a rank can compute its shard of the results alone; sizes may divide or not."""
    try:
        own = tuple(Value(_part(v.type, mesh), None, i) for i, v in enumerate(op.operands))
        local = placeholder(op, own)
        for name, value in local_attributes(op, mesh).items():
            setattr(local, name, value)
        return types_of(local) == tuple(_part(result.type, mesh) for result in op.results)
    except Error:
        return False


def with_axes(op: Op, wanted: Sequence[Sequence[Axes]]) -> Op:
    """An operation over operands with these axes, without results."""
    types = [v.type.replace(axes=tuple(a)) for v, a in zip(op.operands, wanted, strict=True)]
    return placeholder(op, tuple(Value(type, None, i) for i, type in enumerate(types)))


def is_local(trial: Op, mesh: Mesh) -> bool:
    """Whether an operation of `with_axes` on shards gives shards of its results."""
    try:
        results = types_of(trial)
    except Error:
        return False
    trial.results = tuple(Value(type, trial, i) for i, type in enumerate(results))
    return fits(trial, mesh)


def _part(type: TensorType, mesh: Mesh) -> TensorType:
    """The local type, of a shard or of a term of a partial sum."""
    return local_type(type.replace(partial=()), mesh)


def _check_reshape(op: Reshape, mesh: Mesh) -> None:
    """Shards of two shapes hold the same elements where every group has as many."""
    old, new = op.x.type, op.results[0].type
    if not old.sharded:
        return
    parts = local_shape(old, mesh), local_shape(new, mesh)
    for olds, news in factor_groups(old.shape, new.shape):
        if product(tuple(parts[0][i] for i in olds)) != product(tuple(parts[1][i] for i in news)):
            raise Error(
                f"one rank's shard of {old} holds other elements than its part of {new}; gather "
                "the value before, or pad its dimensions"
            )
