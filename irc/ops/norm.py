"""Normalisation over features. All of it is computed in f32 (f64 for f64) and rounded once."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ..errors import Error
from ..ir.core import Op, Value
from ..ir.declare import Operand, OptionalOperand, operation, optional
from ..ir.dims import DimLike, exact_divide
from ..ir.facts import Bound
from ..ir.types import TensorType
from .elementwise import Add
from .shapes import float_operand, rule_text


def _check_vectors(op: Op, size: DimLike) -> None:
    """Raise unless the weight and the bias, where they are there, are float vectors of `size`."""
    for name, value in op.named_operands():
        if name != "x" and float_operand(op.opname, value).shape != (size,):
            raise Error(
                f"{op.opname}: {name} is {value.type}, but it must have the {size} features of x"
            )


def _checked(op: Op, x: Value) -> TensorType:
    """The type of x, whose last dimension the weight and the bias must have."""
    type = float_operand(op.opname, x)
    if not type.ndim:
        raise Error(f"{op.opname} needs an x of at least one dimension")
    _check_vectors(op, type.shape[-1])
    return type.replicated


class Normalization(Op):
    """Base of the normalizations, whose results are bounded by their weights."""

    __slots__ = ()
    eps: float

    def bound(self, result: int) -> Bound:
        """Without eps a row of zeros is divided by zero."""
        return "always" if self.eps > 0 else "no"


@operation("rms_norm", sharding="... n!, n -> ... n")
class RmsNorm(Normalization):
    """x / sqrt(mean(x²) + eps) * (weight + offset), over the last dimension.

    x [..., N], weight [N] of any float dtype, result as x. `offset` is 1 in models that store the
    weight less one (Gemma). Zhang and Sennrich, 2019.
    """

    x: Operand
    weight: Operand
    eps: float = 1e-6
    offset: float = 0.0

    def infer(self) -> TensorType:
        return _checked(self, self.x)

    def evaluate(self, x: Any, weight: Any) -> Any:
        scale = np.sqrt(_mean(x * x) + x.dtype.type(self.eps))
        return x / scale * (weight + weight.dtype.type(self.offset))


@operation("layer_norm", sharding="... n!, n, n -> ... n")
class LayerNorm(Normalization):
    """(x - mean) / sqrt(variance + eps) * weight + bias, over the last dimension.

    x [..., N], weight and bias [N] of any float dtype, result as x. Ba et al., 2016.
    """

    x: Operand
    weight: OptionalOperand = optional()
    bias: OptionalOperand = optional()
    eps: float = 1e-5

    def infer(self) -> TensorType:
        return _checked(self, self.x)

    def evaluate(self, x: Any, weight: Any, bias: Any) -> Any:
        return _affine(_standard(x, self.eps), weight, bias)


@operation("group_norm")
class GroupNorm(Normalization):
    """Layer norm over each of `groups` groups of channels and all positions of them.

    x [B, C, ...] with C divisible by `groups`, weight and bias [C], result as x. Only the batch
    may be sharded over ranks. Wu and He, 2018.
    """

    x: Operand
    groups: int
    weight: OptionalOperand = optional()
    bias: OptionalOperand = optional()
    eps: float = 1e-5

    def infer(self) -> TensorType:
        x = float_operand(self.opname, self.x)
        if x.ndim < 2:
            raise Error(f"group_norm takes [batch, channels, ...], not {self.x.type}")
        if self.groups < 1 or exact_divide(x.shape[1], self.groups) is None:
            raise Error(f"group_norm cannot make {self.groups} groups of {x.shape[1]} channels")
        _check_vectors(self, x.shape[1])
        return x.replicated

    def sharding_rule(self) -> str:
        words = ["b", "c!", *(f"p{i}!" for i in range(self.x.type.ndim - 2))]
        return rule_text([words, ["c"], ["c"]], [words])

    def evaluate(self, x: Any, weight: Any, bias: Any) -> Any:
        # -1 has no meaning where the batch is empty
        grouped = x.reshape(x.shape[0], self.groups, prod(x.shape[1:]) // self.groups)
        done = _standard(grouped, self.eps).reshape(x.shape)
        channels = (-1,) + (1,) * (x.ndim - 2)
        return _affine(
            done,
            weight.reshape(channels) if weight is not None else None,
            bias.reshape(channels) if bias is not None else None,
        )


class AddNormalization(Op):
    """Base of the norms of a sum. Their results are the norm and the sum."""

    __slots__ = ()
    x: Operand
    residual: Operand
    eps: float

    def bound(self, result: int) -> Bound:
        """The sum may overflow; its norm is bounded as that of any other value."""
        return "always" if result == 0 and self.eps > 0 else "no"

    def total(self) -> Value:
        """x + residual; an Error where one of them would broadcast."""
        x, residual = self.x.type, self.residual.type
        if x.shape != residual.shape:
            raise Error(f"{self.opname}: residual is {residual}, but x {x}")
        return Add(self.x, self.residual).result


@operation("add_rms_norm", sharding="... n!, ... n, n -> ... n, ... n")
class AddRmsNorm(AddNormalization):
    """The sum of x and the residual, and its rms_norm: (normed, sum), as x both.

    x and residual [..., N], weight [N]. Attributes as of rms_norm.
    """

    x: Operand
    residual: Operand
    weight: Operand
    eps: float = 1e-6
    offset: float = 0.0

    def expand(self) -> tuple[Value, ...]:
        total = self.total()
        normed = RmsNorm(total, self.weight, eps=self.eps, offset=self.offset)
        return normed.result, total


@operation("add_layer_norm", sharding="... n!, ... n, n, n -> ... n, ... n")
class AddLayerNorm(AddNormalization):
    """The sum of x and the residual, and its layer_norm: (normed, sum), as x both.

    x and residual [..., N], weight and bias [N]. Attributes as of layer_norm.
    """

    x: Operand
    residual: Operand
    weight: OptionalOperand = optional()
    bias: OptionalOperand = optional()
    eps: float = 1e-5

    def expand(self) -> tuple[Value, ...]:
        total = self.total()
        return LayerNorm(total, weight=self.weight, bias=self.bias, eps=self.eps).result, total


def _standard(x: Any, eps: float) -> Any:
    """x with mean 0 and variance 1 along the last dimension."""
    away = x - _mean(x)
    variance = _mean(away * away)
    return away / np.sqrt(variance + x.dtype.type(eps))


def _mean(x: Any) -> Any:
    """The mean of the last dimension, which is kept; 0 of no features."""
    return np.mean(x, axis=-1, keepdims=True) if x.shape[-1] else np.zeros_like(x, shape=(1,))


def _affine(x: Any, weight: Any, bias: Any) -> Any:
    scaled = x if weight is None else x * weight
    return scaled if bias is None else scaled + bias
