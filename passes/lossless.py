"""Which conversions keep every value of a dtype."""

from __future__ import annotations

from irc.dtypes import DType, dtype

# Stored bits of the mantissa, the largest finite number, the smallest positive one.
_FLOATS: dict[str, tuple[int, float, float]] = {
    "f64": (52, 1.7976931348623157e308, 2.0**-1074),
    "f32": (23, (2 - 2.0**-23) * 2.0**127, 2.0**-149),
    "bf16": (7, (2 - 2.0**-7) * 2.0**127, 2.0**-133),
    "f16": (10, 65504.0, 2.0**-24),
    "f8e5m2": (2, 57344.0, 2.0**-16),
    "f8e4m3": (3, 448.0, 2.0**-9),
}


def lossless(source: str, target: str) -> bool:
    """Whether every value of dtype `source`, NaN and infinities too, is one of `target`."""
    a, b = dtype(source), dtype(target)
    if a is b or a.kind == "bool":
        return True
    if b.kind == "bool":
        return False
    if a.is_float:
        return b.is_float and _floats_in_floats(a, b)
    low, high = _range(a)
    if b.is_float:
        mantissa, largest, _ = _FLOATS[b.name]
        return max(-low, high) <= 2 ** (mantissa + 1) and max(-low, high) <= largest
    target_low, target_high = _range(b)
    return target_low <= low and high <= target_high


def _range(kind: DType) -> tuple[int, int]:
    if kind.kind == "uint":
        return 0, 2**kind.bits - 1
    return -(2 ** (kind.bits - 1)), 2 ** (kind.bits - 1) - 1


def _floats_in_floats(a: DType, b: DType) -> bool:
    if b.name == "f8e4m3":  # has no infinities
        return False
    mantissa, largest, smallest = _FLOATS[a.name]
    more, larger, smaller = _FLOATS[b.name]
    return mantissa <= more and largest <= larger and smallest >= smaller
