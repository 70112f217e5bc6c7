"""Scales and zeros of a layer, in shapes whose blocks `dequantize` can spread."""

from __future__ import annotations

from dataclasses import replace
from math import gcd, prod

import numpy as np

from ....errors import Error
from ....ops.quant import SCALES
from ....weights import RepeatedRef, SortingRef, TakenRef
from .parts import Part, Sizes, Tensors


def take_scales(tensors: Tensors, key: str, shape: Sizes, block: Sizes | None = None) -> Part:
    """The scales `key` of codes [N, K]: of the tensor, of its rows, or of blocks.

    `block` is the size of a block, which need not divide the codes; without it the scales are one,
    one per row, or groups that divide a row. Scales in bytes are powers of two.
    """
    tensor = tensors.info(key)
    kind = "f8e8m0" if tensor.dtype == "u8" else tensor.dtype
    if kind not in SCALES:
        raise Error(f"{key} has scales of {tensor.dtype}; expected {', '.join(SCALES)}")
    tensors.check_scales(key)
    count, rows = prod(tensor.shape), shape[0]
    if count == 1:
        return tensors.view(key, kind, (1, 1))
    if block is not None:
        blocks = tuple(-(-size // length) for size, length in zip(shape, block, strict=True))
        return spread(tensors.view(key, kind, blocks), shape, block)
    if count % rows or shape[1] % (count // rows):
        raise Error(f"{key} has {count} scales, which do not divide {[*shape]} into blocks")
    return tensors.view(key, kind, (rows, count // rows))


def spread(part: Part, shape: Sizes, block: Sizes) -> Part:
    """Scales whose last block may be cut off, as scales of smaller blocks that divide the codes."""
    wanted, counts = list[int](), list[int]()
    for blocks, size, length in zip(part.shape, shape, block, strict=True):
        common = length if blocks == 1 or size % length == 0 else gcd(size, length)
        counts.append(length // common)
        wanted.append(blocks if common == length else size // common)
    if tuple(wanted) == part.shape:
        return part
    ref = RepeatedRef(part.ref, tuple(counts), tuple(wanted))
    return Part(ref, part.dtype, tuple(wanted))


def in_groups(tensors: Tensors, key: str, codes: Part, size: int) -> tuple[Part, Part | None]:
    """(codes [N, K] whose groups are adjacent, the order of the input features that makes them so).

    The tensor `key`, if there is one, has the group of every feature; the order is None where they
    are adjacent already.
    """
    k = codes.shape[1]
    groups = tensors.read(key) if key in tensors else np.arange(0)
    adjacent = np.arange(k) // size
    if not groups.size or groups.max() < 0 or np.array_equal(groups, adjacent):
        return codes, None
    if k % size or not np.array_equal(np.sort(groups), adjacent):
        raise Error(
            f"{key} has groups of unequal sizes, expected {size} input features in each; irc reads "
            "an order of activations only where group_size divides the input features"
        )
    order_part = Part(SortingRef(tensors.take(key, "i32").ref), "i32", (k,))
    order = tensors.shared(key, order_part)
    return replace(codes, ref=TakenRef(codes.ref, order.ref, 1)), order
