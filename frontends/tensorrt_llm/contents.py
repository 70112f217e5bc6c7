"""Arithmetic on the known elements of shape tensors, and the operations that compute them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from ...ir.dims import DimLike, exact_divide
from ...ir.types import TensorType
from ..tensor import Tensor as Inner
from ..tensor import one

if TYPE_CHECKING:
    from .network import Network

Content: TypeAlias = tuple[DimLike, ...]


def fold(op: str, a: Content, b: Content) -> Content | None:
    """`a op b` elementwise; None where it is not known, or no arithmetic of sizes."""
    if op not in _FOLDS or (len(a) != len(b) and 1 not in (len(a), len(b))):
        return None
    count = 0 if not (a and b) else max(len(a), len(b))
    pairs = [(a[i % len(a)], b[i % len(b)]) for i in range(count)]
    found = [_FOLDS[op](left, right) for left, right in pairs]
    return None if None in found else tuple(cast("list[DimLike]", found))


def _quotient(a: DimLike, b: DimLike) -> DimLike | None:
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and (a >= 0) == (b > 0) else None
    return exact_divide(a, b)


def _larger(a: DimLike, b: DimLike) -> DimLike | None:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else None


def _smaller(a: DimLike, b: DimLike) -> DimLike | None:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else None


_FOLDS: dict[str, Callable[[DimLike, DimLike], DimLike | None]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": _quotient,
    "floor_div": _quotient,
    "maximum": _larger,
    "minimum": _smaller,
}


def materialized(network: Network, content: Content, type: TensorType) -> Inner:
    """The operations of a known content."""
    dtype = type.dtype
    if type.shape == ():
        return _element(network, content[0], dtype)
    if all(isinstance(size, int) for size in content) and len(content) <= 16:
        return one("constant", values=content, shape=type.shape, dtype=dtype)
    parts = [one("unsqueeze", _element(network, size, dtype), dims=(0,)) for size in content]
    return one("concat", parts, dim=0)


def _element(network: Network, size: DimLike, dtype: str) -> Inner:
    """A polynomial of sizes as a scalar."""
    if isinstance(size, int):
        return one("constant", values=(size,), dtype=dtype)
    total: Inner | None = None
    for names, factor in size.terms:
        term: Any = factor
        for name in names:
            term = network.symbol_value(name, dtype) * term
        total = term if total is None else total + term
    assert total is not None
    return total
