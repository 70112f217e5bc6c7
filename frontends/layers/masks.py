"""Masks of attention beyond `causal`, `window` and `lengths`: bool, true where a key is visible.

`queries` are positions i32 [B|1, S] (`positions.query_positions`), `keys` the number of keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import Error
from ...ir.dims import DimLike
from ...source import here
from .. import functional as F
from ..tensor import Tensor


def _places(queries: Tensor, keys: DimLike) -> tuple[Tensor, Tensor]:
    """The positions of queries [B|1, 1, S, 1] and keys [1, 1, 1, keys]."""
    batch, tokens = queries.shape
    return queries.reshape(batch, 1, tokens, 1), F.iota(keys).reshape(1, 1, 1, keys)


def prefix_mask(queries: Tensor, keys: DimLike, prefix: Tensor) -> Tensor:
    """The first `prefix` (i32 [B|1]) keys, and by causality those behind: [B|1, 1, S, keys]."""
    query, key = _places(queries, keys)
    return F.le(key, query) | F.lt(key, prefix.reshape(-1, 1, 1, 1))


def window_mask(queries: Tensor, keys: DimLike, window: Tensor) -> Tensor:
    """The `window` (i32 [1]) keys up to the query, itself included: [B|1, 1, S, keys]."""
    query, key = _places(queries, keys)
    return F.le(key, query) & F.gt(key, query - window.reshape(1, 1, 1, 1))


def local_mask(queries: Tensor, keys: DimLike, reach: int) -> Tensor:
    """The keys at most `reach` positions before or behind the query: [B|1, 1, S, keys]."""
    query, key = _places(queries, keys)
    return F.le(F.abs(key - query), reach)


def chunk_mask(queries: Tensor, keys: DimLike, chunk: int) -> Tensor:
    """The keys of the same `chunk` positions as the query: [B|1, 1, S, keys]; also later ones."""
    query, key = _places(queries, keys)
    return F.eq(query // chunk, key // chunk)


def key_mask(mask: Tensor, keys: DimLike) -> Tensor:
    """A mask [B, T], [B, S, T] or [B, H, S, T] as bool of four dimensions, true where not 0.

    Keys behind the last one of the mask, as a cache has them, are hidden.
    """
    if mask.ndim not in (2, 3, 4):
        raise Error(
            "expected an attention_mask [batch, keys], [batch, queries, keys] or "
            f"[batch, heads, queries, keys], found {mask.type}",
            loc=here(),
        )
    seen = mask if mask.dtype == "bool" else F.ne(mask, 0)
    if mask.ndim < 4:
        seen = seen.unsqueeze(*((1, 2) if mask.ndim == 2 else (1,)))
    missing = keys - seen.shape[3]
    if missing == 0:
        return seen
    return F.ne(F.pad(F.cast(seen, "i32"), (0, 0, 0, 0), (0, 0, 0, missing)), 0)


@dataclass(frozen=True)
class BlockSparse:
    """Causal attention to some blocks of `block` keys (Abdin et al., 2024: Phi-3-small).

    A query sees its own and the `local` - 1 blocks before, and every block b with
    (b + 1 + step * head) % `stride` == 0; step is max(1, stride // heads), or 0 where `alike`.
    """

    block: int = 64
    local: int = 16
    stride: int = 8
    alike: bool = False

    def __post_init__(self) -> None:
        if min(self.block, self.local, self.stride) < 1:
            raise Error(f"block-sparse attention: expected sizes of at least 1, found {self}")

    def mask(
        self, queries: Tensor, keys: DimLike, heads: int, first: int = 0, count: int = 0
    ) -> Tensor:
        """[B|1, count, S, keys], of `count` (0: all) of `heads` heads beginning with `first`."""
        query, key = _places(queries, keys)
        query_block, key_block = query // self.block, key // self.block
        step = 0 if self.alike else max(1, self.stride // heads)
        head = (F.iota(1 if self.alike else count or heads) + first).reshape(1, -1, 1, 1)
        strided = F.eq((key_block + head * step + 1) % self.stride, 0)
        return F.le(key, query) & (F.lt(query_block - key_block, self.local) | strided)
