"""Checks that rules share: of the type of a replacement, and of conversions that lose nothing."""

from __future__ import annotations

from typing import Any, TypeVar

import ml_dtypes

from irc.ir.core import Op, Value
from irc.ir.dtypes import DType, dtype

Replacement = TypeVar("Replacement", bound=Value | Op)


def fitting(new: Replacement, root: Op) -> Replacement | None:
    """`new` if it has the type of the only result of `root`, else None.

    The types differ where the root broadcast its operand or where sharding differs.
    """
    value = new if isinstance(new, Value) else new.result
    return new if value.type is root.result.type else None


def unsharded(*values: Value) -> bool:
    """Whether no value is sharded or a partial sum.

    Two operations in a row may have axes that their composition cannot express.
    """
    return not any(value.type.sharded for value in values)


def lossless(source: str, target: str) -> bool:
    """Whether every value of dtype `source`, NaN and infinities too, is one of `target`."""
    a, b = dtype(source), dtype(target)
    if a is b:
        return True
    if a.kind == "bool":
        return b.name != "f8e8m0"  # which has no zero
    if b.kind == "bool":
        return False
    if a.is_float:
        return b.is_float and _floats_in_floats(a, b)
    low, high = _range(a)
    if b.is_float:
        mantissa, largest, _ = _limits(b)
        return max(-low, high) <= min(2 ** (mantissa + 1), largest)
    target_low, target_high = _range(b)
    return target_low <= low and high <= target_high


def _range(kind: DType) -> tuple[int, int]:
    if kind.kind == "uint":
        return 0, 2**kind.bits - 1
    return -(2 ** (kind.bits - 1)), 2 ** (kind.bits - 1) - 1


def _floats_in_floats(a: DType, b: DType) -> bool:
    if b.name in ("f8e4m3", "f8e8m0", "f4e2m1") and (a.name, b.name) != ("f4e2m1", "f8e4m3"):
        return False  # they have no infinities, and f4e2m1 not even NaN
    mantissa, largest, smallest = _limits(a)
    more, larger, smaller = _limits(b)
    return mantissa <= more and largest <= larger and smallest >= smaller


def _limits(kind: DType) -> tuple[int, float, float]:
    """(stored bits of the mantissa, the largest finite number, the smallest positive one)."""
    finfo: Any = ml_dtypes.finfo
    found = finfo(kind.numpy)
    return int(found.nmant), float(found.max), float(found.smallest_subnormal)
