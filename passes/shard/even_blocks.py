"""Pads features with zeros where shards would cut a block, or rounded values would be masked."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import lcm

from irc.ir.core import Function, Module, Op, Value, Weight
from irc.ir.sharding import parse_rule
from irc.ir.types import TensorType
from irc.ops import Dequantize, DynamicScale, Linear, Matmul, Transpose
from irc.ops.quant import QuantizedOp
from irc.pipeline import Stats
from irc.weights import Pad, pinned

from ..shared.edit import retype, used_once
from ..shared.parameters import is_shared, weights_of
from .place import planned_axes
from .rows import Row


@dataclass(frozen=True)
class Product:
    """A linear, or a matmul by a weight or its transpose, with the dimensions of the weight."""

    op: Linear | Matmul
    parameter: Value
    inputs: int
    outputs: int

    @staticmethod
    def of(op: Op) -> Product | None:
        """The operation as a product with a weight, if it is one."""
        if isinstance(op, Linear):
            return Product(op, op.weight, 1, 0) if weights_of(op.weight) else None
        if not isinstance(op, Matmul) or op.y.type.ndim < 2:
            return None
        last, turned = op.y.type.ndim - 1, op.y.producer
        swapped = (*range(last - 1), last, last - 1)
        if isinstance(turned, Transpose) and turned.order == swapped and used_once(op.y):
            return Product(op, turned.x, last, last - 1) if weights_of(turned.x) else None
        return Product(op, op.y, last - 1, last) if weights_of(op.y) else None

    @property
    def name(self) -> str:
        """The name of the weight, or of its codes."""
        return next(weight.name for weight in weights_of(self.parameter) or ())

    def features(self, dim: int) -> Value | None:
        """The value that has the features of a dimension of the weight."""
        if dim not in (self.inputs, self.outputs):
            return None
        return self.op.x if dim == self.inputs else self.op.result


def even_blocks(module: Module, rows: list[Row], origins: dict[str, str], stats: Stats) -> None:
    """Make the features between products a multiple of whole blocks for each rank.

    Rounded features become a multiple of the ranks: kernels multiply codes only where nothing is
    between them and the product. Features that more than products, elementwise operations and
    quantization compute stay; shards of them that cut a block are an Error of `shard`.
    """
    for function in module.functions.values():
        for op in function:
            product = Product.of(op)
            if product is None:
                continue
            name = origins.get(product.name, product.name)
            for dim in (product.inputs, product.outputs):
                axes = planned_axes(module, rows, name, dim)
                _even(function, product, dim, module.mesh.group_size(axes), stats)


def can_pad(op: Op, dim: int) -> bool:
    """Whether the features along a dimension of the weight of a product may get zeros."""
    product = Product.of(op)
    value = product.features(dim) if product is not None else None
    size = value.type.shape[-1] if value is not None else None
    return value is not None and isinstance(size, int) and Features(size).follow(value)


def _even(function: Function, product: Product, dim: int, group_size: int, stats: Stats) -> None:
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
    for each in function:
        retype(each)
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
