"""Taking tensors apart, putting them together, filling and surrounding them."""

from __future__ import annotations

from typing import Any

import numpy as np

from irc import ops
from irc.core import Op, Value
from irc.dims import Dim, DimLike, exact_divide
from irc.dtypes import dtype as dtype_called
from irc.errors import Error
from irc.frontends.onnx.builder import Builder, numbers
from irc.frontends.onnx.elementwise import scalar
from irc.frontends.onnx.entry import Entry, Node
from irc.frontends.onnx.fold import below, content_of
from irc.frontends.onnx.reshaping import single, sizes_of, whole_numbers
from irc.frontends.onnx.rules import Made, only, reads
from irc.frontends.onnx.tensors import Data

_FAR = 1 << 31  # what exporters write for the end of a dimension is at least this


@reads("Slice")
def slice_(b: Builder, node: Node) -> Made:
    x = node.input(0)
    starts, ends = sizes_of(node, 1, "start"), sizes_of(node, 2, "end")
    axes = whole_numbers(node, 3, "axes") if node.has(3) else list(range(len(starts)))
    steps = whole_numbers(node, 4, "steps") if node.has(4) else [1] * len(starts)
    if not len(starts) == len(ends) == len(axes) == len(steps):
        raise Error("the starts, ends, axes and steps of this Slice are not equally many")
    value, turned = b.get(x), [axis for axis, step in zip(axes, steps, strict=True) if step < 0]
    if node.own and node.final and node.opname == "flip" and turned == axes:
        return b.value(ops.Flip(value, dims=tuple(axes)))
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        value = _cut(b, node, value, (start, end), axis, step)
    return value


def _cut(
    b: Builder, node: Node, x: Value, ends: tuple[DimLike, DimLike], axis: int, step: int
) -> Value:
    """One dimension of a slice."""
    if not -x.type.rank <= axis < x.type.rank or not step:
        raise Error(f"Slice along axis {axis} by {step} of {x.type}")
    at = axis % x.type.rank
    size = x.type.shape[at]
    if step < 0:
        x = b.value(ops.Flip(x, dims=(at,)))
        first, last = (_place(n, size, backwards=True) for n in ends)
        ends, step = (size - 1 - first, size - 1 - last), -step
    start, stop = (_within(_place(n, size), size) for n in ends)
    if below(stop, start):
        stop = start
    if (start, stop, step) == (0, size, 1) and not (node.own and node.final):
        return x
    # how exporters with a symbol round up is for the numbers to say
    span = stop - start
    if isinstance(span, Dim) and exact_divide(span, step) is None:
        raise Error(f"a Slice of {span} elements by {step}, which is not known to divide them")
    dim = axis if node.own and node.final else at
    return b.value(ops.Slice(x, dim=dim, start=start, stop=stop, step=step))


def _place(place: DimLike, size: DimLike, backwards: bool = False) -> DimLike:
    """A place counted from the front."""
    if isinstance(place, Dim):
        negative = below(place, 0)
        return place + size if negative else place
    if place < 0:
        if backwards and place < -_FAR:
            return -1
        return size + place if place > -_FAR else 0
    return size if place >= _FAR and isinstance(size, Dim) else place


def _within(place: DimLike, size: DimLike) -> DimLike:
    """A place no further than the end; one that symbols leave open is taken to lie inside."""
    if below(size, place):
        return size
    return 0 if below(place, 0) else place


@reads("Split", known="axis split num_outputs")
def split(b: Builder, node: Node) -> Made:
    x, axis, count = node.input(0), node.integer("axis", 0), len(node.outputs)
    if not -x.rank <= axis < x.rank:
        raise Error(f"Split along axis {axis} of {x.rank} dimensions")
    given = node.ints("split")
    if node.has(1):
        sizes = sizes_of(node, 1, "split")
    elif given is not None:
        sizes = tuple(given)
    else:
        sizes = _even(x.shape[axis], count)
    if len(sizes) != count:
        raise Error(f"Split into {len(sizes)} parts with {count} results")
    return b.add(ops.Split(b.get(x), dim=axis, sizes=sizes))


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
    given = [entry for entry in node.inputs if entry is not None]
    axis = node.integer("axis", 0)
    if len(given) == 1 and not (node.own and node.final):
        return given[0]
    return b.value(ops.Concat([b.get(entry) for entry in given], dim=axis))


@reads("Pad", known="mode", refuses=only("mode", "constant"))
def pad(b: Builder, node: Node) -> Made:
    x, ends = node.input(0), sizes_of(node, 1, "padding")
    fill = scalar(node.optional(2)) if node.has(2) else 0
    if fill is None:
        raise Error("the value of this Pad is computed; irc pads with a number")
    axes = whole_numbers(node, 3, "axes") if node.has(3) else list(range(x.rank))
    if len(ends) != 2 * len(axes) or not all(-x.rank <= axis < x.rank for axis in axes):
        raise Error("this Pad has not two numbers for each of its axes")
    before: list[DimLike] = [0] * x.rank
    after: list[DimLike] = [0] * x.rank
    for i, axis in enumerate(axes):
        before[axis], after[axis] = ends[i], ends[i + len(axes)]
    value = b.get(x)
    for i, size in enumerate(x.shape):  # negative padding cuts
        first, last = (max(0, -n) if isinstance(n, int) else 0 for n in (before[i], after[i]))
        if first or last:
            value = b.value(ops.Slice(value, dim=i, start=first, stop=size - last))
    kept = [tuple(n if isinstance(n, Dim) else max(0, n) for n in many) for many in (before, after)]
    number = fill if not dtype_called(x.dtype).is_float else float(fill)
    if x.dtype == "bool":
        number = bool(number)
    if number == 0 and x.dtype != "bool":
        number = 0  # the default of the operation
    return b.value(ops.Pad(value, before=kept[0], after=kept[1], value=number))


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


def _without_value(node: Node) -> str | None:
    return None if node.attributes else "it has no value"


@reads(
    "Constant",
    known="value value_float value_int value_floats value_ints",
    refuses=_without_value,
)
def constant(b: Builder, node: Node) -> Made:
    (name, value), *_ = node.attributes.items()
    if isinstance(value, Data):
        return Entry(value.dtype, value.shape, data=value)
    kind = "f32" if "float" in name else "i64"
    array = np.array(value, np.float32 if kind == "f32" else np.int64)
    return Entry(kind, array.shape, content=numbers(array))


@reads("Range")
def range_(b: Builder, node: Node) -> Made:
    kind = node.input(0).dtype
    ends = [content_of(node.input(i)) for i in range(3)]
    known = [content.item() for content in ends if content is not None and content.size == 1]
    if any(content is None for content in ends):
        raise Error("the size of this Range depends on the data")
    if len(known) != 3:
        raise Error("the start, limit and step of this Range are not one number each")
    start, stop, step = known
    size = _count(start, stop, step)
    if size is None:
        raise Error(f"a Range from {start} to {stop} by {step} has no size that irc can write")
    many = b.value(ops.Iota(size=size, dtype=kind))
    if step != 1:
        many = b.value(ops.Mul(many, b.number(step, kind)))
    if start != 0:
        first = b.constant(np.array(start, object), kind, ())
        many = b.value(ops.Add(many, first))
    return many


def _count(start: Any, stop: Any, step: Any) -> DimLike | None:
    if isinstance(step, Dim) or not step:
        return None
    span = stop - start
    if isinstance(span, Dim):
        return exact_divide(span, step)
    count = -(-span // step)
    return max(0, int(count))


@reads("Tile")
def tile(b: Builder, node: Node) -> Made:
    value = b.get(node.input(0))
    times = whole_numbers(node, 1, "repeats")
    for i, count in enumerate(times):
        if count != 1:
            value = b.value(ops.Concat([value] * count, dim=i))
    return value


@reads("Trilu", known="upper")
def trilu(b: Builder, node: Node) -> Made:
    x = node.shaped(0, 2)
    k = single(node, 1, "diagonal") if node.has(1) else 0
    upper = node.integer("upper", 1)
    row = b.value(ops.Iota(size=x.shape[-2], dtype="i64"))
    row = b.value(ops.Unsqueeze(row, dims=(1,)))
    if k != 0:
        row = b.value(ops.Add(row, b.constant(np.array(k, object), "i64", ())))
    column = b.value(ops.Iota(size=x.shape[-1], dtype="i64"))
    order: type[Op] = ops.Ge if upper else ops.Le
    kept = b.value(order(column, row))
    zero = b.number(False if x.dtype == "bool" else 0, x.dtype)
    return b.value(ops.Where(kept, b.get(x), zero))


@reads("CumSum", known="exclusive reverse")
def cumsum(b: Builder, node: Node) -> Made:
    axis = scalar(node.input(1))
    if axis is None:
        raise Error("the axis of this CumSum depends on the data")
    value, dim = b.get(node.input(0)), int(axis)
    turned = bool(node.integer("reverse", 0))
    value = b.value(ops.Flip(value, dims=(dim,))) if turned else value
    value = b.value(ops.Cumsum(value, dim=dim, exclusive=bool(node.integer("exclusive", 0))))
    return b.value(ops.Flip(value, dims=(dim,))) if turned else value


@reads("Einsum", known="equation")
def einsum(b: Builder, node: Node) -> Made:
    from irc.frontends.onnx.einsum import product_of

    x, y = (node.input(i) for i in range(2))
    return product_of(b, node.text("equation", ""), b.get(x), b.get(y))


@reads("OneHot", known="axis")
def one_hot(b: Builder, node: Node) -> Made:
    indices, size = node.input(0), single(node, 1, "depth")
    values = content_of(node.input(2))
    if values is None or values.shape != (2,) or node.integer("axis", -1) not in (-1, indices.rank):
        raise Error("this OneHot has computed values or another axis than the last")
    off, on = values.tolist()
    kind = node.input(2).dtype
    hit = b.value(ops.OneHot(b.get(indices), size=size, dtype="bool"))
    if (off, on) == (0, 1):
        return b.value(ops.Cast(hit, dtype=kind))
    return b.value(ops.Where(hit, b.number(on, kind), b.number(off, kind)))
