"""What operations cost one rank: arithmetic, bytes to and from memory, kernels; and the time.

The time of an operation is that of its arithmetic or of its bytes, whichever is longer, and the
cost of starting its kernel. Caches are updated in place; each operation is a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias, cast

import numpy as np

from ..core import Function, Op, Value
from ..expansion import expansion
from ..ops.attention import Attention
from ..ops.collective import Collective
from .sizes import LocalSizes
from .topology import Device

_ARITHMETIC = "f32"  # what everything but matrix products computes in


@dataclass(frozen=True)
class Cost:
    """Floating-point operations (a multiply-add is two), bytes read and written, kernels.

    `dtype` is what matrix units multiply, f32 where they have no part in it.
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
    """Every operation that runs, in order: of the functions that are called, each time, as well."""
    for op in function:
        if op.opname == "call":
            yield from operations(op.attributes["callee"])
        elif op.opname != "return":
            yield op


def cost_of(op: Op, sizes: LocalSizes) -> Cost:
    """The cost of one operation; of a collective, which costs time of its own, nothing."""
    count = _COUNTS.get(op.opname)
    if count is not None:
        return count(op, sizes)
    if isinstance(op, Collective) or op.opname in _FREE:
        return FREE
    flops = _composite(op, sizes) if op.composite else _elements(op, sizes)
    return Cost(flops, _moved(op, sizes))


def total(costs: Iterable[Cost]) -> Cost:
    """Everything added up; `dtype` is that of the most arithmetic."""
    found = list(costs)
    heaviest = max(found, key=lambda cost: cost.flops, default=FREE)
    return Cost(
        sum(cost.flops for cost in found),
        sum(cost.bytes for cost in found),
        sum(cost.kernels for cost in found),
        heaviest.dtype,
    )


def _composite(op: Op, sizes: LocalSizes) -> float:
    """The operations of the expansion: this rank's share of them, where the op is split."""
    flops = sum(cost_of(part, sizes).flops for part in expansion(op).ops)
    whole = sum(sizes.count(result.type.whole) for result in op.results)
    return flops * sum(sizes.count(result.type) for result in op.results) / whole if whole else 0


def _elements(op: Op, sizes: LocalSizes) -> int:
    """One operation per element of the largest operand or result."""
    return max((sizes.count(v.type) for v in (*op.operands, *op.results)), default=0)


def _bytes(values: Iterable[Value | None], sizes: LocalSizes) -> int:
    return sum(sizes.bytes(value.type) for value in values if value is not None)


def _moved(op: Op, sizes: LocalSizes) -> int:
    """Every operand read once, every result written once."""
    return _bytes(dict.fromkeys(op.operands), sizes) + _bytes(op.results, sizes)


def _product(op: Op, sizes: LocalSizes) -> Cost:
    """`matmul` and `linear`: two operations per element of the result and summand."""
    x = op.operands[0].type
    flops = 2 * sizes.count(op.result.type) * sizes.shape(x)[-1]
    return Cost(flops, _moved(op, sizes), dtype=x.dtype)


def _gated_mlp(op: Op, sizes: LocalSizes) -> Cost:
    x = op.operands[0].type
    flops = 4 * sizes.count(op.result.type) * sizes.shape(x)[-1]
    return Cost(flops, _moved(op, sizes), dtype=x.dtype)


def visible_pairs(op: Attention, tokens: int, keys: int, past: int) -> tuple[int, int]:
    """(pairs of query and key that count, keys that are read) of one row and head.

    Query i stands at `past` + i where there is a `past` operand, else at `keys` - `tokens` + i.
    """
    first = past if op.past is not None else keys - tokens
    filled = min(keys, first + tokens) if op.past is not None else keys
    places = first + np.arange(tokens)
    end = np.clip(places + 1, 0, filled) if op.causal else np.full(tokens, filled)
    begin = np.clip(places + 1 - op.window, 0, end) if op.window else np.zeros(tokens, int)
    pairs = int(np.sum(end - begin))
    return pairs, int(end.max() - begin.min()) if pairs else 0


def _attention(op: Op, sizes: LocalSizes) -> Cost:
    """Scores and their products with v; the scores do not go through memory."""
    op = cast("Attention", op)
    batch, tokens, features = sizes.shape(op.q.type)
    keys = sizes.shape(op.k.type)[2 if op.cached else 1]
    pairs, read = visible_pairs(op, tokens, keys, sizes.past)
    flops = 2 * batch * pairs * (features + sizes.shape(op.result.type)[2])
    cache = _bytes((op.k, op.v), sizes) * read / max(1, keys)
    others = _bytes((op.q, op.bias, op.mask, op.result), sizes)
    return Cost(flops, cache + others, dtype=op.q.type.dtype)


def _embedding(op: Op, sizes: LocalSizes) -> Cost:
    """The rows that are looked up are read and written; the rest of the table is not touched."""
    return Cost(0, _bytes(op.operands[:1], sizes) + 2 * _bytes(op.results, sizes))


def _gather(op: Op, sizes: LocalSizes) -> Cost:
    return Cost(0, _bytes(op.operands[1:], sizes) + 2 * _bytes(op.results, sizes))


def _part(op: Op, sizes: LocalSizes) -> Cost:
    """Only the part that is taken is read."""
    return Cost(0, 2 * _bytes(op.results, sizes))


def _update(op: Op, sizes: LocalSizes) -> Cost:
    """The new tokens, read and written in place."""
    return Cost(0, 2 * _bytes(op.operands[1:2], sizes))


def _scatter(op: Op, sizes: LocalSizes) -> Cost:
    """A copy of x, and the updates and their places over it."""
    x, indices, updates = op.operands
    return Cost(0, 2 * _bytes((x, updates), sizes) + _bytes((indices,), sizes))


def is_view(op: Op, sizes: LocalSizes) -> bool:
    """Whether the result is the memory of the first operand, read in another way.

    Of the transposes those are that move dimensions of one element only, and those of matrices
    that are multiplied, for which products have a way of their own.
    """
    if op.opname != "transpose":
        return op.opname in _VIEWS
    shape = sizes.shape(op.operands[0].type)
    order = [i % len(shape) for i in op.attributes["order"]]
    moved = [i for i in order if shape[i] != 1]
    if moved == sorted(moved):
        return True
    last = len(shape) - 2
    swapped = [*range(last), last + 1, last]
    return order == swapped and all(user.opname == "matmul" for user in op.result.users)


def _transpose(op: Op, sizes: LocalSizes) -> Cost:
    return FREE if is_view(op, sizes) else _copy(op, sizes)


def _copy(op: Op, sizes: LocalSizes) -> Cost:
    return Cost(0, _moved(op, sizes))


Count: TypeAlias = Callable[[Op, LocalSizes], Cost]
_VIEWS = frozenset(("reshape", "squeeze", "unsqueeze"))
_FREE = _VIEWS | {"constant", "return", "rank"}  # views, and numbers that stay where they are
_COUNTS: dict[str, Count] = {
    "matmul": _product,
    "linear": _product,
    "gated_mlp": _gated_mlp,
    "attention": _attention,
    "embedding": _embedding,
    "gather": _gather,
    "gather_elements": _gather,
    "transpose": _transpose,
    "slice": _part,
    "split": _part,
    "shard_slice": _part,
    "cache_update": _update,
    "scatter_elements": _scatter,
    **dict.fromkeys(
        ("full", "iota", "cast", "expand", "concat", "stack", "pad", "repeat", "flip"), _copy
    ),
}
