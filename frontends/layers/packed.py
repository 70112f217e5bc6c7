"""Packed tokens: those of all rows follow each other without padding (remove_input_padding).

Attention over them is that over padded rows: `pad` gives row b its tokens [B, T], behind which are
those of other rows, as padding; `unpad` takes the results back. No row sees tokens of another one.
The number of tokens of a row is data, so that every row has room for all T: attention of a call
with several prompts computes B times what its prompts need, and padded inputs are faster.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import Error
from ...ir.dims import product
from ...source import here
from .. import functional as F
from ..tensor import Tensor
from .positions import size_tensor


@dataclass(frozen=True)
class PackedRows:
    """Which row each of T packed tokens belongs to, and its place there: i32 [T] each.

    `first` i32 [B] is where each row begins; `is_flat` says that tokens are [T, features], without
    a leading 1.
    """

    row: Tensor
    place: Tensor
    first: Tensor
    is_flat: bool

    def pad(self, x: Tensor) -> Tensor:
        """[B, T, features] of packed tokens."""
        tokens = x.shape[-2]
        places = self.first.unsqueeze(1) + F.iota(tokens).unsqueeze(0)
        flat = x if x.ndim == 2 else x.squeeze(0)
        return F.gather(flat, F.minimum(places, size_tensor(tokens) - 1))

    def unpad(self, x: Tensor) -> Tensor:
        """The packed tokens of x [B, T, features]."""
        batch, tokens, features = x.shape
        flat = x.reshape(product((batch, tokens)), features)
        packed = F.gather(flat, self.row * size_tensor(tokens) + self.place)
        return packed if self.is_flat else packed.unsqueeze(0)

    def with_room(self, cache: Tensor) -> Tensor:
        """A cache [B, 2, heads, C, width] with room for the padding of a call: C + T."""
        tokens = self.place.shape[0]
        *before, _, width = cache.shape
        room = F.expand(F.full(0, dtype=cache.dtype), (*before, tokens, width))
        return F.concat([cache, room], 3)


def packed_rows(
    x: Tensor, context_lengths: Tensor | None, request_types: Tensor | None, past: Tensor | None
) -> PackedRows | None:
    """The rows of tokens [T, features] or [1, T, features] of several context_lengths i32 [B]; None
    where tokens are padded, [B, S, features].

    A row has context_lengths[b] tokens where request_types[b] is 0, and one where it is 1; without
    request types one where its cache has `past` > 0 tokens.
    """
    if context_lengths is None and x.ndim == 2:
        raise Error(
            f"packed tokens {x.type} need context_lengths i32 [batch], the tokens of every row",
            loc=here(),
        )
    is_padded = x.ndim == 3 and x.shape[0] != 1
    if context_lengths is None or is_padded or (x.ndim == 3 and context_lengths.shape[0] == 1):
        return None
    later = past if request_types is None else request_types
    counts = context_lengths.cast("i32")
    if later is not None:
        counts = F.where(F.gt(later, 0), F.full(1, dtype="i32"), counts)
    ends, token = F.cumsum(counts), F.iota(x.shape[-2])
    first = ends - counts
    behind = F.ge(token.unsqueeze(1), ends.unsqueeze(0)).cast("i32")
    row = F.minimum(F.reduce_sum(behind, dims=(1,)), size_tensor(counts.shape[0]) - 1)
    return PackedRows(row, token - F.gather(first, row), first, x.ndim == 2)
