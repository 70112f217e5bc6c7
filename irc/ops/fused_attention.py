"""Attention over caches with the operations in front of it, as one operation."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..errors import Error
from ..ir.core import Op, Value
from ..ir.declare import Operand, OptionalOperand, operation, operation_base, optional
from ..ir.dims import DimLike, Shape, exact_divide
from ..ir.types import TensorType
from .attention import Attention, CacheUpdate, GatherPages, pages_words, score_scale, scores_words
from .norm import RmsNorm
from .rope import BY_LENGTH, Kind, Rope
from .shape import Reshape
from .shapes import rule_text


@operation_base
class NewTokens(Op):
    """Base of operations on the new tokens of a call and the caches that get their rows."""

    __slots__ = ()

    q: Operand
    k: Operand
    v: Operand
    k_cache: Operand
    v_cache: Operand
    past: Operand
    head_dim: int
    positions: OptionalOperand = optional()
    q_norm: OptionalOperand = optional()
    k_norm: OptionalOperand = optional()
    pages: OptionalOperand = optional()
    eps: float = 1e-6
    offset: float = 0.0
    theta: float = 10000.0
    kind: Kind = "default"
    rotary_dim: int = 0
    interleaved: bool = False
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    attention_factor: float | None = None

    @property
    def key_heads(self) -> DimLike:
        """The number of key-value heads."""
        return self.k_cache.type.shape[1]

    def rule_words(self) -> tuple[list[list[str]], list[list[str]]]:
        """The words of a sharding rule for the operands up to `pages`, and for the results.

        Heads may be sharded, and rows where they share no pages; a single key-value head stays
        replicated.
        """
        h = "g!" if self.key_heads == 1 else "h"
        q, new = ["b", "s!", "h"], ["b", "s!", h]
        p = "b" if self.pages is None else "p!"
        caches = [[p, h, "c!", "d!"], [p, h, "c!", "e!"]]
        others = ["b"], ["b", "s!"], ["d!"], ["d!"], pages_words(self.pages)
        return [q, new, new, *caches, *others], [q, *caches]

    def attributes_of(self, cls: type[Op]) -> dict[str, Any]:
        """The attributes that an operation of another class has as well."""
        attributes = self.attributes
        return {name: attributes[name] for name in cls.attribute_types if name in attributes}


@operation("rope_and_cache", in_place="k_cache v_cache", safe_values={"past": 0})
class RopeAndCache(NewTokens):
    """Rms_norm and rope of the heads of new tokens, and their rows of the caches.

    q [B, S, H*D], k [B, S, Hk*D] and v [B, S, Hk*Dv] are the tokens. The heads of q and k are
    normed by `q_norm` and `k_norm` [D] (both or none), then rotated by `positions` [B, S] (if
    given); k and v go into k_cache [B, Hk, C, D] and v_cache [B, Hk, C, Dv] at `past` [B], or into
    pools with `pages`, as by cache_update. Results: (q, the new k_cache, the new v_cache).
    Attributes as of rms_norm and rope, whose kind is one of those without a length.
    """

    def sharding_rule(self) -> str:
        return rule_text(*self.rule_words())

    def expand(self) -> tuple[Value, ...]:
        if (self.q_norm is None) != (self.k_norm is None):
            raise Error("takes q_norm and k_norm, or neither; give both")
        if self.kind in BY_LENGTH:
            raise Error(
                f"the angles of kind={self.kind!r} depend on the length of the call; put rope "
                "operations in front"
            )
        q, k = self._normed(self.q, self.q_norm), self._normed(self.k, self.k_norm)
        if self.positions is not None:
            rope = self.attributes_of(Rope)
            q, k = (Rope(x, self.positions, **rope).result for x in (q, k))
        keys = CacheUpdate(self.k_cache, k, self.past, pages=self.pages)
        values = CacheUpdate(self.v_cache, self.v, self.past, pages=self.pages)
        return q, keys.result, values.result

    def _normed(self, x: Value, weight: Value | None) -> Value:
        """x [B, S, features] with its heads normed, if there is a weight."""
        if weight is None:
            return x
        apart = Reshape(x, shape=self._by_head(x.type)).result
        whole = x.type.of
        if whole is not None:  # one head of a rank is a shard of all heads, not of features
            axes = *whole.axes, ()
            heads = TensorType(
                whole.dtype, self._by_head(whole), axes, whole.partial, whole.varying
            )
            apart.type = apart.type.part_of(heads)
        normed = RmsNorm(apart, weight, **self.attributes_of(RmsNorm))
        return Reshape(normed, shape=x.type.shape).result

    def _by_head(self, type: TensorType) -> Shape:
        """The shape of a type [B, S, features] as [B, S, H, D]."""
        batch, tokens, features = type.shape
        heads = exact_divide(features, self.head_dim) if self.head_dim > 0 else None
        if heads is None:
            raise Error(f"{type} has no heads of {self.head_dim} features")
        return batch, tokens, heads, self.head_dim


@operation("fused_attention", in_place="k_cache v_cache", safe_values={"past": 0})
class FusedAttention(NewTokens):
    """Attention of new tokens over caches that get their keys and values.

    The operands up to `pages` are those of rope_and_cache, the others those of attention, whose q,
    k and v are the results of the former. Results: (out [B, S, H*Dv], the new k_cache, the new
    v_cache). Attributes as of both.
    """

    bias: OptionalOperand = optional()
    mask: OptionalOperand = optional()
    lengths: OptionalOperand = optional()
    sinks: OptionalOperand = optional()
    causal: bool = False
    window: int = 0
    scale: float | None = None
    softcap: float = 0.0
    group: int = 0

    @property
    def score_scale(self) -> float:
        """What the products of q and k are multiplied by."""
        return score_scale(self.head_dim, self.scale)

    def sharding_rule(self) -> str:
        operands, results = self.rule_words()
        scores = ("b", "h", "s!", "c!")
        operands += [scores_words(self.bias, scores), scores_words(self.mask, scores)]
        return rule_text([*operands, ["b"], ["h"]], results)

    def localized(self, results: tuple[TensorType, ...]) -> dict[str, Any]:
        """A rank's query heads share its key-value heads as they do globally."""
        if results[0].shape[2] == self.results[0].type.shape[2]:
            return self.attributes
        heads = exact_divide(self.q.type.shape[2], self.head_dim)
        assert heads is not None
        group = 0 if self.key_heads == 1 else exact_divide(heads, self.key_heads)
        return self.attributes | {"group": group}

    def expand(self) -> tuple[Value, ...]:
        tokens = {value.type.shape[:2] for value in (self.q, self.k, self.v)}
        if len(tokens) > 1:
            raise Error(
                f"fused_attention: q is {self.q.type}, k {self.k.type} and v {self.v.type}, but "
                "they must be the same tokens [batch, tokens, features]"
            )
        names = (*RopeAndCache.operand_names, *RopeAndCache.optional_names)
        operands: dict[str, Any] = {name: getattr(self, name) for name in names}
        front = RopeAndCache(**operands, **self.attributes_of(RopeAndCache))
        operands = {name: getattr(self, name) for name in Attention.optional_names}
        q, *caches = front.results
        if self.pages is not None:
            caches = [GatherPages(pool, self.pages).result for pool in caches]
        k, v = caches
        attended = Attention(q, k, v, **operands, **self.attributes_of(Attention))
        return attended.result, *front.results[1:]


class CacheWrite(NamedTuple):
    """New tokens [B, S, features] that an operation writes into a cache at `past` [B]."""

    cache: Value
    new: Value
    past: Value
    pages: Value | None

    @property
    def capacity(self) -> DimLike:
        """How many tokens a row has room for."""
        size = self.cache.type.shape[2]
        return size if self.pages is None else self.pages.type.shape[1] * size


def cache_writes(op: Op) -> tuple[CacheWrite, ...]:
    """The writes of an operation into key-value caches, in the order of its results."""
    if isinstance(op, CacheUpdate):
        return (CacheWrite(op.cache, op.new, op.past, op.pages),)
    if isinstance(op, NewTokens):
        caches = (op.k_cache, op.k), (op.v_cache, op.v)
        return tuple(CacheWrite(cache, new, op.past, op.pages) for cache, new in caches)
    return ()
