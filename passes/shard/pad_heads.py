"""Makes the heads of every attention divide over the ranks, before anything is sharded.

Query heads that share a key-value head stay with it. Some key-value heads are replicated, each copy
with some of its query heads, and the rest is padded with heads of zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from irc.errors import Error
from irc.ir.core import Function, Op, Value, Weight
from irc.ir.types import TensorType
from irc.ops import (
    Attention,
    CacheUpdate,
    Cast,
    Concat,
    Dequantize,
    DynamicScale,
    LayerNorm,
    Linear,
    Matmul,
    Repeat,
    Reshape,
    RmsNorm,
    Rope,
    Slice,
    Split,
)
from irc.weights import ConcatRef, Ref, RepeatedRef, ZerosRef, with_shape
from irc.weights import Slice as SliceStep

from ..shared.edit import change, insert_before, retype, used_once
from ..shared.parameters import has_one_scale, is_shared, rounded, weights_of
from .pad_blocks import blocks_within_heads
from .segments import Projection

if TYPE_CHECKING:
    from .plan import Plan


def pad_heads(plan: Plan) -> None:
    """Rewrite weights and caches of every attention whose heads do not divide."""
    for function in plan.module.functions.values():
        blocks = [op for op in function if isinstance(op, Attention)]
        changed = [_pad(plan, op) for op in blocks]
        if not any(changed):
            continue
        for op in function:
            retype(op)


def _pad(plan: Plan, op: Attention) -> bool:
    features, kv_heads = op.q.type.shape[2], op.key_heads
    if not isinstance(features, int) or not isinstance(kv_heads, int):
        return False
    heads = features // op.head_dim
    block = Block.of(op, heads, kv_heads)
    group_size = _group_size(plan, block)
    if heads % group_size == 0 and kv_heads % group_size == 0:
        return False
    if block is None and blocks_within_heads(op, heads, kv_heads, plan.stats):
        block = Block.of(op, heads, kv_heads)
    name = op.loc.scope if op.loc is not None and op.loc.scope else "attention"
    what = f"{name}: {heads} query and {kv_heads} key-value heads"
    assignment = assign_heads(heads, kv_heads, group_size)
    if block is None and kv_heads == 1 and heads % group_size == 0:
        return False  # the only key-value head is replicated
    if block is None or not block.allows(assignment):
        plan.stats.explain(
            f"{what} do not divide over {group_size} ranks, and an operation that makes or uses "
            "them is shared, is not a plain projection, or has scales that two heads share; "
            "attention is replicated"
        )
        return False
    block.rewrite(assignment)
    plan.stats.count("heads")
    plan.stats.explain(f"{what} over {group_size} ranks: {assignment.reason(group_size)}")
    return True


def _group_size(plan: Plan, block: Block | None) -> int:
    """The number of ranks over which the plan shards the query projection; 1 if it does not."""
    if block is None:
        return plan.module.mesh.group_size(plan.mesh_axes(("tp",)))
    return plan.group_size(block.query.weight.name, block.query.split)


# -- which heads each rank gets


Heads = tuple[int | None, ...]  # per new head, the old one that it copies, or None for zeros


@dataclass(frozen=True)
class HeadAssignment:
    """The new query and key-value heads, in order: equal numbers for each rank, groups together."""

    queries: Heads
    keys: Heads

    def reason(self, group_size: int) -> str:
        """The assignment as a clause, for --explain."""
        copies = max(self.keys.count(head) for head in self.keys if head is not None)
        held = "no head is replicated"
        if copies > 1:
            held = f"key-value heads are held up to {copies} times"
        zeros = self.queries.count(None), self.keys.count(None)
        padded = f", {zeros[0]} query and {zeros[1]} key-value heads of zeros are added"
        return (
            f"{held}{padded if any(zeros) else ''}, so that a rank has "
            f"{len(self.queries) // group_size} and {len(self.keys) // group_size}"
        )


def assign_heads(heads: int, kv_heads: int, group_size: int) -> HeadAssignment:
    """The assignment of the fewest heads in which every rank gets equal numbers of both."""
    group = heads // kv_heads
    options = [_option(heads, kv_heads, group_size, copies) for copies in range(1, group + 1)]
    return min(options, key=lambda option: len(option.queries) + len(option.keys))


def _option(heads: int, kv_heads: int, group_size: int, copies: int) -> HeadAssignment:
    """Every key-value head up to `copies` times, each copy with its query heads."""
    group = heads // kv_heads
    share = -(-group // copies)
    keys: list[int | None] = []
    queries: list[int | None] = []
    for kv in range(kv_heads):
        for begin in range(0, group, share):
            mine = range(begin, min(begin + share, group))
            keys.append(kv)
            queries += [kv * group + i for i in mine] + [None] * (share - len(mine))
    missing = -len(keys) % group_size
    return HeadAssignment((*queries, *[None] * (missing * share)), (*keys, *[None] * missing))


# -- the operations around an attention that change when the number of heads does


@dataclass(frozen=True)
class Path:
    """The operations between a projection and an operand of attention."""

    projection: Projection
    ops: tuple[Op, ...]
    heads: int

    @property
    def caches(self) -> list[Value]:
        """The arguments that hold heads of earlier calls."""
        return [op.cache for op in self.ops if isinstance(op, CacheUpdate)]

    def give(self, slots: Heads, done: set[Weight | Op]) -> None:
        """Make the projection give other heads, and adapt the operations behind it."""
        for parameter, dim in self.projection.parts:
            for weight in _in_heads(parameter, dim, self.heads) or ():
                if weight not in done:
                    _rearrange(weight, dim, self.heads, slots, _zero_of(parameter, weight))
                    done.add(weight)
        for op in self.ops:
            if isinstance(op, Reshape) and op not in done:
                size = op.shape[2]
                assert isinstance(size, int)
                new = size // self.heads * len(slots)
                change(op, shape=(*op.shape[:2], new, *op.shape[3:]))
                done.add(op)
        for cache in self.caches:
            shape = cache.type.shape
            cache.type = cache.type.replace(shape=(shape[0], len(slots), *shape[2:]))


def path_of(value: Value, user: Op, heads: int) -> Path | None:
    """The path of the heads of an operand of `user`, if they have no other use."""
    ops: list[Op] = []
    while True:
        op = value.producer
        if any(other is not user and not _keeps(op, value, other) for other in value.users):
            return None
        projection = Projection.of(value) if value.type.ndim == 3 else None
        if projection is not None:
            weights = [_in_heads(parameter, dim, heads) for parameter, dim in projection.parts]
            return Path(projection, tuple(ops), heads) if None not in weights else None
        if op is None or not by_head(op, heads):
            return None
        ops.append(op)
        user, value = op, op.new if isinstance(op, CacheUpdate) else op.operands[0]


def _in_heads(parameter: Value, dim: int, heads: int) -> list[Weight] | None:
    """The weights of a parameter that have numbers of every head in a dimension.

    None where heads share some, or a weight has other uses.
    """
    size, weights = parameter.type.shape[dim], weights_of(parameter)
    own = [weight for weight in weights or () if not is_shared(weight, size, dim)]
    sizes = [weight.type.shape[dim] for weight in own]
    whole = all(isinstance(size, int) and size % heads == 0 for size in sizes)
    return own if own and whole and all(map(used_once, own)) else None


def _keeps(op: Op | None, value: Value, user: Op) -> bool:
    """Whether a use only passes a cache to the next call."""
    if not isinstance(op, CacheUpdate) or user.opname != "return" or user.parent is None:
        return False
    aliases = user.parent.aliases()
    uses = [i for i, returned in enumerate(user.operands) if returned is value]
    return all(aliases.get(i) == op.cache.index for i in uses)


def by_head(op: Op, heads: int) -> bool:
    """Whether an operation treats heads separately; in 4 dimensions heads are one of them."""
    match op:
        case CacheUpdate():
            return isinstance(op.cache.owner, Function) and len(op.cache.users) == 1
        case Reshape():
            old, new = op.x.type.shape, op.shape
            parted = old if len(old) == 4 else new
            return {len(old), len(new)} == {3, 4} and (*old[:2], heads) == (*new[:2], parted[2])
        case RmsNorm() | LayerNorm():
            return op.operands[0].type.ndim == 4
        case Split():
            return op.x.type.ndim == 4 and op.dim % 4 == 3
        case Rope():
            return op.x.type.shape[2] == heads * op.head_dim
        case _:
            return isinstance(op, Cast) or has_one_scale(op)


@dataclass(frozen=True)
class Block:
    """An attention, the paths to its operands and the projection behind it."""

    op: Attention
    paths: tuple[Path, Path, Path]
    output: Value
    inputs: int  # the dimension of the output projection that has the heads

    @staticmethod
    def of(op: Attention, heads: int, kv_heads: int) -> Block | None:
        """The block around an attention, if it can be rewritten."""
        mixed = rounded(op.result)
        user = next(iter(mixed.users), None)
        if len(mixed.users) != 1 or not isinstance(user, (Linear, Matmul)):
            return None
        x, output, *_ = user.operands
        inputs = 1 if isinstance(user, Linear) else 0
        if x is not mixed or output.type.ndim != 2 or _in_heads(output, inputs, heads) is None:
            return None
        if not _rounds_heads(op):
            return None
        counts = (heads, kv_heads, kv_heads)
        values = (op.q, op.k, op.v)
        q, k, v = (path_of(v, op, n) for v, n in zip(values, counts, strict=True))
        if q is None or k is None or v is None or not _complete((q, k, v), op):
            return None
        return Block(op, (q, k, v), output, inputs)

    @property
    def query(self) -> Projection:
        """The projection of the queries."""
        return self.paths[0].projection

    def allows(self, assignment: HeadAssignment) -> bool:
        """Whether queries and keys may share their weight."""
        weights = {path.projection.weight for path in self.paths}
        return len(weights) == 3 or assignment.queries == assignment.keys

    def rewrite(self, assignment: HeadAssignment) -> None:
        """Write the new heads; the caller infers the result types."""
        done: set[Weight | Op] = set()
        new = (assignment.queries, assignment.keys, assignment.keys)
        for path, slots in zip(self.paths, new, strict=True):
            path.give(slots, done)
        heads = self.paths[0].heads
        for weight in _in_heads(self.output, self.inputs, heads) or ():
            zero = _zero_of(self.output, weight)
            _rearrange(weight, self.inputs, heads, assignment.queries, zero)
        for scores in (self.op.mask, self.op.bias):
            if scores is not None and scores.type.shape[1] != 1:
                _select(self.op, scores, 1, assignment.queries)
        if self.op.sinks is not None:
            _select(self.op, self.op.sinks, 0, assignment.queries)


def _rounds_heads(attention: Attention) -> bool:
    """Whether no block of the result with a scale of its own holds parts of two heads."""
    scales = [user for user in attention.result.users if isinstance(user, DynamicScale)]
    return all(op.block == 0 or attention.head_dim % op.block == 0 for op in scales)


def _complete(paths: tuple[Path, ...], attention: Attention) -> bool:
    """Whether all results of the splits on a path are on a path."""
    ops = {op for path in paths for op in path.ops} | {attention}
    splits = [op for op in ops if isinstance(op, Split)]
    return all(user in ops for op in splits for part in op.results for user in part.users)


def _select(op: Attention, scores: Value, dim: int, slots: Heads) -> None:
    """Give copied heads the mask, bias or sinks of their originals; heads of zeros get any."""
    parts: list[Value] = []
    for first, count in _runs(slots):
        begin, end = (0, 1) if first is None else (first, first + count)
        part = insert_before(Slice(scores, dim=dim, start=begin, stop=end), op).result
        if first is None and count > 1:
            part = insert_before(Repeat(part, dim=dim, count=count), op).result
        parts.append(part)
    new = insert_before(Concat(parts, dim=dim), op).result
    op.set_operands(tuple(new if value is scores else value for value in op.operands))


def _zero_of(parameter: Value, weight: Weight) -> Value | None:
    """The zero of codes, which is the code that stands for 0; None for all other weights."""
    op = parameter.producer
    return op.zero if isinstance(op, Dequantize) and op.x is weight else None


def _rearrange(
    weight: Weight, dim: int, heads: int, slots: Heads, zero: Value | None = None
) -> None:
    """Make a weight the concatenation of its heads in a new order, with zeros for None.

    Codes get the `zero` that all heads share there; a zero of each head is rearranged with them.
    """
    type = weight.type
    shape = tuple(n for n in type.shape if isinstance(n, int))
    if len(shape) != type.ndim:
        raise Error(f"@{weight.name} is {type}; the sizes of a weight are numbers")
    size = shape[dim] // heads
    base = with_shape(weight.ref, shape, type.dtype)
    parts: list[Ref] = []
    for first, count in _runs(slots):
        if first is None:
            zeros = (*shape[:dim], count * size, *shape[dim + 1 :])
            if isinstance(zero, Weight) and zero.type.shape[dim] == 1:
                source = with_shape(zero.ref, zero.type.shape, zero.type.dtype)
                counts = tuple(-(-n // m) for n, m in zip(zeros, zero.type.shape, strict=True))
                parts.append(RepeatedRef(source, counts, zeros))
            else:
                parts.append(ZerosRef(shape=zeros, dtype=type.dtype))
        else:
            cut = (first * size, (first + count) * size)
            ranges = tuple(cut if i == dim else None for i in range(type.ndim))
            parts.append(base.then(SliceStep(ranges)))
    weight.ref = parts[0] if len(parts) == 1 else ConcatRef(tuple(parts), dim)
    weight.type = TensorType(type.dtype, (*shape[:dim], len(slots) * size, *shape[dim + 1 :]))


def _runs(slots: Heads) -> Iterator[tuple[int | None, int]]:
    """(first old head or None, how many in a row) of the new order."""
    first, count = slots[0], 0
    for head in slots:
        if head == (None if first is None else first + count):
            count += 1
            continue
        yield first, count
        first, count = head, 1
    yield first, count
