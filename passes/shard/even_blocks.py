"""Pads features with zeros where the shards of quantized weights would cut a block."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import lcm

from irc.ir.core import Function, Module, Op, Value, Weight
from irc.ir.sharding import parse_rule
from irc.ir.types import TensorType
from irc.ops import Dequantize, DynamicScale, Linear
from irc.ops.quant import Scaled
from irc.pipeline import Stats
from irc.weights import Pad, pinned

from ..shared.edit import retype, used_once
from ..shared.parameters import is_shared, weights_of
from .place import planned_axes
from .rows import Row


def even_blocks(module: Module, rows: list[Row], origins: dict[str, str], stats: Stats) -> None:
    """Make the features between linears a multiple of whole blocks for each rank.

    Features that more than linears, elementwise operations and quantization compute stay; shards
    of them that cut a block are an Error of `shard`.
    """
    for function in module.functions.values():
        for op in function:
            weights = weights_of(op.weight) if isinstance(op, Linear) else None
            if not isinstance(op, Linear) or not weights:
                continue
            name = origins.get(weights[0].name, weights[0].name)
            for dim in (0, 1):
                axes = planned_axes(module, rows, name, dim)
                _even(function, op, dim, module.mesh.group_size(axes), stats)


def can_pad(op: Linear, dim: int) -> bool:
    """Whether the features along a dimension of the weight of a linear may get zeros."""
    size = op.weight.type.shape[dim]
    return isinstance(size, int) and Features(size).follow(op.x if dim else op.result)


def _even(function: Function, op: Linear, dim: int, group_size: int, stats: Stats) -> None:
    size, block = op.weight.type.shape[dim], _block(op.weight, dim)
    if not isinstance(size, int) or -(-size // group_size) % block == 0:
        return
    features = Features(size)
    if not features.follow(op.x if dim else op.result):
        return
    unit = lcm(*features.blocks) * group_size
    features.pad(-size % unit)
    for each in function:
        retype(each)
    stats.count("blocks")
    stats.explain(
        f"{size} features get {-size % unit} of zeros, so that no block of {block} is cut over "
        f"{group_size} ranks"
    )


def _block(parameter: Value, dim: int) -> int:
    """The least number of features that any shard of a parameter must hold completely."""
    size = parameter.type.shape[dim]
    counts = [weight.type.shape[dim] for weight in weights_of(parameter) or ()]
    return lcm(*(size // count for count in counts if isinstance(count, int) and count > 1))


@dataclass
class Features:
    """The values and weights that have the same features, of which there are `size`.

    `parts` are the weights, each with the dimension of the features; `blocks` are the numbers of
    features that have a scale together.
    """

    size: int
    values: set[Value] = field(default_factory=set[Value])
    parts: dict[Weight, int] = field(default_factory=dict[Weight, int])
    blocks: list[int] = field(default_factory=lambda: [1])

    def follow(self, value: Value) -> bool:
        """Find all values and weights from one value; False where an operation needs the size."""
        if value in self.values:
            return True
        op = value.producer
        if value.type.shape[-1:] != (self.size,) or op is None:
            return False
        self.values.add(value)
        return self._source(op) and all(self._use(user, value) for user in value.users)

    def _source(self, op: Op) -> bool:
        if isinstance(op, Linear):
            return all(self._parameter(parameter, 0) for parameter in op.operands[1:])
        if isinstance(op, Scaled):
            return self._scales(op.scale) and op.zero is None and self.follow(op.x)
        wide = [v for v in op.operands if v.type.ndim and v.type.shape[-1] != 1]
        return _is_finite_at_zero(op) and all(map(self.follow, wide))

    def _use(self, user: Op, value: Value) -> bool:
        if isinstance(user, Linear):
            return user.x is value and self._parameter(user.weight, 1)
        if isinstance(user, DynamicScale):
            self.blocks.append(user.block or 1)
            return not user.block or all(isinstance(op, Scaled) for op in user.result.users)
        if isinstance(user, Scaled) and user.x is not value:
            return False
        return len(user.results) == 1 and self.follow(user.results[0])

    def _scales(self, scale: Value) -> bool:
        """Whether a scale is one for all features, or computed for each block of them."""
        count = scale.type.shape[-1]
        while isinstance(scale.producer, Dequantize):
            scale = scale.producer.x
        return count == 1 or isinstance(scale.producer, DynamicScale)

    def _parameter(self, parameter: Value, dim: int) -> bool:
        """Note the weights of a parameter, whose elements are 0 where those of its weights are."""
        weights, op = weights_of(parameter), parameter.producer
        zero = op.zero if isinstance(op, Dequantize) else None
        if not weights or (isinstance(zero, Weight) and is_shared(zero, self.size, dim)):
            return False
        own = [weight for weight in weights if not is_shared(weight, self.size, dim)]
        self.parts |= dict.fromkeys(own, dim)
        self.blocks.append(_block(parameter, dim))
        return all(map(used_once, own))

    def pad(self, more: int) -> None:
        """Add features of zeros to all weights; the caller infers the result types."""
        for weight, dim in self.parts.items():
            shape = [size for size in weight.type.shape if isinstance(size, int)]
            ref = pinned(weight.ref, tuple(shape), weight.type.dtype)
            added = more * shape[dim] // self.size
            shape[dim] += added
            weight.ref = ref.then(Pad(dim, added))
            weight.type = TensorType(weight.type.dtype, tuple(shape))


def _is_finite_at_zero(op: Op) -> bool:
    """Whether an operation on each element by itself gives finite numbers for zeros."""
    if len(op.results) != 1 or op.safe_values or op.sharding is None:
        return False
    finite = op.keeps_zeros or bool(op.sums) or op.bound(0) != "no"
    return finite and parse_rule(op.sharding).is_elementwise
