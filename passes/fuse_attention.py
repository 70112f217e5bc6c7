"""`fuse-attention`: attention and the operations in front of it become one operation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from irc.ir.core import Module, Op, Value
from irc.ops import Attention, CacheUpdate, FusedAttention, GatherPages, Reshape, RmsNorm, Rope
from irc.pipeline import Pass, Stats, register
from irc.rewrite import erase_dead, permit, report_failure

from .shared.edit import insert_before, only_user, used_once

_NAME = "fuse-attention"


@register(_NAME)
class FuseAttention(Pass):
    """Attention over the caches of this call's tokens, with the updates of both caches, becomes one
    fused_attention; rope and rms_norm of the heads of q and k are part of it where they are alike.

    It runs behind `shard` and `localize`. Attention that only reads caches stays.
    """

    def run(self, module: Module, stats: Stats) -> None:
        for function in module.functions.values():
            for op in list(function):
                if not isinstance(op, Attention) or not op.cached:
                    continue
                pattern = _pattern(op)
                if isinstance(pattern, str):
                    report_failure(_NAME, op, pattern)
                elif permit(_NAME, op):
                    _fuse(pattern)
                    stats.count("fused_attention")


@dataclass(frozen=True)
class _Pattern:
    """An attention, the updates of its caches, and what is in front of q and the new keys."""

    attention: Attention
    updates: tuple[CacheUpdate, CacheUpdate]
    q: Value
    k: Value
    rope: Rope | None
    norms: tuple[RmsNorm, RmsNorm] | None


def _pattern(op: Attention) -> _Pattern | str:
    """What becomes one operation, or why nothing does."""
    keys, values = (_pool_of(cache).producer for cache in (op.k, op.v))
    if not isinstance(keys, CacheUpdate) or not isinstance(values, CacheUpdate):
        return "it reads caches that no cache_update in front of it writes"
    refusal = _refusal(op, keys, values)
    if refusal is not None:
        return refusal
    q, k = op.q, keys.new
    rope = _rope_of(q, k, op.head_dim)
    if rope is not None:
        q, k = (value.producer.operands[0] for value in (q, k) if value.producer is not None)
    norms = _norm_of(q, op.head_dim), _norm_of(k, op.head_dim)
    if norms[0] is None or norms[1] is None or norms[0].attributes != norms[1].attributes:
        return _Pattern(op, (keys, values), q, k, rope, None)
    q, k = (norm.x.producer.operands[0] for norm in norms if norm and norm.x.producer is not None)
    return _Pattern(op, (keys, values), q, k, rope, (norms[0], norms[1]))


def _pool_of(cache: Value) -> Value:
    """The pool whose pages are a cache, or the cache."""
    return cache.producer.pool if isinstance(cache.producer, GatherPages) else cache


def _refusal(op: Attention, keys: CacheUpdate, values: CacheUpdate) -> str | None:
    """Why an attention and the updates of its caches stay apart."""
    if keys is values or keys.cache is values.cache:
        return "its keys and values are one cache"
    if op.past is None or not keys.past is values.past is op.past:
        return "the caches are not updated with the tokens of this call: `past` differs"
    gathers = [each for each in (op.k.producer, op.v.producer) if isinstance(each, GatherPages)]
    pages = {keys.pages, values.pages, *(gather.pages for gather in gathers)}
    if len(pages) > 1 or len(gathers) != (0 if keys.pages is None else 2):
        return "it does not read the pages that the updates write"
    if not all(used_once(gather.result) for gather in gathers):
        return "the pages are gathered for other operations, too"
    tokens = {value.type.shape[:2] for value in (op.q, keys.new, values.new)}
    if len(tokens) > 1:
        return "the caches get other tokens than q has"
    if not used_once(keys.cache) or not used_once(values.cache):
        return "a cache is read before its update, too"
    users = {user for update in (keys, values) for user in update.result.users}
    if not all(_follows(user, op) for user in users.difference(gathers)):
        return "an updated cache is used in front of the attention"
    return None


def _follows(user: Op, op: Op) -> bool:
    """Whether `user` is `op` or comes behind it."""
    later: Op | None = op
    while later is not None and later is not user:
        later = later.next
    return later is user


def _rope_of(q: Value, k: Value, head_dim: int) -> Rope | None:
    """The rope of q, where k has the same, each for one use, and angles depend on positions."""
    first, second = q.producer, k.producer
    if not isinstance(first, Rope) or not isinstance(second, Rope):
        return None
    alike = first.attributes == second.attributes and first.positions is second.positions
    takes = alike and not first.by_length and first.head_dim == head_dim
    return first if takes and used_once(q) and used_once(k) else None


def _norm_of(value: Value, head_dim: int) -> RmsNorm | None:
    """The rms_norm of heads [B, S, H, D], between reshapes, that a value [B, S, H*D] comes from."""
    joined = value.producer
    norm = joined.x.producer if isinstance(joined, Reshape) else None
    if not isinstance(norm, RmsNorm) or norm.x.type.shape[-1] != head_dim:
        return None
    apart = norm.x.producer
    is_whole = isinstance(apart, Reshape) and apart.x.type.shape == value.type.shape
    uses = [only_user(used) for used in (value, norm.result, norm.x)]
    return norm if is_whole and None not in uses else None


def _fuse(pattern: _Pattern) -> None:
    op, (keys, values) = pattern.attention, pattern.updates
    options: dict[str, Any] = dict(list(op.named_operands())[3:])
    options |= op.attributes
    if pattern.rope is not None:
        options |= {"positions": pattern.rope.positions}
        names = FusedAttention.attribute_types
        options |= {k: v for k, v in pattern.rope.attributes.items() if k in names}
    if pattern.norms is not None:
        q_norm, k_norm = pattern.norms
        options |= {"q_norm": q_norm.weight, "k_norm": k_norm.weight} | q_norm.attributes
    caches = keys.cache, values.cache
    options |= {"pages": keys.pages}
    new = FusedAttention(pattern.q, pattern.k, values.new, *caches, **options)
    insert_before(new, op)
    for old, result in zip((op, keys, values), new.results, strict=True):
        old.result.replace_by(result)
    for old in (op, values, keys):
        erase_dead(old)
