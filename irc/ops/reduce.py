"""Reductions and scans along dimensions. In 16-bit floats they accumulate in f32."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, ClassVar

import numpy as np

from ..errors import Error
from ..ir.core import Op
from ..ir.declare import Operand, operation, operation_base
from ..ir.dims import DimLike
from ..ir.dtypes import integer_range, is_float
from ..ir.types import TensorType
from .elementwise import Check
from .shapes import (
    AlongDim,
    dim_names,
    float_operand,
    not_above,
    number_operand,
    position,
    positions,
    rule_text,
    run_sizes,
)


@operation_base
class Reduction(Op):
    """Base of the reductions over `dims`; `keep` leaves them in place with size 1."""

    __slots__ = ()
    x: Operand
    dims: tuple[int, ...]
    keep: bool = False

    def infer(self) -> TensorType:
        type = number_operand(self.opname, self.x)
        gone = positions(self.opname, self.dims, type.ndim)
        return TensorType(type.dtype, _without(type.shape, gone, 1 if self.keep else None))

    def sharding_rule(self, replicated: bool = True) -> str:
        return _rule_without(self.x.type, self.dims, self.keep, replicated)


def _rule_without(type: TensorType, dims: Sequence[int], keep: bool, replicated: bool) -> str:
    """The rule of an operation whose result lacks `dims`, or has them with size 1."""
    gone = [dim % type.ndim for dim in dims]
    words = dim_names(type.ndim, gone if replicated else ())
    return rule_text([words], [_without(words, gone, "1" if keep else None)])


def _without(items: Sequence[Any], gone: Sequence[int], stand_in: Any) -> tuple[Any, ...]:
    """The items whose positions are not `gone`, or with a stand-in (if any) in their place."""
    kept = [stand_in if i in gone else item for i, item in enumerate(items)]
    return tuple(item for item in kept if item is not None)


@operation("reduce_sum", sums="x")
class ReduceSum(Reduction):
    """The sum over `dims`; over a sharded dimension it gives a partial sum."""

    def sharding_rule(self, replicated: bool = False) -> str:
        return Reduction.sharding_rule(self, replicated)

    @np.errstate(all="ignore")
    def evaluate(self, x: Any) -> Any:
        return np.sum(x, axis=self.dims, keepdims=self.keep, dtype=x.dtype)


@operation("reduce_mean", sums="x")
class ReduceMean(Reduction):
    """The mean over `dims`, of floats."""

    def infer(self) -> TensorType:
        float_operand(self.opname, self.x)
        return Reduction.infer(self)

    @np.errstate(all="ignore")
    def evaluate(self, x: Any) -> Any:
        count = x.dtype.type(prod(x.shape[i] for i in self.dims))
        return np.sum(x, axis=self.dims, keepdims=self.keep, dtype=x.dtype) / count


@operation("reduce_max")
class ReduceMax(Reduction):
    """The largest element over `dims`; NaN where there is one, the least value over nothing."""

    per_shard: ClassVar = "max"

    def evaluate(self, x: Any) -> Any:
        kind = self.x.type.dtype
        least = -np.inf if is_float(kind) else integer_range(kind)[0]
        return np.max(x, axis=self.dims, keepdims=self.keep, initial=least)


@operation("reduce_min")
class ReduceMin(Reduction):
    """The smallest element over `dims`; NaN where there is one, the greatest value over nothing."""

    def evaluate(self, x: Any) -> Any:
        kind = self.x.type.dtype
        greatest = np.inf if is_float(kind) else integer_range(kind)[1]
        return np.min(x, axis=self.dims, keepdims=self.keep, initial=greatest)


@operation("reduce_prod")
class ReduceProd(Reduction):
    """The product over `dims`."""

    @np.errstate(all="ignore")
    def evaluate(self, x: Any) -> Any:
        return np.prod(x, axis=self.dims, keepdims=self.keep, dtype=x.dtype)


@operation("argmax")
class Argmax(Op):
    """The position of the largest element along `dim` (the first of equals, or of NaN), as i32."""

    x: Operand
    dim: int = -1
    keep: bool = False

    def infer(self) -> TensorType:
        type = number_operand(self.opname, self.x)
        at = position(self.opname, self.dim, type.ndim)
        if type.shape[at] == 0:
            raise Error(f"argmax: dimension {at} is empty")
        return TensorType("i32", _without(type.shape, [at], 1 if self.keep else None))

    def sharding_rule(self) -> str:
        return _rule_without(self.x.type, [self.dim], self.keep, replicated=True)

    def evaluate(self, x: Any) -> Any:
        return np.argmax(x, axis=self.dim, keepdims=self.keep).astype(np.int32)


@operation("topk", reads="many")
class Topk(AlongDim):
    """The k largest elements along `dim`, largest first, and their positions as i32.

    Of equal elements the one in front comes first; NaN counts as the largest.
    """

    per_shard: ClassVar = "any"
    x: Operand
    k: DimLike
    dim: int = -1

    def infer(self) -> tuple[TensorType, ...]:
        type = number_operand(self.opname, self.x)
        at = position(self.opname, self.dim, type.ndim)
        not_above(self.opname, 1, self.k, "1 element at least and k:")
        not_above(self.opname, self.k, type.shape[at], "k")
        shape = (*type.shape[:at], self.k, *type.shape[at + 1 :])
        return TensorType(type.dtype, shape), TensorType("i32", shape)

    def evaluate(self, x: Any) -> Any:
        (k,) = run_sizes(self.opname, (self.k,))
        size = x.shape[self.dim]
        if not 0 < k <= size:
            raise Error(f"topk: there are no {k} largest of {size} elements")
        # a stable rising order of the reversed elements, reversed, puts the front one first
        rising = np.argsort(np.flip(x, self.dim), axis=self.dim, kind="stable")
        falling = size - 1 - np.flip(rising, self.dim)
        order = np.take(falling, np.arange(k), axis=self.dim)
        return np.take_along_axis(x, order, self.dim), order.astype(np.int32)


@operation_base
class Along(AlongDim):
    """Base of the functions along one dimension, which must be replicated."""

    __slots__ = ()
    check: ClassVar[Check] = staticmethod(float_operand)
    x: Operand
    dim: int = -1

    def infer(self) -> TensorType:
        type = self.check(self.opname, self.x)
        position(self.opname, self.dim, type.ndim)
        return type.replicated


@operation("cumsum", sums="x")
class Cumsum(Along):
    """Running sums along `dim`: with this element, or without it where `exclusive`."""

    check: ClassVar[Check] = staticmethod(number_operand)
    exclusive: bool = False

    @np.errstate(all="ignore")
    def evaluate(self, x: Any) -> Any:
        sums = np.cumsum(x, axis=self.dim, dtype=x.dtype)
        if not self.exclusive:
            return sums
        moved = np.roll(sums, 1, axis=self.dim)
        first = (slice(None),) * position(self.opname, self.dim, x.ndim)
        moved[(*first, slice(0, 1))] = 0
        return moved


@operation("softmax", bounded="always")
class Softmax(Along):
    """exp(x) / sum of exp(x) along `dim`; NaN where all are -infinity."""

    @np.errstate(all="ignore")
    def evaluate(self, x: Any) -> Any:
        powers = np.exp(x - np.max(x, axis=self.dim, keepdims=True, initial=-np.inf))
        return powers / np.sum(powers, axis=self.dim, keepdims=True)


@operation("log_softmax")
class LogSoftmax(Along):
    """The logarithm of softmax along `dim`, without its underflow."""

    @np.errstate(all="ignore")
    def evaluate(self, x: Any) -> Any:
        below = x - np.max(x, axis=self.dim, keepdims=True, initial=-np.inf)
        return below - np.log(np.sum(np.exp(below), axis=self.dim, keepdims=True))
