"""Einsum of two operands as one matrix product with the dimensions reordered around it."""

from __future__ import annotations

from irc import ops
from irc.core import Value
from irc.dims import DimLike, product
from irc.errors import Error
from irc.frontends.onnx.builder import Builder


def product_of(b: Builder, equation: str, x: Value, y: Value) -> Value:
    """What the equation says of two operands; an Error where it is no product of matrices."""
    left, _, out = equation.replace(" ", "").partition("->")
    first, _, second = left.partition(",")
    words = (first, second, out)
    if not out or "." in equation or any(len(set(word)) != len(word) for word in words):
        raise Error(f"the Einsum {equation!r} is no product of matrices that irc can write")
    if len(first) != x.type.rank or len(second) != y.type.rank:
        raise Error(f"the Einsum {equation!r} does not fit {x.type} and {y.type}")
    sizes = dict(zip(first + second, x.type.shape + y.type.shape, strict=True))
    batch = [c for c in out if c in first and c in second]
    rows = [c for c in first if c in out and c not in second]
    columns = [c for c in second if c in out and c not in first]
    inner = [c for c in first if c in second and c not in out]
    if set(first + second) - {*batch, *rows, *columns, *inner}:
        raise Error(f"the Einsum {equation!r} sums over a dimension of one operand alone")
    a = _matrix(b, x, first, batch, rows, inner, sizes)
    c = _matrix(b, y, second, batch, inner, columns, sizes)
    found = b.value(ops.Matmul(a, c))
    order = [*batch, *rows, *columns]
    shape = tuple(sizes[letter] for letter in order)
    if found.type.shape != shape:
        found = b.value(ops.Reshape(found, shape=shape))
    places = tuple(order.index(letter) for letter in out)
    return (
        found if places == tuple(range(len(out))) else b.value(ops.Transpose(found, order=places))
    )


def _matrix(
    b: Builder,
    x: Value,
    word: str,
    batch: list[str],
    rows: list[str],
    columns: list[str],
    sizes: dict[str, DimLike],
) -> Value:
    """A tensor as [batch..., rows, columns]."""
    order = tuple(word.index(letter) for letter in (*batch, *rows, *columns))
    if order != tuple(range(len(order))):
        x = b.value(ops.Transpose(x, order=order))
    lead = tuple(sizes[letter] for letter in batch)
    counts = (product(tuple(sizes[letter] for letter in many)) for many in (rows, columns))
    shape = (*lead, *counts)
    return x if x.type.shape == shape else b.value(ops.Reshape(x, shape=shape))
