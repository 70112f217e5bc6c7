"""Slices of tensors, joined and repeated tensors, padding, constants, counts and masks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from irc import ops
from irc.errors import Error
from irc.frontends.onnx.builder import Builder, numbers
from irc.frontends.onnx.elementwise import scalar
from irc.frontends.onnx.entry import Entry, Node
from irc.frontends.onnx.fold import below, content_of
from irc.frontends.onnx.reshaping import from_the_front, single, sizes_of, whole_numbers
from irc.frontends.onnx.rules import Made, only, reads
from irc.frontends.onnx.tensors import DTYPES, Data
from irc.ir.core import Op, Value
from irc.ir.dims import Dim, DimLike, exact_divide
from irc.ir.dtypes import is_float, numpy_dtype
from irc.onnx_format.operators import PARTIAL

_FAR = (1 << 31) - 1  # what exporters write for the end of a dimension is at least this far


@reads("Slice")
def slice_(b: Builder, node: Node) -> Made:
    x = node.input(0)
    starts, ends = sizes_of(node, 1, "start"), sizes_of(node, 2, "end")
    axes = whole_numbers(node, 3, "axes") if node.has(3) else list(range(len(starts)))
    steps = whole_numbers(node, 4, "steps") if node.has(4) else [1] * len(starts)
    if not len(starts) == len(ends) == len(axes) == len(steps):
        raise Error("the starts, ends, axes and steps of this Slice are not equally many")
    value = b.get(x)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        value = _sliced(b, value, (start, end), axis, step)
    return value


def _sliced(b: Builder, x: Value, ends: tuple[DimLike, DimLike], axis: int, step: int) -> Value:
    """A slice of one dimension."""
    if not -x.type.ndim <= axis < x.type.ndim or not step:
        raise Error(f"Slice along axis {axis} by {step} of {x.type}")
    at = axis % x.type.ndim
    size = x.type.shape[at]
    limits = ((0, size), (0, size)) if step > 0 else ((0, size - 1), (-1, size - 1))
    places = zip(ends, limits, strict=True)
    start, stop = (_place(end, size, *between) for end, between in places)
    if step < 0:
        x = b.value(ops.Flip(x, dims=(at,)))
        start, stop, step = size - 1 - start, size - 1 - stop, -step
    if below(stop, start):
        stop = start
    if (start, stop, step) == (0, size, 1):
        return x
    span = stop - start
    if isinstance(span, Dim) and exact_divide(span, step) is None:
        raise Error(f"a Slice of {span} elements by {step}, which is not known to divide them")
    return b.value(ops.Slice(x, dim=at, start=start, stop=stop, step=step))


def _place(end: DimLike, size: DimLike, low: DimLike, high: DimLike) -> DimLike:
    """A place counted from the front, limited to low .. high.

    One that symbols leave open is assumed to lie between them.
    """
    if not isinstance(end, Dim) and abs(end) >= _FAR:
        return high if end > 0 else low
    place = end + size if below(end, 0) else end
    if below(high, place):
        return high
    return low if below(place, low) else place


@reads("Split", known="axis split num_outputs")
def split(b: Builder, node: Node) -> Made:
    """Parts of given sizes, or equal ones of which the last may be smaller."""
    x, count = node.input(0), len(node.outputs)
    at, given = node.axis(x.ndim, 0), node.ints("split")
    if node.has(1):
        sizes = sizes_of(node, 1, "split")
    elif given is not None:
        sizes = tuple(given)
    else:
        sizes = _even(x.shape[at], count)
    if len(sizes) != count:
        raise Error(f"Split into {len(sizes)} parts with {count} results")
    return b.add(ops.Split(b.get(x), sizes=sizes, **PARTIAL[ops.Split].to_irc(node.attributes)))


def _even(size: DimLike, count: int) -> tuple[DimLike, ...]:
    """Equal parts, the last smaller."""
    if isinstance(size, Dim):
        part = exact_divide(size, count)
        if part is None:
            raise Error(f"Split of {size} elements into {count} parts of unknown size")
        return (part,) * count
    part = -(-size // count)
    return tuple(max(0, min(part, size - i * part)) for i in range(count))


@reads("Concat", known="axis")
def concat(b: Builder, node: Node) -> Made:
    values = [b.get(entry) for entry in node.present()]
    return b.value(ops.Concat(values, dim=node.integer("axis", 0)))


@reads("Pad", known="mode", refuses=only("mode", "constant", "edge", "reflect", "wrap"))
def pad(b: Builder, node: Node) -> Made:
    x, ends = node.input(0), sizes_of(node, 1, "padding")
    axes = whole_numbers(node, 3, "axes") if node.has(3) else list(range(x.ndim))
    if len(ends) != 2 * len(axes):
        raise Error("this Pad has not two numbers for each of its axes")
    before: list[DimLike] = [0] * x.ndim
    after: list[DimLike] = [0] * x.ndim
    for i, axis in enumerate(from_the_front(node, axes, x.ndim)):
        before[axis], after[axis] = ends[i], ends[i + len(axes)]
    value = b.get(x)
    for i, size in enumerate(x.shape):  # negative padding removes elements
        first, last = (max(0, -n) if isinstance(n, int) else 0 for n in (before[i], after[i]))
        if first or last:
            value = b.value(ops.Slice(value, dim=i, start=first, stop=size - last))
    kept = [tuple(n if isinstance(n, Dim) else max(0, n) for n in many) for many in (before, after)]
    if node.text("mode", "constant") == "constant":
        return b.value(ops.Pad(value, before=kept[0], after=kept[1], value=_fill(node, x.dtype)))
    for i, (first, last) in enumerate(zip(*kept, strict=True)):
        if (first, last) != (0, 0):
            value = _copied(b, node, value, i, first, last)
    return value


def _fill(node: Node, dtype: str) -> Any:
    fill = scalar(node.optional(2)) if node.has(2) else 0
    if fill is None:
        raise Error("the value of this Pad is computed; irc pads with a number")
    if dtype == "bool":
        return bool(fill)
    return float(fill) if is_float(dtype) and fill != 0 else fill if fill != 0 else 0


def _copied(b: Builder, node: Node, x: Value, dim: int, first: DimLike, last: DimLike) -> Value:
    """Padding of one dimension by elements of x: rows of it by number."""
    size = x.type.shape[dim]
    if isinstance(size, Dim) or isinstance(first, Dim) or isinstance(last, Dim):
        raise Error(f"Pad in mode {node.text('mode', '')} needs sizes that are numbers")
    places = np.arange(-first, size + last)
    mode = node.text("mode", "")
    if not size or (mode == "reflect" and size == 1):
        raise Error(f"Pad in mode {mode} of a dimension of {size}")
    if mode == "edge":
        places = np.clip(places, 0, size - 1)
    elif mode == "wrap":
        places = places % size
    else:  # back and forth, without the last element twice
        places = np.abs((places + size - 1) % (2 * size - 2) - (size - 1))
    indices = b.constant(places.astype(object), "i64", places.shape)
    return b.value(ops.Gather(x, indices, dim=dim))


@reads("ConstantOfShape", known="value")
def constant_of_shape(b: Builder, node: Node) -> Made:
    shape = sizes_of(node, 0)
    value: Data | None = node.attributes.get("value")
    array = None if value is None else value.read()
    if array is not None and array.size != 1:
        raise Error(f"the value of this ConstantOfShape is {array.size} numbers, not one")
    number: Any = 0.0 if array is None else numbers(array).item()
    kind = "f32" if value is None else value.dtype
    return b.value(ops.Full(value=number, shape=shape, dtype=kind))


@reads("Constant", known="value value_float value_int value_floats value_ints")
def constant(b: Builder, node: Node) -> Made:
    """The tensor or the numbers of its attribute."""
    for name, value in node.attributes.items():
        if isinstance(value, Data):
            return Entry(value.dtype, value.shape, data=value)
        kind = "f32" if "float" in name else "i64"
        array = np.array(value, np.float32 if kind == "f32" else np.int64)
        return Entry(kind, array.shape, content=numbers(array))
    raise Error("this Constant has no value")


@reads("Range", known="stash_type", refuses=only("stash_type", 1))
def range_(b: Builder, node: Node) -> Made:
    """start + step * Iota."""
    ends = [content_of(node.input(i)) for i in range(3)]
    if any(content is None for content in ends):
        raise Error("the size of this Range depends on the data")
    known: list[Any] = [each.item() for each in ends if each is not None and each.size == 1]
    if len(known) != 3:
        raise Error("the start, limit and step of this Range are not one number each")
    start, stop, step = known
    kind = node.input(0).dtype
    size: DimLike | None = None
    if not isinstance(step, Dim) and step:
        span = stop - start
        size = (
            exact_divide(span, step) if isinstance(span, Dim) else _count(start, stop, step, kind)
        )
    if size is None:
        raise Error(f"a Range from {start} to {stop} by {step} has no size that irc can write")
    many = b.entry(b.value(ops.Iota(size=size, dtype="f32" if kind in ("f16", "bf16") else kind)))
    many = b.op(ops.Mul, many, b.number(step, many.dtype)) if step != 1 else many
    many = b.op(ops.Add, many, b.number(start, many.dtype)) if start != 0 else many
    return b.cast(many, kind)


def _count(start: Any, stop: Any, step: Any, dtype: str) -> int | None:
    """The number of elements from start up to stop, as the dtype holds these numbers.

    None where that is not finite.
    """
    if not is_float(dtype):
        return max(0, -((start - stop) // step))
    first, last, distance = (float(numpy_dtype(dtype).type(n)) for n in (start, stop, step))
    count = (last - first) / distance if distance else math.inf
    return max(0, math.ceil(count)) if math.isfinite(count) else None


@reads("Tile")
def tile(b: Builder, node: Node) -> Made:
    """A new dimension of copies before each dimension, merged with it."""
    x, times = node.input(0), sizes_of(node, 1, "repeats")
    if len(times) != x.ndim:
        raise Error(f"Tile of {x.ndim} dimensions by {len(times)} repeats")
    if all(isinstance(n, int) and n == 1 for n in times):
        return x
    if 0 in times:
        shape = tuple(n * size for n, size in zip(times, x.shape, strict=True))
        return b.value(
            ops.Full(value=False if x.dtype == "bool" else 0, shape=shape, dtype=x.dtype)
        )
    split = tuple(size for n in x.shape for size in (1, n))
    wide = tuple(size for many in zip(times, x.shape, strict=True) for size in many)
    value = b.value(ops.Expand(b.reshaped(b.get(x), split), shape=wide))
    return b.reshaped(value, tuple(n * size for n, size in zip(times, x.shape, strict=True)))


def diagonal(
    b: Builder, rows: DimLike, columns: DimLike, k: DimLike | Value, order: type[Op]
) -> Entry:
    """How the column of each element compares with its row + k: bool [rows, columns]."""
    row = b.value(ops.Unsqueeze(b.value(ops.Iota(size=rows, dtype="i64")), dims=(1,)))
    offset = k if isinstance(k, Value) else b.number(k, "i64")
    shifted = row if k == 0 else b.op(ops.Add, row, offset)
    return b.op(order, b.value(ops.Iota(size=columns, dtype="i64")), shifted)


@reads("Trilu", known="upper")
def trilu(b: Builder, node: Node) -> Made:
    x = node.shaped(0, 2)
    k: DimLike | Value = 0
    if node.has(1):
        is_known = content_of(node.input(1)) is not None
        k = single(node, 1, "diagonal") if is_known else b.reshaped(b.get(node.input(1)), ())
    order: type[Op] = ops.Ge if node.integer("upper", 1) else ops.Le
    kept = diagonal(b, x.shape[-2], x.shape[-1], k, order)
    return b.where(kept, x, False if x.dtype == "bool" else 0)


@reads("EyeLike", known="dtype k")
def eye_like(b: Builder, node: Node) -> Made:
    x = node.shaped(0, 2, 2)
    kind = DTYPES.get(node.integer("dtype", 0), x.dtype)
    rows, columns = x.shape
    return b.cast(diagonal(b, rows, columns, node.integer("k", 0), ops.Eq), kind)


@reads("OneHot", known="axis")
def one_hot(b: Builder, node: Node) -> Made:
    """A new dimension with `on` at the index of each element and `off` elsewhere."""
    indices, size = node.input(0), scalar(node.input(1))
    values = content_of(node.input(2))
    axis = node.axis(indices.ndim + 1, -1)
    kind = node.input(2).dtype
    if node.input(2).shape != (2,):
        raise Error("the values of this OneHot are not two")
    if not isinstance(size, (int, float)):
        raise Error("the depth of this OneHot is no number that is known")
    size = int(size)
    if indices.dtype not in ("i32", "i64"):
        indices = b.cast(indices, "i64")
    # numbers from the end count from size
    negative = b.op(ops.Lt, indices, 0)
    indices = b.where(negative, b.op(ops.Add, indices, size), indices)
    hit = b.value(ops.OneHot(b.get(indices), size=size, dtype="bool"))
    order = [*range(axis), indices.ndim, *range(axis, indices.ndim)]
    hit = b.entry(b.transposed(hit, order))
    if values is not None and values.tolist() == [0, 1]:
        return b.cast(hit, kind)
    off, on = b.add(ops.Split(b.get(node.input(2)), dim=0, sizes=(1, 1))).results
    return b.where(hit, b.entry(on), b.entry(off))
