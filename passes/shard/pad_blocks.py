"""Pads features with zeros, or repeats scales, where shards would cut a block of one scale."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd, lcm
from typing import TYPE_CHECKING

from irc.ir.core import Function, Op, Value, Weight
from irc.ir.sharding import parse_rule
from irc.ir.types import TensorType
from irc.ops import Attention, CacheUpdate, Dequantize, DynamicScale, Linear
from irc.ops.quant import LEAST_BLOCK, QuantizedOp
from irc.pipeline import Stats
from irc.weights import Pad, RepeatedRef, with_shape

from ..shared.edit import retype, used_once
from ..shared.parameters import Product, is_shared, rounded, weights_of
from .segments import Projection

if TYPE_CHECKING:
    from .plan import Plan


def pad_blocks(plan: Plan) -> None:
    """Make the features between products a multiple of whole blocks for each rank.

    Rounded features become a multiple of the ranks: kernels multiply codes only where nothing is
    between them and the product. Features that more than products, elementwise operations and
    quantization compute stay; shards of them that cut a block are an Error of `shard`.
    """
    for function in plan.module.functions.values():
        for op in function:
            product = Product.of(op)
            if product is None:
                continue
            for dim in (product.inputs, product.outputs):
                _pad(function, product, dim, plan.group_size(product.name, dim), plan.stats)


def can_pad(op: Op, dim: int) -> bool:
    """Whether the features along a dimension of the weight of a product may get zeros."""
    product = Product.of(op)
    value = product.features(dim) if product is not None else None
    size = value.type.shape[-1] if value is not None else None
    return value is not None and isinstance(size, int) and Features(size).follow(value)


def _pad(function: Function, product: Product, dim: int, group_size: int, stats: Stats) -> None:
    parameter, value = product.parameter, product.features(dim)
    size, block = parameter.type.shape[dim], _block(parameter, dim)
    if not isinstance(size, int) or value is None or group_size == 1:
        return
    whole = -(-size // group_size) % block == 0
    if whole and size % group_size == 0:
        return
    features = Features(size)
    if not features.follow(value) or (whole and not features.rounded):
        return
    more = -size % (lcm(*features.blocks) * group_size)
    features.pad(more)
    for op in function:
        retype(op)
    stats.count("blocks")
    why = "no padding is masked behind" if whole else f"no block of {block} is cut over"
    what = "rounded values" if whole else f"{group_size} ranks"
    stats.explain(f"{size} features get {more} of zeros, so that {why} {what}")


def _block(parameter: Value, dim: int) -> int:
    """The least number of features that any shard of a parameter must hold completely."""
    size = parameter.type.shape[dim]
    counts = [weight.type.shape[dim] for weight in weights_of(parameter) or ()]
    return lcm(*(size // count for count in counts if isinstance(count, int) and count > 1))


@dataclass
class Features:
    """The values and weights that have the same features, of which there are `size`.

    `parts` are the weights, each with the dimension of the features; `blocks` are the numbers of
    features that have a scale together; `rounded` says that some of the values are codes.
    """

    size: int
    rounded: bool = False
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
        product = Product.of(op)
        if product is not None:
            biases = all(self._parameter(bias, 0) for bias in op.operands[2:])
            return biases and self._parameter(product.parameter, product.outputs)
        if isinstance(op, QuantizedOp):
            self.rounded = True
            return self._scales(op.scale) and op.zero is None and self.follow(op.x)
        wide = [v for v in op.operands if v.type.ndim and v.type.shape[-1] != 1]
        return _is_finite_at_zero(op) and all(map(self.follow, wide))

    def _use(self, user: Op, value: Value) -> bool:
        product = Product.of(user)
        if product is not None:
            return user.operands[0] is value and self._parameter(product.parameter, product.inputs)
        if isinstance(user, DynamicScale):
            self.blocks.append(user.block or 1)
            return not user.block or all(isinstance(op, QuantizedOp) for op in user.result.users)
        if isinstance(user, QuantizedOp) and user.x is not value:
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
            ref = with_shape(weight.ref, tuple(shape), weight.type.dtype)
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


# -- scales of weights whose blocks shards would cut, as imported checkpoints have them


def keeps_blocks(weight: Weight, dim: int, ranks: int, products: list[Op]) -> bool:
    """Whether shards of a weight cut no block of one scale, or blocks or features can change."""
    for op in weight.users:
        if not isinstance(op, Dequantize) or op.x is not weight:
            continue
        size, count = weight.type.shape[dim], op.scale.type.shape[dim]
        if not isinstance(size, int) or not isinstance(count, int) or count == 1:
            continue
        block, part = size // count, -(-size // ranks)
        if gcd(block, part) < min(block, LEAST_BLOCK):
            return any(can_pad(product, dim) for product in products)
    return True


def smaller_blocks(plan: Plan) -> None:
    """Let every shard of a weight hold complete blocks, where blocks of `LEAST_BLOCK` allow it."""
    for op in plan.module.ops():
        if not isinstance(op, Dequantize) or not isinstance(op.x, Weight):
            continue
        for dim, size in enumerate(op.x.type.shape):
            ranks = plan.group_size(op.x.name, dim)
            if isinstance(size, int) and ranks > 1:
                _fit(op, dim, -(-size // ranks), plan.stats)


def blocks_within_heads(op: Attention, heads: int, kv_heads: int, stats: Stats) -> bool:
    """Let no block of the projections around an attention hold parts of two heads."""
    heads_of: list[tuple[Value, int, int]] = []  # a parameter, its dimension, and how many it has
    user = next(iter(rounded(op.result).users), None)
    if isinstance(user, Linear):
        heads_of.append((user.weight, 1, heads))
    for value, count in ((op.q, heads), (op.k, kv_heads), (op.v, kv_heads)):
        projection = _projection(value)
        if projection is not None:
            heads_of += [(parameter, dim, count) for parameter, dim in projection.parts]
    done = [
        _fit(value.producer, dim, _part(value, dim, count), stats) for value, dim, count in heads_of
    ]
    return any(done)


def _projection(value: Value) -> Projection | None:
    """The projection that makes an operand of attention, behind what treats heads separately."""
    while True:
        projection = Projection.of(value) if value.type.ndim == 3 else None
        op = value.producer
        if projection is not None or op is None or not op.operands:
            return projection
        value = op.new if isinstance(op, CacheUpdate) else op.operands[0]


def _part(value: Value, dim: int, count: int) -> int:
    size = value.type.shape[dim]
    return size // count if isinstance(size, int) else 0


def _fit(op: Op | None, dim: int, part: int, stats: Stats) -> bool:
    """Let blocks of a dequantized weight divide `part` elements; whether they changed."""
    if not isinstance(op, Dequantize):
        return False
    size, count = op.x.type.shape[dim], op.scale.type.shape[dim]
    if not isinstance(size, int) or not isinstance(count, int) or count == 1:
        return False
    block, level = size // count, op.scale.producer
    common = gcd(block, part)
    scale = level.x if isinstance(level, Dequantize) else op.scale
    values = [value for value in (scale, op.zero) if value is not None]
    weights = [value for value in values if isinstance(value, Weight) and used_once(value)]
    if common == block or common < LEAST_BLOCK or len(weights) < len(values):
        return False
    for weight in weights:
        _repeat(weight, dim, block // common)
    if isinstance(level, Dequantize):
        retype(level)
    name = op.x.name
    stats.explain(f"{name}: blocks of {block} become blocks of {common}, which no rank cuts")
    return True


def _repeat(weight: Weight, dim: int, count: int) -> None:
    """Every element of a weight `count` times along a dimension."""
    type, ndim = weight.type, weight.type.ndim
    old = tuple(size for size in type.shape if isinstance(size, int))
    counts = tuple(count if i == dim else 1 for i in range(ndim))
    shape = tuple(size * times for size, times in zip(old, counts, strict=True))
    weight.ref = RepeatedRef(with_shape(weight.ref, old, type.dtype), counts, shape)
    weight.type = TensorType(type.dtype, shape)
