"""Positions in attention: ALiBi and relative biases, log-n scaling, rotation by given angles.

`queries` are the positions of the queries, i32 [B|1, S] (`query_positions`); `keys` is the number
of keys, which are at the positions 0, 1, ... Every bias is f32 [B|1, heads, S, keys].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...errors import Error
from ...ir.dims import DimLike
from .. import functional as F
from ..tensor import Tensor


def query_positions(tokens: DimLike, past: Tensor | DimLike = 0) -> Tensor:
    """The positions of `tokens` queries after `past` (i32 [B], or a size): i32 [B|1, S]."""
    if isinstance(past, Tensor):
        return F.iota(tokens).unsqueeze(0) + past.cast("i32").unsqueeze(1)
    return _counted(past, past + tokens).unsqueeze(0)


def size_tensor(size: DimLike) -> Tensor:
    """A size as i32 [1]."""
    return _counted(size, size + 1)


def _counted(start: DimLike, stop: DimLike) -> Tensor:
    """start, start + 1, ... up to stop - 1: i32 [stop - start]."""
    numbers = F.iota(stop)
    return numbers if start == 0 else F.slice(numbers, 0, start, stop)


def distances(queries: Tensor, keys: DimLike) -> Tensor:
    """Position of the key minus position of the query: i32 [B|1, S, keys]."""
    return F.iota(keys).reshape(1, 1, keys) - queries.unsqueeze(2)


def alibi_slopes(heads: int, largest: float = 8.0, first: int = 0, count: int = 0) -> Tensor:
    """The slopes of ALiBi (Press et al., 2022) of the heads `first`, `first` + 1, ...: f32 [count].

    Of n = 2^k heads, head i has 2^(-largest * (i+1) / n). With `heads` between two powers, the
    first n follow that rule, and the others have every second slope of 2n heads. `count` 0 is all.
    """
    index = F.cast(F.iota(count or heads) + first, "f32")
    power = 2 ** int(math.log2(heads))
    exponent = (index + 1.0) * (-largest / power)
    if power < heads:
        between = ((index - power) * 2.0 + 1.0) * (-largest / (2 * power))
        exponent = F.where(F.lt(index, float(power)), exponent, between)
    return F.pow(F.full(2.0), exponent)


def alibi_bias(slopes: Tensor, queries: Tensor, keys: DimLike) -> Tensor:
    """slope * (position of the key - position of the query)."""
    away = F.cast(distances(queries, keys), "f32").unsqueeze(1)
    return slopes.reshape(1, -1, 1, 1) * away


@dataclass(frozen=True)
class RelativePositions:
    """Learned biases by the distance between query and key, in buckets (T5: Raffel et al., 2020).

    Half of the `buckets` (of either direction where `bidirectional`) are single distances, the
    rest grow logarithmically up to `max_distance`.
    """

    buckets: int
    max_distance: int
    bidirectional: bool = False

    def __post_init__(self) -> None:
        single = self.buckets // (4 if self.bidirectional else 2)
        if single < 1 or self.max_distance <= single:
            raise Error(
                f"relative positions: {self.buckets} buckets up to the distance "
                f"{self.max_distance}; expected max_distance above {max(single, 1)}, the number "
                "of single distances"
            )

    def bucket(self, distance: Tensor) -> Tensor:
        """The buckets of the distances (key minus query), i32 of any shape."""
        buckets, offset = self.buckets, None
        if self.bidirectional:
            buckets //= 2
            offset = F.cast(F.gt(distance, 0), "i32") * buckets
            away = F.abs(distance)
        else:
            away = F.maximum(-distance, 0)
        single = buckets // 2
        # a little above 1, so that no runtime rounds an exact boundary into the bucket below
        ratio = F.cast(F.maximum(away, single), "f32") * ((1 + 1e-6) / single)
        growth = (buckets - single) / math.log(self.max_distance / single)
        far = F.minimum(F.cast(F.log(ratio) * growth, "i32") + single, buckets - 1)
        bucket = F.where(F.lt(away, single), away, far)
        return bucket if offset is None else bucket + offset

    def bias(self, table: Tensor, queries: Tensor, keys: DimLike) -> Tensor:
        """The bias of every head from its row of `table` [heads, buckets]."""
        buckets = self.bucket(distances(queries, keys))
        return F.gather(table, buckets, dim=1).permute(1, 0, 2, 3).cast("f32")


def logn_scale(queries: Tensor, trained: int) -> Tensor:
    """log(n) / log(trained) for query number n (from 1) beyond `trained`, else 1: f32 [B|1, S, 1].

    Queries are multiplied by it, so that attention over many keys stays as sharp as in training.
    """
    number = F.cast(queries + 1, "f32").unsqueeze(2)
    return F.maximum(F.log(F.maximum(number, 1.0)) * (1 / math.log(trained)), 1.0)


@dataclass(frozen=True)
class QueryGrowth:
    """1 + rate * log(1 + floor((position + offset) / length)), which multiplies queries.

    It keeps attention over many keys as sharp as in training (Llama 4, Ministral 3).
    """

    length: int
    rate: float
    offset: int = 0

    def factor(self, positions: Tensor) -> Tensor:
        """The factors f32 [B, S, 1] of queries at positions i32 [B, S]."""
        lengths = F.cast((positions + self.offset) // self.length, "f32").unsqueeze(2)
        return F.log(lengths + 1.0) * self.rate + 1.0


def rotated(x: Tensor, cos: Tensor, sin: Tensor, head_dim: int, interleaved: bool) -> Tensor:
    """x [B, S, heads*head_dim] with pairs of features rotated by given angles.

    cos and sin are f32 [B|1, S, n]; the first 2n features of a head are rotated. A pair is
    (i, i + n), or (2i, 2i + 1) where `interleaved`.
    """
    pairs = cos.shape[-1]
    if not isinstance(pairs, int) or 2 * pairs > head_dim:
        raise Error(f"expected at most {head_dim // 2} angles for heads of {head_dim}, not {pairs}")
    heads = x.reshape(*x.shape[:2], -1, head_dim)
    turning = heads[..., : 2 * pairs].cast("f32")
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    if interleaved:
        couples = turning.reshape(*turning.shape[:3], pairs, 2)
        a, b = (part.squeeze(4) for part in couples.split(1, 4))
        done = F.stack([a * cos - b * sin, b * cos + a * sin], dim=4).reshape(*turning.shape)
    else:
        a, b = turning.split(pairs, 3)
        done = F.concat([a * cos - b * sin, b * cos + a * sin], 3)
    done = done.cast(x.dtype)
    if 2 * pairs < head_dim:
        done = F.concat([done, heads[..., 2 * pairs :]], 3)
    return done.reshape(*x.shape)
