"""`fold`: evaluates operations on constants."""

from __future__ import annotations

from math import prod
from typing import Any, cast

import numpy as np

from irc.analysis.fused import is_repeatable
from irc.ir.attributes import Number
from irc.ir.core import Module, Op, Value
from irc.ir.dims import Shape
from irc.ir.dtypes import dtype, numpy_dtype, widened
from irc.ir.sharding import parse_rule
from irc.ops import Constant, Full
from irc.ops.control import LARGEST_CONSTANT
from irc.pipeline import Pass, Stats, register
from irc.rewrite import permit, replace
from irc.rewrite.constants import evaluated, uniform

from .shared.edit import attribute_symbols


@register("fold")
class Fold(Pass):
    """Evaluates operations whose operands are constants, where the result is one.

    A result of at most 16 numbers becomes a `constant` or, if they are all equal, a `full`. An
    operation that works element by element on `full` values of any shape becomes a `full`. The
    numbers are those of the reference backend: narrow floats are computed in f32 and rounded.
    """

    def run(self, module: Module, stats: Stats) -> None:
        with np.errstate(all="ignore"):
            for function in module.functions.values():
                for op in function:
                    if _foldable(op):
                        _fold(op, stats)


def _foldable(op: Op) -> bool:
    if not op.operands or len(op.results) != 1 or not is_repeatable(op):
        return False
    return _has_meaning(op) and not any(v.type.sharded for v in (*op.operands, op.result))


def _has_meaning(op: Op) -> bool:
    return type(op).evaluate is not Op.evaluate


def _fold(op: Op, stats: Stats) -> None:
    arrays = [_small_constant(value) for value in op.operands]
    type = op.result.type
    size = _count(type.shape)
    if (
        size is not None
        and all(array is not None for array in arrays)
        and not attribute_symbols(op)
    ):
        new = _constant(evaluated(op, arrays), type.shape, type.dtype)
    elif op.sharding is not None and parse_rule(op.sharding).is_elementwise:
        scalars = [_scalar(value) for value in op.operands]
        if any(scalar is None for scalar in scalars):
            return
        number = _numbers(evaluated(op, scalars), type.dtype)[0]
        new = Full(value=number, shape=type.shape, dtype=type.dtype)
    else:
        return
    if permit(f"fold {op.opname}", op):
        replace(op, new)
        stats.count(op.opname)


def _count(shape: Shape) -> int | None:
    """The number of elements, where it is known and between 1 and 16."""
    if not all(isinstance(dim, int) for dim in shape):
        return None
    count = prod(cast("tuple[int, ...]", shape))
    return count if 0 < count <= LARGEST_CONSTANT else None


def _small_constant(value: Value) -> Any:
    """The array of a constant of at most 16 numbers, narrow floats in f32; else None."""
    op = value.producer
    if op is None or op.operands or not _has_meaning(op) or _count(value.type.shape) is None:
        return None
    return widened(op.evaluate())


def _scalar(value: Value) -> Any:
    number = uniform(value)
    return None if number is None else widened(np.array(number, numpy_dtype(value.type.dtype)))


def _numbers(array: Any, name: str) -> tuple[Number, ...]:
    python = float if dtype(name).is_float else bool if name == "bool" else int
    return tuple([python(item) for item in array.reshape(-1)])


def _constant(array: Any, shape: Shape, name: str) -> Op:
    values = _numbers(array, name)
    if len(values) > 1 and all(repr(value) == repr(values[0]) for value in values):
        return Full(value=values[0], shape=shape, dtype=name)
    return Constant(values=values, shape=cast("tuple[int, ...]", shape), dtype=name)
