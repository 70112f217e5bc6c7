"""Repeats scales of weights whose blocks shards would cut, as imported checkpoints have them."""

from __future__ import annotations

from math import gcd

from irc.ir.core import Module, Op, Value, Weight
from irc.ir.types import TensorType
from irc.ops import Attention, CacheUpdate, Dequantize, Linear
from irc.ops.quant import LEAST_BLOCK
from irc.pipeline import Stats
from irc.weights import RepeatedRef, pinned

from ..shared.edit import retype, used_once
from ..shared.quantized import rounded
from .place import planned_axes
from .rows import Row
from .segments import Projection


def smaller_blocks(module: Module, rows: list[Row], origins: dict[str, str], stats: Stats) -> None:
    """Let every shard of a weight hold complete blocks, where blocks of `LEAST_BLOCK` allow it."""
    for op in module.ops():
        if not isinstance(op, Dequantize) or not isinstance(op.x, Weight):
            continue
        name = origins.get(op.x.name, op.x.name)
        for dim, size in enumerate(op.x.type.shape):
            ranks = module.mesh.group_size(planned_axes(module, rows, name, dim))
            if isinstance(size, int) and ranks > 1:
                _fit(op, dim, -(-size // ranks), stats)


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
    weight.ref = RepeatedRef(pinned(weight.ref, old, type.dtype), counts, shape)
    weight.type = TensorType(type.dtype, shape)
