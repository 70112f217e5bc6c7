"""Numbers at the edges of dtypes."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from irc.ir.dtypes import dtype, unpacked

Array: TypeAlias = np.ndarray[Any, Any]


def numbers(name: str, rng: np.random.Generator) -> Array:
    """Every number of a narrow dtype; of a wide one the edges, and numbers of any size."""
    kind = dtype(name)
    numpy: Any = kind.numpy
    if kind.bits == 4:
        return unpacked(np.arange(8, dtype=np.uint8) * 0x22 + 0x10, name)
    if kind.kind == "bool":
        return np.array([False, True])
    if kind.bits <= 16:
        return np.arange(2**kind.bits).astype(f"u{kind.bits // 8}").view(numpy)
    count = 20000
    bits = rng.integers(0, 2**kind.bits, count, f"u{kind.bits // 8}", endpoint=False)
    anywhere = bits.view(numpy)
    small = rng.integers(-300, 300, count)
    if not kind.is_float:
        edges = np.iinfo(numpy)
        limits = np.array([edges.min, edges.max], numpy)
        return np.concatenate([anywhere, small.astype(numpy), limits])
    with np.errstate(all="ignore"):
        near = np.arange(2**16).astype(np.uint16).view(np.float16).astype(numpy)
        halves = (near[:-1] + near[1:]) / 2  # between neighbours of narrow floats
        wide = small * np.exp2(rng.integers(-140, 128, count).astype(numpy))
        return np.concatenate([anywhere, near, halves, wide]).astype(numpy)


def fits(x: Array, name: str) -> Array:
    """Which numbers an integer dtype has, once their fractions are cut off."""
    kind = dtype(name)
    x = np.where(np.isfinite(x), x, np.inf)
    signed = kind.kind == "int"
    low = -(2.0 ** (kind.bits - 1)) if signed else 0.0
    return (np.trunc(x) >= low) & (np.trunc(x) < 2.0 ** (kind.bits - signed))
