"""One rank's version of an operation of the global view, and whether there is one."""

from __future__ import annotations

from typing import Any

from irc.core import Op, Value
from irc.declare import placeholder, types_of
from irc.dims import product
from irc.errors import Error
from irc.layouts import local_shape, local_type
from irc.mesh import Mesh
from irc.ops import Dequantize, Reshape
from irc.ops.factors import factor_groups
from irc.types import TensorType


def local_attributes(op: Op, mesh: Mesh) -> dict[str, Any]:
    """The attributes of one rank's version of an operation, whose types are global.

    An Error where the operation over parts of its operands would not give parts of its results.
    """
    if isinstance(op, Reshape):
        _check_reshape(op, mesh)
    if isinstance(op, Dequantize):
        op.check_parts(mesh)
    return op.localized(tuple(_part(result.type, mesh) for result in op.results))


def fits(op: Op, mesh: Mesh) -> bool:
    """Whether one rank can do its share of an operation alone; sizes may divide or not."""
    try:
        own = tuple(Value(_part(v.type, mesh), None, i) for i, v in enumerate(op.operands))
        local = placeholder(op, own)
        for name, value in local_attributes(op, mesh).items():
            setattr(local, name, value)
        return types_of(local) == tuple(_part(result.type, mesh) for result in op.results)
    except Error:
        return False


def _part(type: TensorType, mesh: Mesh) -> TensorType:
    """The type of what one rank holds, be it a part or a summand."""
    return local_type(type.replace(partial=()), mesh)


def _check_reshape(op: Reshape, mesh: Mesh) -> None:
    """Ceil-sized parts of two shapes hold the same elements where every group has as many."""
    old, new = op.x.type, op.results[0].type
    if not old.sharded:
        return
    parts = local_shape(old, mesh), local_shape(new, mesh)
    for olds, news in factor_groups(old.shape, new.shape):
        if product(tuple(parts[0][i] for i in olds)) != product(tuple(parts[1][i] for i in news)):
            raise Error(
                f"one rank's part of {old} holds other elements than its part of {new}; gather "
                "the value before, or pad its dimensions"
            )
