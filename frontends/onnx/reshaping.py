"""Shapes: reshape, squeeze, expand, transpose, and sizes that are computed in the graph."""

from __future__ import annotations

import math
from collections.abc import Sequence

from irc import ops
from irc.errors import Error
from irc.frontends.onnx.builder import Builder
from irc.frontends.onnx.entry import Content, Node
from irc.frontends.onnx.fold import content_of, folded, folds
from irc.frontends.onnx.rules import Made, reads
from irc.frontends.shapes import inferred_shape
from irc.ir.dims import Dim, DimLike, Shape, product


def sizes_of(node: Node, index: int, what: str = "shape") -> tuple[DimLike, ...]:
    """The elements of an input that says sizes; an Error where they depend on the data."""
    content = content_of(node.input(index))
    if content is None:
        raise Error(
            f"the {what} of this {node.kind} depends on the data, and irc needs shapes that follow "
            "from those of the inputs"
        )
    found = tuple(content.reshape(-1).tolist())
    if not all(isinstance(n, (int, Dim)) for n in found):
        raise Error(f"the {what} of this {node.kind} is not made of integers")
    return found


def single(node: Node, index: int, what: str) -> DimLike:
    """The only element of an input that says a size."""
    found = sizes_of(node, index, what)
    if len(found) != 1:
        raise Error(f"the {what} of this {node.kind} is {len(found)} numbers, not one")
    return found[0]


def whole_numbers(node: Node, index: int, what: str) -> list[int]:
    """The elements of an input that are known integers."""
    found = sizes_of(node, index, what)
    if any(isinstance(n, Dim) for n in found):
        raise Error(f"the {what} of this {node.kind} has a symbol; expected numbers")
    return [n for n in found if not isinstance(n, Dim)]


def written_axes(node: Node) -> list[int] | None:
    """The axes as the file has them: an input in newer opsets and an attribute before."""
    found = node.ints("axes")
    return whole_numbers(node, 1, "axes") if found is None and node.has(1) else found


def axes_of(node: Node, ndim: int) -> list[int] | None:
    """The axes counted from the front."""
    written = written_axes(node)
    return None if written is None else from_the_front(node, written, ndim)


def from_the_front(node: Node, axes: Sequence[int], ndim: int) -> list[int]:
    """Axes of `ndim` dimensions counted from the front; an Error if one is named twice."""
    for axis in axes:
        if not -ndim <= axis < ndim:
            raise Error(f"{node.kind} names axis {axis} of {ndim} dimensions")
    counted = [axis % ndim for axis in axes]
    if len(set(counted)) != len(counted):
        raise Error(f"{node.kind} names one of the axes {list(axes)} twice")
    return counted


def new_shape(node: Node) -> Shape:
    """The shape that a node gives the elements of its first input."""
    old = node.input(0).shape
    match node.kind:
        case "Reshape":
            return resolved(old, sizes_of(node, 1), bool(node.integer("allowzero", 0)))
        case "Flatten":
            axis = node.integer("axis", 1)
            axis = axis + len(old) if axis < 0 else axis
            return product(old[:axis]), product(old[axis:])
        case "Squeeze":
            gone = axes_of(node, len(old))
            if gone is None:
                gone = [i for i, size in enumerate(old) if size == 1]
            return tuple(size for i, size in enumerate(old) if i not in gone)
        case _:
            count = len(old) + len(written_axes(node) or ())
            places, rest = axes_of(node, count) or [], iter(old)
            return tuple(1 if i in places else next(rest) for i in range(count))


def resolved(old: Shape, wanted: tuple[DimLike, ...], allowzero: bool) -> Shape:
    """The shape that Reshape means: 0 copies a size, -1 is what is left."""
    kept = [
        old[i] if size == 0 and not allowzero and i < len(old) else size
        for i, size in enumerate(wanted)
    ]
    if any(isinstance(size, int) and size < -1 for size in kept):
        raise Error(f"a Reshape to [{', '.join(map(str, wanted))}], which is no shape")
    return inferred_shape(old, kept)


@folds("Reshape", "Squeeze", "Unsqueeze", "Flatten")
def reshaped(node: Node, c: list[Content]) -> Content | None:
    """Known elements in a new shape; None where the shape has symbols or does not fit."""
    shape = [n for n in new_shape(node) if isinstance(n, int)]
    fits = min(shape, default=0) >= 0 and math.prod(shape) == c[0].size
    return c[0].reshape(shape) if fits else None


@reads("Reshape", "Squeeze", "Unsqueeze", "Flatten", known="allowzero axes axis")
def reshape(b: Builder, node: Node) -> Made:
    x, shape = node.input(0), new_shape(node)
    if product(x.shape) != product(shape):
        raise Error(
            f"{node.kind} of [{', '.join(map(str, x.shape))}] to {list(shape)} does not fit"
        )
    cls = {"Squeeze": ops.Squeeze, "Unsqueeze": ops.Unsqueeze}.get(node.kind)
    given = written_axes(node) if cls is not None else None
    if cls is not None and given:
        return b.op(cls, x, dims=tuple(given))
    return b.op(ops.Reshape, x, shape=shape)


@reads("Shape", "Size", known="start end")
def shape_of(b: Builder, node: Node) -> Made:
    found = folded(node)
    assert found is not None
    return found


@reads("Expand")
def expand(b: Builder, node: Node) -> Made:
    x, wanted = node.input(0), sizes_of(node, 1)
    old = (1,) * (len(wanted) - x.ndim) + x.shape
    wanted = (1,) * (len(old) - len(wanted)) + wanted
    shape = tuple(a if b_ == 1 else b_ for a, b_ in zip(old, wanted, strict=True))
    return x if shape == x.shape else b.op(ops.Expand, x, shape=shape)


@reads("Transpose", known="perm")
def transpose(b: Builder, node: Node) -> Made:
    x = node.input(0)
    order = tuple(node.ints("perm") or reversed(range(x.ndim)))
    if sorted(order) != list(range(x.ndim)):
        raise Error(f"Transpose by {list(order)} of {x.ndim} dimensions")
    return b.op(ops.Transpose, x, order=order)
