"""Attention of one rank: its heads, the rules of its scores, and the KV caches that it reads.

Everything here is in terms of irc's tensors; it becomes `attention` and `cache_update`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ....errors import Error
from ....ir.dtypes import is_float
from ....source import here
from ... import functional as F
from ...layers import BlockSparse, RelativePositions
from ...layers.positions import size_tensor
from ...layers.scores import attend
from ...tensor import Tensor as Inner
from ..context import current_network
from ..enums import AttentionMaskType
from ..tensor import Tensor, unwrap, wrap
from .masks import visible
from .packed import PackedRows


@dataclass(frozen=True)
class Heads:
    """The heads of one rank: query heads, key-value heads, features each, and which rank of how
    many it is."""

    query: int
    kv: int
    width: int
    rank: int = 0
    ranks: int = 1

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The features of queries, keys and values."""
        return self.query * self.width, self.kv * self.width, self.kv * self.width

    def split(self, qkv: Inner) -> tuple[Inner, Inner, Inner]:
        """[B, S, (query + 2 kv) * width] as queries, keys and values."""
        if qkv.ndim != 3 or qkv.shape[2] != sum(self.sizes):
            raise Error(
                f"expected queries, keys and values [batch, tokens, {sum(self.sizes)}] of "
                f"{self.query} + 2*{self.kv} heads of {self.width}, found {qkv.type}; sequences "
                "without padding are [batch, tokens, features] in irc",
                loc=here(),
            )
        q, k, v = qkv.split(self.sizes, 2)
        return q, k, v

    def by_head(self, x: Inner) -> Inner:
        """Keys or values [B, S, kv*width] as [B, kv, S, width]."""
        return x.reshape(*x.shape[:2], self.kv, self.width).permute(0, 2, 1, 3)


@dataclass(frozen=True)
class Rules:
    """How scores are made, and what a query sees; `window` is a number or i32 [1]."""

    mask_type: AttentionMaskType = AttentionMaskType.causal
    scale: float | None = None
    softcap: float = 0.0
    window: int | Inner = 0
    block_sparse: BlockSparse | None = None
    slopes: Inner | None = None
    relative: RelativePositions | None = None
    table: Inner | None = None

    def attend(
        self,
        heads: Heads,
        q: Inner,
        k: Inner,
        v: Inner,
        *,
        past: Inner | None = None,
        lengths: Inner | None = None,
        mask: Inner | None = None,
        bias: Inner | None = None,
        prompt: Inner | None = None,
    ) -> Inner:
        """Attention of q over tokens or caches k and v: [B, S, query heads * width]."""
        keys = k.shape[2 if k.ndim == 4 else 1]
        options = visible(
            self.mask_type,
            keys,
            mask=mask,
            prompt=prompt,
            window=self.window,
            block_sparse=self.block_sparse,
        )
        return attend(
            q,
            k,
            v,
            heads.width,
            past=past,
            lengths=lengths if self.mask_type is AttentionMaskType.padding else None,
            scale=self.scale,
            softcap=self.softcap,
            bias=None if bias is None else bias.cast("f32"),
            slopes=self.slopes,
            relative=self.relative,
            table=self.table,
            heads=heads.query * heads.ranks,
            first=heads.query * heads.rank,
            **options,
        )


@dataclass(frozen=True)
class CacheCodes:
    """How a cache holds keys and values: codes of `dtype`, or themselves where `scale` is None."""

    scale: Inner | None = None
    dtype: str = ""

    def check(self, heads: Heads, cache: Inner) -> None:
        """An Error unless a cache has the heads of the layer, and the dtype of its codes."""
        dtype = self.dtype if self.scale is not None else ""
        shape = cache.shape if cache.ndim == 5 else (0,) * 5
        fits = (*shape[1:3], shape[4]) == (2, heads.kv, heads.width)
        if fits and (cache.dtype == dtype or (not dtype and is_float(cache.dtype))):
            return
        raise Error(
            f"expected a KV cache {dtype or 'of floats'} [batch, 2, {heads.kv}, length, "
            f"{heads.width}] as of the layer's heads and quant_mode, found {cache.type}",
            loc=here(),
        )

    def encode(self, x: Inner) -> Inner:
        """Values as the cache holds them."""
        if self.scale is None:
            return x
        codes: Any = self.dtype
        return F.quantize(x, self._scale_of(x, x.dtype), dtype=codes)

    def decode(self, x: Inner, dtype: str) -> Inner:
        """What the cache holds as values of `dtype`."""
        if self.scale is None:
            return x.cast(dtype)
        return F.dequantize(x, self._scale_of(x, dtype))

    def _scale_of(self, x: Inner, dtype: str) -> Inner:
        assert self.scale is not None
        return self.scale.reshape((1,) * x.ndim).cast(dtype)


def grow(
    heads: Heads, past: Inner | None, k: Inner, v: Inner, codes: CacheCodes
) -> tuple[Inner, Inner, Inner]:
    """(cache, keys, values) with the new tokens behind `past` [B, 2, kv, P, width].

    The cache is [B, 2, kv, P + S, width], keys and values are [B, kv, P + S, width].
    """
    cache = F.stack([codes.encode(heads.by_head(each)) for each in (k, v)], dim=1)
    if past is not None:
        codes.check(heads, past)
        cache = F.concat([past, cache.cast(past.dtype)], 3)
    keys, values = (codes.decode(each.squeeze(1), k.dtype) for each in cache.split((1, 1), 1))
    return cache, keys, values


def write(
    heads: Heads, past: Inner, lengths: Inner, k: Inner, v: Inner, codes: CacheCodes
) -> tuple[Inner, Inner, Inner]:
    """(cache, keys, values) with the new tokens written at `lengths` i32 [B].

    `past` and the cache are [B, 2, kv, C, width], keys and values [B, kv, C, width].
    """
    codes.check(heads, past)
    batch, _, kv, capacity, width = past.shape
    both = F.concat([codes.encode(each) for each in (k, v)], 2)
    flat = past.reshape(batch, 2 * heads.kv, capacity, width)
    cache = F.cache_update(flat, both.cast(past.dtype), lengths)
    keys, values = (codes.decode(each, k.dtype) for each in cache.split((heads.kv, heads.kv), 1))
    return cache.reshape(batch, 2, kv, capacity, width), keys, values


def filled_keys(past: Tensor | None, lengths: Tensor | None) -> Inner | None:
    """How many keys of a cache of a capacity are filled: i32 [B], None without a cache."""
    if past is None:
        return None
    if lengths is None:
        raise Error("a KV cache needs host_past_key_value_lengths i32 [batch]", loc=here())
    return unwrap(lengths)


def cached(
    heads: Heads,
    rules: Rules,
    qkv: tuple[Inner, Inner, Inner],
    past: Tensor | None,
    lengths: Inner | None,
    *,
    codes: CacheCodes | None = None,
    mask: Inner | None = None,
    prompt: Inner | None = None,
    use_cache: bool = True,
    packed: PackedRows | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(context, cache) over a cache of a capacity, of which the first `lengths` keys are filled.

    `prompt` i32 [B] is the number of tokens of the prompts. Without a cache, over the tokens of
    the call; then the returned cache holds them.
    """
    q, k, v = qkv
    codes = codes or CacheCodes()
    if past is None or lengths is None:
        found = rules.attend(heads, q, k, v, lengths=prompt, mask=mask, prompt=prompt)
        return wrap(found), wrap(grow(heads, None, k, v, codes)[0]) if use_cache else None
    inner = unwrap(past)
    held = inner if packed is None else packed.with_room(inner)
    cache, keys, values = write(heads, held, lengths, k, v, codes)
    if packed is not None:
        cache = F.slice(cache, 3, 0, inner.shape[3])
    filled = None
    if rules.mask_type is AttentionMaskType.padding and prompt is None:
        filled = lengths + size_tensor(q.shape[1])
    elif rules.mask_type is AttentionMaskType.padding and prompt is not None:
        filled = F.maximum(prompt, lengths + 1)  # the padding behind the prompts is no key
    found = rules.attend(
        heads, q, keys, values, past=lengths, lengths=filled, mask=mask, prompt=prompt
    )
    present = wrap(cache)
    if current_network().is_input(past):
        present.reuses = past.name
    return wrap(found), present


def cross(
    heads: Heads,
    rules: Rules,
    qkv: tuple[Inner, Inner, Inner],
    lengths: Inner | None,
    mask: Inner | None,
    codes: CacheCodes,
) -> tuple[Tensor, Tensor]:
    """(context, cache) of queries over the keys and values of another sequence.

    `lengths` i32 [B] are the lengths of that sequence; the cache [B, 2, kv, T, width] holds it.
    """
    q, k, v = qkv
    rules = replace(rules, mask_type=AttentionMaskType.padding)
    cache, keys, values = grow(heads, None, k, v, codes)
    return wrap(rules.attend(heads, q, keys, values, lengths=lengths, mask=mask)), wrap(cache)
