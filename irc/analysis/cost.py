"""The cost of operations on one rank: arithmetic, bytes to and from memory, kernels, and time.

The time of an operation is that of its arithmetic or of its bytes, whichever is longer, plus the
start of its kernel. Caches are updated in place; each operation is a kernel of its own, but for
those that dequantize what products read: these read the codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import cast

import numpy as np

from ..ir.core import Function, Op, Value
from ..ir.declare import placeholder
from ..ir.expansion import expansion
from ..ops import (
    Attention,
    Constant,
    Conv,
    Dequantize,
    Experts,
    FusedAttention,
    FusedLinear,
    GatedMlp,
    Linear,
    Matmul,
    QuantizeRows,
    Return,
    RopeAndCache,
    Transpose,
)
from ..ops.collective import Collective
from ..ops.fused_attention import NewTokens
from .sizes import LocalSizes
from .topology import Device

PER_GB = 35.0  # microseconds per call that 10^9 bytes on each rank are worth
_NARROW = {"i8", "f8e4m3"}  # dtypes of products of codes
_ARITHMETIC = "f32"  # the dtype of all arithmetic but matrix products


@dataclass(frozen=True)
class Cost:
    """Floating-point operations (a multiply-add is two), bytes read and written, kernels.

    `dtype` is that of matrix products, f32 without any.
    """

    flops: float = 0
    bytes: float = 0
    kernels: int = 1
    dtype: str = _ARITHMETIC

    def time(self, device: Device) -> float:
        """Microseconds on a device."""
        arithmetic = self.flops / device.peak(self.dtype)
        memory = self.bytes / device.hbm_gb_s / 1e3
        return max(arithmetic, memory) + self.kernels * device.kernel_us


FREE = Cost(kernels=0)


def operations(function: Function) -> Iterator[Op]:
    """Every operation that runs, in order, those of called functions at every call."""
    for op in function:
        if op.opname == "call":
            yield from operations(op.attributes["callee"])
        elif op.opname != "return":
            yield op


def cost_of(op: Op, sizes: LocalSizes) -> Cost:
    """The cost of one operation; collectives are counted in communication.py and are free here."""
    count = _PRODUCTS.get(type(op))
    if count is not None:
        return count(op, sizes)
    if isinstance(op, (Collective, Constant, Return)) or is_view(op, sizes):
        return FREE
    if op.selects or op.in_place:
        return Cost(0, _touched(op, sizes))
    if op.moves_data or not op.operands:
        return Cost(0, _moved(op, sizes))
    flops, dtype = _composite(op, sizes) if op.composite else (_elements(op, sizes), _ARITHMETIC)
    return Cost(flops, _moved(op, sizes), dtype=dtype)


def total(costs: Iterable[Cost]) -> Cost:
    """The sum of costs; `dtype` is that of the most arithmetic."""
    summands = list(costs)
    heaviest = max(summands, key=lambda cost: cost.flops, default=FREE)
    return Cost(
        sum(cost.flops for cost in summands),
        sum(cost.bytes for cost in summands),
        sum(cost.kernels for cost in summands),
        heaviest.dtype,
    )


def _composite(op: Op, sizes: LocalSizes) -> tuple[float, str]:
    """The arithmetic of the expansion, and its dtype: the share of this rank of a sharded one."""
    parts, share = _expanded(op, sizes)
    cost = total(cost_of(part, sizes) for part in parts)
    return cost.flops * share, cost.dtype


def _expanded(op: Op, sizes: LocalSizes) -> tuple[Sequence[Op], float]:
    """The expansion of a composite operation, and the share of this rank in it."""
    types = [v.type.replace(axes=((),) * v.type.ndim) for v in op.operands]  # sums stay partial
    stand_ins = tuple(Value(type, None, i) for i, type in enumerate(types))
    whole = sum(sizes.count(result.type.replicated) for result in op.results)
    share = sum(sizes.count(result.type) for result in op.results) / whole if whole else 0
    return expansion(placeholder(op, stand_ins)).ops, share


def _elements(op: Op, sizes: LocalSizes) -> int:
    """One operation per element of the largest operand or result."""
    return max((sizes.count(v.type) for v in (*op.operands, *op.results)), default=0)


def _bytes(values: Iterable[Value | None], sizes: LocalSizes) -> int:
    return sum(sizes.bytes(value.type) for value in values if value is not None)


def _moved(op: Op, sizes: LocalSizes) -> int:
    """Every operand read once, every result written once."""
    read = dict.fromkeys(op.operands)
    if isinstance(op, Experts):
        read = dict.fromkeys(stored for value in op.operands for stored in _stored(value))
    written = [result for result in op.results if not is_kept_as_codes(result)]
    return _bytes(read, sizes) + _bytes(written, sizes)


def _product(op: Op, sizes: LocalSizes) -> Cost:
    """Two operations per element of the result and summand; with a gate there are two products."""
    x, products = op.operands[0].type, 1 if getattr(op, "gate", None) is None else 2
    summands = sizes.shape(x)[-1:]
    if isinstance(op, Conv):
        summands = sizes.shape(op.weight.type)[1:]
    flops = 2 * products * sizes.count(op.result.type) * prod(summands)
    read = dict.fromkeys(stored for value in op.operands for stored in _stored(value))
    codes = {next(_stored(value)).type.dtype for value in op.operands[:2]}
    kind = codes.pop() if len(codes) == 1 and codes < _NARROW else x.dtype
    return Cost(flops, _bytes(read, sizes) + _bytes(op.results, sizes), dtype=kind)


def _stored(value: Value) -> Iterator[Value]:
    """What a product reads from memory: a value, or the codes and scales that it stands for."""
    op = value.producer
    if isinstance(op, Transpose):
        yield from _stored(op.x)
    elif isinstance(op, Dequantize) and _in_products(value):
        for operand in op.operands:
            yield from _stored(operand)
    elif isinstance(op, QuantizeRows) and is_kept_as_codes(value):
        yield from op.results[:2]
    else:
        yield value


def _in_products(value: Value) -> bool:
    """Whether only products read a value, as it is, transposed, or to scale what they read."""
    return bool(value.users) and all(
        isinstance(user, (Linear, Matmul, GatedMlp, FusedLinear, Experts))
        or (isinstance(user, (Transpose, Dequantize)) and _in_products(user.result))
        for user in value.users
    )


def is_kept_as_codes(value: Value) -> bool:
    """Whether a value is numbers of quantize_rows that only products read, which read the codes."""
    op = value.producer
    is_numbers = isinstance(op, QuantizeRows) and value is op.results[2]
    return is_numbers and (not value.users or _in_products(value))


def visible_pairs(op: Attention, tokens: int, keys: int, past: int) -> tuple[int, int]:
    """(visible pairs of query and key, keys that are read) of one row and head.

    Query i is at position `past` + i with a `past` operand, else at `keys` - `tokens` + i.
    """
    first = past if op.past is not None else keys - tokens
    filled = min(keys, first + tokens) if op.past is not None else keys
    places = first + np.arange(tokens)
    end = np.clip(places + 1, 0, filled) if op.causal else np.full(tokens, filled)
    begin = np.clip(places + 1 - op.window, 0, end) if op.window else np.zeros(tokens, int)
    pairs = int(np.sum(end - begin))
    return pairs, int(end.max() - begin.min()) if pairs else 0


def _attention(op: Op, sizes: LocalSizes) -> Cost:
    """Scores and their products with v; the scores stay out of memory."""
    op = cast("Attention", op)
    batch, tokens, features = sizes.shape(op.q.type)
    keys = sizes.shape(op.k.type)[2 if op.cached else 1]
    pairs, read = visible_pairs(op, tokens, keys, sizes.past)
    flops = 2 * batch * pairs * (features + sizes.shape(op.result.type)[2])
    cache = _bytes((op.k, op.v), sizes) * read / max(1, keys)
    others = _bytes((op.q, op.bias, op.mask, op.sinks, op.result), sizes)
    return Cost(flops, cache + others, dtype=op.q.type.dtype)


def _new_tokens(op: Op, sizes: LocalSizes) -> Cost:
    """The arithmetic of the parts; the bytes of new tokens, of their rows, and of the attention."""
    assert isinstance(op, NewTokens)
    parts, share = _expanded(op, sizes)
    whole = total(cost_of(part, sizes) for part in parts)
    attention = sum(cost_of(part, sizes).bytes for part in parts if isinstance(part, Attention))
    rows = 2 * _bytes((op.k, op.v), sizes) + _bytes((op.q,), sizes) * (0 if attention else 2)
    return Cost(whole.flops * share, attention * share + rows, dtype=whole.dtype)


def _touched(op: Op, sizes: LocalSizes) -> int:
    """Bytes of an operation that reads only selected elements, or writes only updated ones."""
    kept = op.in_place or op.selects
    others = _bytes([v for name, v in op.named_operands() if name != kept], sizes)
    return 2 * others if op.in_place else others + 2 * _bytes(op.results, sizes)


def is_view(op: Op, sizes: LocalSizes) -> bool:
    """Whether the result is the memory of the first operand, read in another way.

    A transpose is one if it moves dimensions of one element only, or if it is that of matrices
    that are multiplied: products read either order. They read codes as well.
    """
    if isinstance(op, Dequantize):
        return _in_products(op.result)
    if not isinstance(op, Transpose):
        return op.is_view
    shape = sizes.shape(op.x.type)
    order = [i % len(shape) for i in op.order]
    moved = [i for i in order if shape[i] != 1]
    if moved == sorted(moved):
        return True
    last = len(shape) - 2
    swapped = [*range(last), last + 1, last]
    return order == swapped and all(isinstance(user, Matmul) for user in op.result.users)


_PRODUCTS: dict[type[Op], Callable[[Op, LocalSizes], Cost]] = {
    Matmul: _product,
    Linear: _product,
    GatedMlp: _product,
    FusedLinear: _product,
    Conv: _product,
    Attention: _attention,
    FusedAttention: _new_tokens,
    RopeAndCache: _new_tokens,
}
