"""Attention over the same sequence, a KV cache, or another sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ...errors import Error
from ...source import here
from .. import functional as F
from ..module import Module, Parameter
from ..tensor import Tensor
from .basic import Linear, RmsNorm
from .masks import BlockSparse
from .positions import QueryGrowth, RelativePositions, alibi_slopes, logn_scale, query_positions
from .rope import Rope
from .scores import attend


class Cache(NamedTuple):
    """Keys and values of one layer, [B, kv_heads, capacity, head_dim] each."""

    keys: Tensor
    values: Tensor


class Attention(Module):
    """softmax(q·kᵀ) v, with `heads` query heads that share `kv_heads` key and value heads.

    `window` > 0 limits a token to that many keys, itself included; `softcap` > 0 bounds the scores;
    `scale` None is 1/sqrt(head_dim). With `memory_size` keys and values come from
    another sequence of that many features (cross attention), which is never causal. `qk_norm` is
    the eps of an RMS norm of every head's queries and keys, before rope, or a function that makes
    a norm of a size; None means no norm. With `norm_all_heads` one norm spans all heads, with
    `norm_rotated` they come behind the rope.
    `value_norm` is the eps of an RMS norm of every head's values, which has no weights. With
    `keys_are_values` values are the projected keys, before their norm.

    `clip` > 0 bounds queries, keys and values. `alibi` > 0 is the largest exponent of the slopes of
    ALiBi, usually 8. `relative` adds learned biases, the weight `relative_table` [heads, buckets].
    `logn` > 0 is the length from which queries grow with the logarithm of their position, `growth`
    another such rule.
    `block_sparse` limits a query to some blocks of keys, `chunk` > 0 to keys of the same so many
    positions. With `gate` the sigmoid of another
    projection multiplies what the heads give. `sinks`: every head has a trained score of one more
    key, which has no value.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm: float | Callable[[int], Module] | None = None,
        norm_all_heads: bool = False,
        norm_rotated: bool = False,
        rope: Rope | None = None,
        causal: bool = True,
        window: int = 0,
        softcap: float = 0.0,
        scale: float | None = None,
        memory_size: int | None = None,
        clip: float = 0.0,
        alibi: float = 0.0,
        relative: RelativePositions | None = None,
        logn: int = 0,
        growth: QueryGrowth | None = None,
        block_sparse: BlockSparse | None = None,
        chunk: int = 0,
        gate: bool = False,
        sinks: bool = False,
        value_norm: float | None = None,
        keys_are_values: bool = False,
        dtype: str = "f32",
    ) -> None:
        kv_heads = kv_heads or heads
        if head_dim is None:
            head_dim = _divided(hidden_size, heads)
        if heads % kv_heads:
            raise Error(f"{heads} heads cannot share {kv_heads} key and value heads", loc=here())
        source = memory_size or hidden_size
        self.q_proj = Linear(hidden_size, heads * head_dim, qkv_bias, dtype)
        self.k_proj = Linear(source, kv_heads * head_dim, qkv_bias, dtype)
        self.v_proj = Linear(source, kv_heads * head_dim, qkv_bias, dtype)
        self.gate_proj = Linear(hidden_size, heads * head_dim, qkv_bias, dtype) if gate else None
        self.o_proj = Linear(heads * head_dim, hidden_size, output_bias, dtype)
        counts = (heads, kv_heads) if norm_all_heads else (1, 1)
        self.q_norm, self.k_norm = (_norm(qk_norm, n * head_dim, dtype) for n in counts)
        self.norm_all_heads, self.keys_are_values = norm_all_heads, keys_are_values
        self.v_norm = None if value_norm is None else RmsNorm(head_dim, value_norm, affine=False)
        self.head_dim, self.rope, self.cross = head_dim, rope, memory_size is not None
        self.causal = causal and not self.cross
        self.window, self.softcap, self.scale = window, softcap, scale
        self.heads, self.clip, self.alibi = heads, clip, alibi
        self.logn, self.growth = logn, growth
        self.relative, self.block_sparse, self.chunk = relative, block_sparse, chunk
        self.norm_rotated = norm_rotated
        self.sinks = Parameter((heads,), dtype) if sinks else None
        self.relative_table = relative and Parameter((heads, relative.buckets), dtype)

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        *,
        cache: Cache | None = None,
        past: Tensor | None = None,
        memory: Tensor | Cache | None = None,
        lengths: Tensor | None = None,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        prefix: Tensor | None = None,
        is_ready: bool = False,
    ) -> Tensor | tuple[Tensor, Cache]:
        """x [B, S, hidden_size] to the same; with a cache, to (the same, the new cache).

        `positions` i32 [B, S] are required with rope. The keys and values of this call are written
        to `cache` after its `past` i32 [B] tokens; one that `is_ready` has them, from another
        layer. `lengths` i32 [B] are the numbers of keys without padding; `mask` (true = visible)
        and `bias` are [B|1, heads|1, S, T]. The first `prefix` i32 [B|1] keys are visible to every
        query. `memory` is the other sequence, or its keys and values, which `memory_cache`
        computes once for many calls.
        """
        self._check(positions, cache, past, memory, is_ready)
        q = self._projected(self.q_proj, x, None if self.norm_rotated else self.q_norm)
        source = cache if cache is not None and is_ready else x if memory is None else memory
        k, v = source if isinstance(source, Cache) else self._keys_and_values(source)
        if self.rope is not None and positions is not None:
            q = self.rope(q, positions, self.head_dim).named("q")
            k = k if is_ready else self.rope(k, positions, self.head_dim).named("k")
        if self.norm_rotated and self.q_norm is not None and self.k_norm is not None:
            q = self._normalized(self.q_norm, q)
            k = k if is_ready else self._normalized(self.k_norm, k)
        if self.growth is not None and positions is not None:
            q = q * self.growth.factor(positions).cast(q.dtype)
        if self.logn:
            queries = query_positions(x.shape[1], 0 if past is None else past)
            q = q * logn_scale(queries, self.logn).cast(q.dtype)
        if cache is not None and past is not None and not is_ready:
            k = F.cache_update(cache.keys, k, past).named("keys")
            v = F.cache_update(cache.values, v, past).named("values")
        mixed = attend(
            q,
            k,
            v,
            self.head_dim,
            past=past,
            lengths=lengths,
            mask=mask,
            bias=bias,
            causal=self.causal,
            window=self.window,
            scale=self.scale,
            softcap=self.softcap,
            slopes=alibi_slopes(self.heads, self.alibi) if self.alibi else None,
            relative=self.relative,
            table=self.relative_table,
            prefix=prefix,
            block_sparse=self.block_sparse,
            chunk=self.chunk,
            sinks=self.sinks,
        )
        mixed = mixed.named("mixed")
        if self.gate_proj is not None:
            mixed = mixed * F.sigmoid(self.gate_proj(x))
        out = self.o_proj(mixed)
        return out if cache is None else (out, Cache(k, v))

    def memory_cache(self, memory: Tensor) -> Cache:
        """Keys and values [B, kv_heads, T, head_dim] of another sequence [B, T, memory_size]."""
        tokens, shape = self._keys_and_values(memory), (*memory.shape[:2], -1, self.head_dim)
        return Cache(*(x.reshape(*shape).permute(0, 2, 1, 3) for x in tokens))

    def _keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        source = self.k_proj if self.keys_are_values else self.v_proj
        norm = None if self.norm_rotated else self.k_norm
        return self._projected(self.k_proj, x, norm), self._projected(source, x, self.v_norm)

    def _projected(self, projection: Module, x: Tensor, norm: Module | None) -> Tensor:
        """Queries, keys or values [B, S, heads*head_dim] of x, clipped and normalized."""
        projected = projection(x)
        if self.clip:
            projected = F.clip(projected, low=-self.clip, high=self.clip)
        return projected if norm is None else self._normalized(norm, projected)

    def _normalized(self, norm: Module, x: Tensor) -> Tensor:
        """x [B, S, heads*head_dim] to the same, each head normalized, or all together."""
        if self.norm_all_heads and norm is not self.v_norm:
            return norm(x)
        return norm(x.reshape(*x.shape[:-1], -1, self.head_dim)).reshape(*x.shape)

    def _check(
        self,
        positions: Tensor | None,
        cache: Cache | None,
        past: Tensor | None,
        memory: Tensor | Cache | None,
        is_ready: bool,
    ) -> None:
        if self.rope is not None and positions is None:
            raise Error("attention with rope requires positions", loc=here())
        if (cache is None) != (past is None) or (is_ready and cache is None):
            raise Error("cache and past must be given together", loc=here())
        if self.cross != (memory is not None):
            what = "requires memory" if self.cross else "takes memory only with memory_size"
            raise Error(f"this attention {what}", loc=here())
        if self.cross and (self.rope is not None or cache is not None):
            raise Error("cross attention has neither rope nor a cache", loc=here())


def _norm(make: float | Callable[[int], Module] | None, size: int, dtype: str) -> Module | None:
    if make is None:
        return None
    return make(size) if callable(make) else RmsNorm(size, make, dtype=dtype)


def _divided(hidden_size: int, heads: int) -> int:
    if heads < 1 or hidden_size % heads:
        raise Error(
            f"hidden_size {hidden_size} is not a multiple of {heads} heads; give head_dim",
            loc=here(),
        )
    return hidden_size // heads
