"""Rules of `canonicalize` about shapes. They move no number, so they are exact."""

from __future__ import annotations

from irc.ir.core import Op, Value
from irc.ops import Expand, Reshape, Slice, Transpose
from irc.rewrite import P, rule

from .fitting import fitting, unsharded

# With an unchanged type these leave every element where it is.
_UNCHANGED = (
    P.reshape("x") | P.expand("x") | P.slice("x") | P.pad("x") | P.repeat("x") | P.concat("x")
)


@rule(_UNCHANGED.capture("root"))
def unchanged(x: Value, root: Op) -> Value | None:
    """A reshape, expand, slice, pad, ... to the type that a value has already."""
    return fitting(x, root)


@rule(P.transpose("x").capture("root"))
def transpose_nothing(x: Value, root: Op) -> Value | None:
    """A transpose that leaves the dimensions in order."""
    return x if _order(root) == tuple(range(x.type.ndim)) else None


@rule(P.split("x").capture("root"))
def split_nothing(x: Value, root: Op) -> Value | None:
    """A split into one part is its operand."""
    return fitting(x, root) if len(root.results) == 1 else None


@rule(P.transpose(P.transpose("x", shared=True).capture("inner")).capture("root"))
def transpose_chain(x: Value, inner: Op, root: Op) -> Op | Value | None:
    """Two transposes are one, or none where the second undoes the first."""
    first = _order(inner)
    order = tuple(first[i] for i in _order(root))
    return x if order == tuple(range(len(order))) else fitting(Transpose(x, order=order), root)


def _order(op: Op) -> tuple[int, ...]:
    order: tuple[int, ...] = op.attributes["order"]
    return tuple(i % len(order) for i in order)


@rule(
    P.reshape(P.transpose(P.reshape("x", shared=True), shared=True).capture("inner")).capture(
        "root"
    )
)
def transpose_joined(x: Value, inner: Op, root: Op) -> Op | None:
    """A transpose that keeps the first dimension, which reshapes join of several and part again."""
    order, joined = _order(inner), inner.operands[0].type.shape
    more = x.type.ndim - len(joined)
    if not order or order[0] or more < 1 or x.type.shape[more + 1 :] != joined[1:]:
        return None
    moved = Transpose(x, order=(*range(more + 1), *(i + more for i in order[1:])))
    return fitting(moved, root) if unsharded(x, inner.result) else None


_RESHAPED = (
    P.reshape("x", shared=True) | P.squeeze("x", shared=True) | P.unsqueeze("x", shared=True)
)


@rule(P.reshape(_RESHAPED.capture("inner")).capture("root"))
def reshape_chain(x: Value, inner: Op, root: Op) -> Op | None:
    """Of two reshapes the last decides."""
    return Reshape(x, shape=root.result.type.shape) if unsharded(x, inner.result) else None


@rule(
    (P.squeeze(P.unsqueeze("x", shared=True)) | P.unsqueeze(P.squeeze("x", shared=True))).capture(
        "root"
    )
)
def squeeze_back(x: Value, root: Op) -> Value | None:
    """Dimensions of size 1 that come and go."""
    return fitting(x, root)


@rule(P.expand(P.expand("x", shared=True).capture("inner")).capture("root"))
def expand_chain(x: Value, inner: Op, root: Op) -> Op | None:
    """Of two expands the last decides."""
    return Expand(x, shape=root.result.type.shape) if unsharded(x, inner.result) else None


@rule(P.slice(P.slice("x", step=1, shared=True).capture("inner"), step=1).capture("root"))
def slice_chain(x: Value, inner: Op, root: Op) -> Op | None:
    """Two slices of the same dimension are one."""
    a, b = inner.attributes, root.attributes
    if a["dim"] % x.type.ndim != b["dim"] % x.type.ndim:
        return None
    start, stop = a["start"] + b["start"], a["start"] + b["stop"]
    return fitting(Slice(x, dim=a["dim"], start=start, stop=stop), root)


@rule(P.concat("*parts").capture("root"))
def concat_of_split(parts: tuple[Value, ...], root: Op) -> Value | None:
    """All parts of a split, in order, concatenated again."""
    split = parts[0].producer if parts else None
    if split is None or split.opname != "split" or parts != split.results:
        return None
    x = split.operands[0]
    same = split.attributes["dim"] % x.type.ndim == root.attributes["dim"] % x.type.ndim
    return fitting(x, root) if same else None
