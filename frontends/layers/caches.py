"""KV caches of one tensor [B, 2, kv_heads, length, head_size], in floats or in codes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...errors import Error
from ...ir.dtypes import is_float
from ...source import here
from .. import functional as F
from ..tensor import Tensor


@dataclass(frozen=True)
class Heads:
    """The heads of one rank, the features of each, and which rank of how many it is."""

    query_heads: int
    kv_heads: int
    head_size: int
    tp_rank: int = 0
    tp_size: int = 1

    @staticmethod
    def of_rank(heads: int, kv_heads: int, head_size: int, rank: int, ranks: int) -> Heads:
        """The heads of one rank of `ranks`; fewer key-value heads than ranks are on several."""
        if heads < 1 or heads % ranks:
            raise Error(f"{heads} heads are not a multiple of {ranks} ranks", loc=here())
        if kv_heads < 1 or heads % kv_heads or (kv_heads % ranks and ranks % kv_heads):
            raise Error(
                f"expected key-value heads that divide {heads} heads, and a multiple or a divisor "
                f"of {ranks} ranks, so that every rank has whole groups; found {kv_heads}",
                loc=here(),
            )
        return Heads(heads // ranks, max(kv_heads // ranks, 1), head_size, rank, ranks)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The features of queries, keys and values."""
        keys = self.kv_heads * self.head_size
        return self.query_heads * self.head_size, keys, keys

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, S, (query_heads + 2 kv_heads) * head_size] as queries, keys and values."""
        if qkv.ndim != 3 or qkv.shape[2] != sum(self.sizes):
            raise Error(
                f"expected queries, keys and values [batch, tokens, {sum(self.sizes)}] of "
                f"{self.query_heads} + 2*{self.kv_heads} heads of {self.head_size}, found "
                f"{qkv.type}",
                loc=here(),
            )
        q, k, v = qkv.split(self.sizes, 2)
        return q, k, v

    def split_by_head(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As `split`, of features in which query, key and value of a head follow each other."""
        if self.query_heads != self.kv_heads:
            return self.split(qkv)
        heads = qkv.reshape(*qkv.shape[:2], self.query_heads, 3, self.head_size)
        q, k, v = (heads[:, :, :, i].reshape(*qkv.shape[:2], -1) for i in range(3))
        return q, k, v

    def by_head(self, x: Tensor) -> Tensor:
        """Keys or values [B, S, kv_heads*head_size] as [B, kv_heads, S, head_size]."""
        return x.reshape(*x.shape[:2], self.kv_heads, self.head_size).permute(0, 2, 1, 3)


@dataclass(frozen=True)
class CacheQuantization:
    """How a cache holds keys and values: codes of `dtype`, or floats where `scale` is None."""

    scale: Tensor | None = None
    dtype: str = ""

    def check(self, heads: Heads, cache: Tensor) -> None:
        """An Error unless a cache has the heads of the layer, and the dtype of its codes."""
        dtype = self.dtype if self.scale is not None else ""
        shape = cache.shape if cache.ndim == 5 else (0,) * 5
        fits = (*shape[1:3], shape[4]) == (2, heads.kv_heads, heads.head_size)
        if fits and (cache.dtype == dtype or (not dtype and is_float(cache.dtype))):
            return
        raise Error(
            f"expected a KV cache {dtype or 'of floats'} [batch, 2, {heads.kv_heads}, length, "
            f"{heads.head_size}] as of the layer's heads and quant_mode, found {cache.type}",
            loc=here(),
        )

    def encode(self, x: Tensor) -> Tensor:
        """Values as the cache holds them."""
        if self.scale is None:
            return x
        codes: Any = self.dtype
        return F.quantize(x, self._scale_of(x, x.dtype), dtype=codes)

    def decode(self, x: Tensor, dtype: str) -> Tensor:
        """What the cache holds as values of `dtype`."""
        if self.scale is None:
            return x.cast(dtype)
        return F.dequantize(x, self._scale_of(x, dtype))

    def _scale_of(self, x: Tensor, dtype: str) -> Tensor:
        assert self.scale is not None
        return self.scale.reshape((1,) * x.ndim).cast(dtype)


def grow(
    heads: Heads, past: Tensor | None, k: Tensor, v: Tensor, codes: CacheQuantization
) -> tuple[Tensor, Tensor, Tensor]:
    """(cache, keys, values) with the new tokens behind `past` [B, 2, kv_heads, P, head_size].

    The cache is [B, 2, kv_heads, P + S, head_size], keys and values without the second dimension.
    """
    cache = F.stack([codes.encode(heads.by_head(half)) for half in (k, v)], dim=1)
    if past is not None:
        codes.check(heads, past)
        cache = F.concat([past, cache.cast(past.dtype)], 3)
    keys, values = (codes.decode(half.squeeze(1), k.dtype) for half in cache.split((1, 1), 1))
    return cache, keys, values


def write(
    heads: Heads, past: Tensor, lengths: Tensor, k: Tensor, v: Tensor, codes: CacheQuantization
) -> tuple[Tensor, Tensor, Tensor]:
    """(cache, keys, values) with the new tokens written at `lengths` i32 [B].

    `past` and the cache are [B, 2, kv_heads, capacity, head_size].
    """
    codes.check(heads, past)
    batch, _, kv_heads, capacity, size = past.shape
    both = F.concat([codes.encode(half) for half in (k, v)], 2)
    flat = past.reshape(batch, 2 * heads.kv_heads, capacity, size)
    cache = F.cache_update(flat, both.cast(past.dtype), lengths)
    halves = cache.split((heads.kv_heads, heads.kv_heads), 1)
    keys, values = (codes.decode(half, k.dtype) for half in halves)
    return cache.reshape(batch, 2, kv_heads, capacity, size), keys, values
