"""How two arrays of one activation differ, and what explains the difference."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]

# The largest relative L2 error of one step on equal inputs, by the narrowest dtype in it, and what
# it is called. Measured on small models: f32 4e-5, bf16 8e-3, i8 6e-3, four bits 0.08 to 0.19.
LIMITS = {
    **dict.fromkeys(("f32", "f64"), (1e-4, "rounding of f32")),
    "f16": (5e-3, "rounding of f16"),
    "bf16": (3e-2, "rounding of bf16"),
    **dict.fromkeys(("i8", "u8"), (6e-2, "as expected of int8")),
    "f8e4m3": (0.12, "as expected of fp8"),
    "f8e5m2": (0.2, "as expected of fp8"),
    **dict.fromkeys(("i4", "u4"), (0.35, "as expected of int4")),
    "f4e2m1": (0.35, "as expected of fp4"),
}
_EXPLAINED = 0.02  # what may remain of an error that a simple cause explains
_SAME = 2e-5  # between sorted numbers; any two normal arrays of a million differ by 1e-3


@dataclass
class Measure:
    """The difference of two arrays of one shape.

    `cause`: what explains it, such as "scale or sign"; "equal" where there is none. `both`: "NaN"
    or "infinity", which both have at the same places, or "".
    """

    correlation: float
    relative_l2: float
    largest: float
    cause: str
    both: str


def limit_of(dtypes: Iterable[str]) -> tuple[float, str]:
    """The limit of the widest rounding among some dtypes, and its name."""
    return max((LIMITS[kind] for kind in dtypes if kind in LIMITS), default=LIMITS["f32"])


def measure(a: Array, b: Array, limit: float = 0.0) -> Measure:
    """The difference of `a` from `b`, relative to `b`.

    Its cause holds up to an error of `limit`; below a tenth of that it is not looked for.
    """
    a, b = (x.astype(np.float64).reshape(-1, max(1, x.shape[-1]) if x.ndim else 1) for x in (a, b))
    finite = np.isfinite(a)
    wrong = ~((a == b) | (np.isnan(a) & np.isnan(b)) | (finite & np.isfinite(b)))
    if wrong.any():
        which = "the second" if finite[wrong].all() else "the first"
        return Measure(float("nan"), float("inf"), float("inf"), f"NaN or infinity in {which}", "")
    both = "" if finite.all() else "NaN" if np.isnan(a).any() else "infinity"
    a, b = np.where(finite, a, 0.0), np.where(finite, b, 0.0)
    norm, gap = float(np.linalg.norm(b)), float(np.linalg.norm(a - b))
    if not gap:
        return Measure(1.0, 0.0, 0.0, "equal", both)
    relative, largest = gap / norm if norm else 1.0, float(np.abs(a - b).max())
    cause = _cause(a, b, max(_EXPLAINED, 1.2 * limit)) if relative > limit / 10 else ""
    return Measure(_correlation(a, b), relative, largest, cause, both)


def _correlation(a: Array, b: Array) -> float:
    x, y = a - a.mean(), b - b.mean()
    size = float(np.linalg.norm(x) * np.linalg.norm(y))
    return float((x * y).sum()) / size if size else 0.0


def _cause(a: Array, b: Array, tolerance: float) -> str:
    """The simplest of the usual causes that explains how the rows of `a` differ from `b`."""
    norm = float(np.linalg.norm(a))
    most = min(tolerance * norm, float(np.linalg.norm(a - b)) / 2)  # that may remain unexplained
    if not a.any() or not b.any():
        return f"zeros in {'the second' if a.any() else 'the first'}"
    factor = float((a * b).sum() / (b * b).sum())
    if np.linalg.norm(a - factor * b) <= most:
        return f"scale or sign: {factor:.4g} times the second"
    columns = (a * b).sum(0) / np.maximum((b * b).sum(0), 1e-30)
    if len(a) > 2 and np.linalg.norm(a - columns * b) <= most:
        return "scale or sign: a factor per element of the last dimension"
    if len(a) > 2 and np.linalg.norm(a - b - (a - b).mean(0)) <= most:
        return "offset: the same vector is added to every row"
    for what, x, y in (("the last dimension", a, b), ("rows", a.T, b.T)):
        orders = [np.lexsort(np.sort(z, 0)) for z in (x, y)]
        if np.linalg.norm(x - y[:, orders[1]][:, np.argsort(orders[0])]) <= most:
            return f"layout: {what} in another order"
    same = np.linalg.norm(np.sort(a, None) - np.sort(b, None)) <= _SAME * norm
    return "layout: the same numbers elsewhere" if same else "other numbers"
