"""Reductions and scans along dimensions. In 16-bit floats they accumulate in f32."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from ..core import Op
from ..declare import Operand, operation
from ..dims import DimLike
from ..dtypes import is_float
from ..errors import Error
from ..types import TensorType
from .shapes import (
    float_operand,
    letters,
    not_above,
    number_operand,
    position,
    positions,
    rule_text,
    run_sizes,
)


class Reduction(Op):
    """Base of the reductions over `dims`; `keep` leaves them in place with size 1."""

    __slots__ = ()
    x: Operand
    dims: tuple[int, ...]
    keep: bool

    def infer(self) -> TensorType:
        type = number_operand(self.opname, self.x)
        gone = positions(self.opname, self.dims, type.rank)
        return TensorType(type.dtype, _without(type.shape, gone, 1 if self.keep else None))

    def sharding_rule(self) -> str:
        return self._rule(whole=True)

    def _rule(self, whole: bool) -> str:
        rank = self.x.type.rank
        gone = positions(self.opname, self.dims, rank)
        words = letters(rank, gone if whole else ())
        return rule_text([words], [_without(words, gone, "1" if self.keep else None)])


def _without(items: Sequence[Any], gone: Sequence[int], stand_in: Any) -> tuple[Any, ...]:
    """The items whose positions are not `gone`, or with a stand-in (if any) in their place."""
    kept = [stand_in if i in gone else item for i, item in enumerate(items)]
    return tuple(item for item in kept if item is not None)


@operation("reduce_sum", sums="x")
class ReduceSum(Reduction):
    """The sum over `dims`; over a split dimension it leaves a pending sum."""

    x: Operand
    dims: tuple[int, ...]
    keep: bool = False

    def sharding_rule(self) -> str:
        return self._rule(whole=False)

    @np.errstate(all="ignore")
    def evaluate(self, x: Any) -> Any:
        return np.sum(x, axis=self.dims, keepdims=self.keep, dtype=x.dtype)


@operation("reduce_mean", sums="x")
class ReduceMean(Reduction):
    """The mean over `dims`, of floats."""

    x: Operand
    dims: tuple[int, ...]
    keep: bool = False

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

    x: Operand
    dims: tuple[int, ...]
    keep: bool = False

    def evaluate(self, x: Any) -> Any:
        least = -np.inf if x.dtype.kind == "f" else np.iinfo(x.dtype).min
        return np.max(x, axis=self.dims, keepdims=self.keep, initial=least)


@operation("reduce_min")
class ReduceMin(Reduction):
    """The smallest element over `dims`; NaN where there is one, the greatest value over nothing."""

    x: Operand
    dims: tuple[int, ...]
    keep: bool = False

    def evaluate(self, x: Any) -> Any:
        greatest = np.inf if x.dtype.kind == "f" else np.iinfo(x.dtype).max
        return np.min(x, axis=self.dims, keepdims=self.keep, initial=greatest)


@operation("reduce_prod")
class ReduceProd(Reduction):
    """The product over `dims`."""

    x: Operand
    dims: tuple[int, ...]
    keep: bool = False

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
        at = position(self.opname, self.dim, type.rank)
        if type.shape[at] == 0:
            raise Error(f"argmax: dimension {at} is empty")
        return TensorType("i32", _without(type.shape, [at], 1 if self.keep else None))

    def sharding_rule(self) -> str:
        rank = self.x.type.rank
        words = letters(rank, [self.dim % rank])
        return rule_text([words], [_without(words, [self.dim % rank], "1" if self.keep else None)])

    def evaluate(self, x: Any) -> Any:
        return np.argmax(x, axis=self.dim, keepdims=self.keep).astype(np.int32)


@operation("topk")
class Topk(Op):
    """The k largest elements along `dim`, largest first, and their positions as i32.

    Of equal elements the one in front comes first; NaN counts as the largest.
    """

    x: Operand
    k: DimLike
    dim: int = -1

    def infer(self) -> tuple[TensorType, ...]:
        type = number_operand(self.opname, self.x)
        at = position(self.opname, self.dim, type.rank)
        not_above(self.opname, 1, self.k, "1 element at least and k:")
        not_above(self.opname, self.k, type.shape[at], "k")
        shape = (*type.shape[:at], self.k, *type.shape[at + 1 :])
        return TensorType(type.dtype, shape), TensorType("i32", shape)

    def sharding_rule(self) -> str:
        return _rule_along(self.x.type, self.dim)

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


def _rule_along(type: TensorType, dim: int) -> str:
    words = letters(type.rank, [dim % type.rank])
    return rule_text([words], [words])


@operation("cumsum", sums="x")
class Cumsum(Op):
    """Running sums along `dim`: with this element, or without it where `exclusive`."""

    x: Operand
    dim: int = -1
    exclusive: bool = False

    def infer(self) -> TensorType:
        type = number_operand(self.opname, self.x)
        position(self.opname, self.dim, type.rank)
        return type.whole

    def sharding_rule(self) -> str:
        return _rule_along(self.x.type, self.dim)

    @np.errstate(all="ignore")
    def evaluate(self, x: Any) -> Any:
        sums = np.cumsum(x, axis=self.dim, dtype=x.dtype)
        if not self.exclusive:
            return sums
        moved = np.roll(sums, 1, axis=self.dim)
        first = (slice(None),) * position(self.opname, self.dim, x.ndim)
        moved[(*first, slice(0, 1))] = 0
        return moved


@operation("softmax")
class Softmax(Op):
    """exp(x) / sum of exp(x) along `dim`; NaN where all are -infinity."""

    x: Operand
    dim: int = -1

    def infer(self) -> TensorType:
        return _float_along(self, self.x.type, self.dim)

    def sharding_rule(self) -> str:
        return _rule_along(self.x.type, self.dim)

    @np.errstate(all="ignore")
    def evaluate(self, x: Any) -> Any:
        powers = np.exp(x - np.max(x, axis=self.dim, keepdims=True, initial=-np.inf))
        return powers / np.sum(powers, axis=self.dim, keepdims=True)


@operation("log_softmax")
class LogSoftmax(Op):
    """The logarithm of softmax along `dim`, without its underflow."""

    x: Operand
    dim: int = -1

    def infer(self) -> TensorType:
        return _float_along(self, self.x.type, self.dim)

    def sharding_rule(self) -> str:
        return _rule_along(self.x.type, self.dim)

    @np.errstate(all="ignore")
    def evaluate(self, x: Any) -> Any:
        below = x - np.max(x, axis=self.dim, keepdims=True, initial=-np.inf)
        return below - np.log(np.sum(np.exp(below), axis=self.dim, keepdims=True))


def _float_along(op: Op, type: TensorType, dim: int) -> TensorType:
    if not is_float(type.dtype):
        raise Error(f"{op.opname} takes floating-point operands, not {type}")
    position(op.opname, dim, type.rank)
    return type.whole
