"""Shapes, slices, joined and repeated tensors, padding, constants, counts, masks, reductions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from irc import ops
from irc.errors import Error
from irc.frontends.onnx.builder import Builder, ImportedValue, Node, numbers, sizes
from irc.frontends.onnx.files import DTYPES, Data
from irc.frontends.onnx.fold import below, content_of, scalar
from irc.frontends.onnx.rules import Results, imports, only
from irc.frontends.shapes import inferred_shape
from irc.ir.core import Op
from irc.ir.dims import Dim, DimLike, Shape, exact_divide, product
from irc.ir.dtypes import dtype as dtype_called
from irc.ir.dtypes import is_float, numpy_dtype
from irc.onnx_format.operators import PARTIAL, REDUCTIONS

_FAR = (1 << 31) - 1  # what exporters write for the end of a dimension is at least this far
_REDUCE: dict[str, type[Op]] = {row.kind: cls for cls, row in REDUCTIONS.items()}


def sizes_of(node: Node, index: int, what: str = "shape") -> tuple[DimLike, ...]:
    """The elements of an input that says sizes; an Error where they depend on the data."""
    content = content_of(node.input(index))
    if content is None:
        raise Error(
            f"the {what} of this {node.kind} depends on the data, and irc needs shapes that follow "
            "from those of the inputs"
        )
    elements = tuple(content.reshape(-1).tolist())
    if not all(isinstance(n, (int, Dim)) for n in elements):
        raise Error(f"the {what} of this {node.kind} is not made of integers")
    return elements


def single(node: Node, index: int, what: str) -> DimLike:
    """The only element of an input that says a size."""
    elements = sizes_of(node, index, what)
    if len(elements) != 1:
        raise Error(f"the {what} of this {node.kind} is {len(elements)} numbers, not one")
    return elements[0]


def whole_numbers(node: Node, index: int, what: str) -> list[int]:
    """The elements of an input that are known integers."""
    elements = sizes_of(node, index, what)
    if any(isinstance(n, Dim) for n in elements):
        raise Error(f"the {what} of this {node.kind} has a symbol; expected numbers")
    return [n for n in elements if not isinstance(n, Dim)]


def written_axes(node: Node) -> list[int] | None:
    """The axes as the file has them: an input in newer opsets and an attribute before."""
    axes = node.ints("axes")
    return whole_numbers(node, 1, "axes") if axes is None and node.has(1) else axes


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
            return _resolved(old, sizes_of(node, 1), bool(node.integer("allowzero", 0)))
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


def _resolved(old: Shape, wanted: tuple[DimLike, ...], allowzero: bool) -> Shape:
    """The shape that Reshape means: 0 copies a size, -1 is what is left."""
    kept = [
        old[i] if size == 0 and not allowzero and i < len(old) else size
        for i, size in enumerate(wanted)
    ]
    if any(isinstance(size, int) and size < -1 for size in kept):
        raise Error(f"a Reshape to [{', '.join(map(str, wanted))}], which is not a shape")
    return inferred_shape(old, kept)


@imports("Reshape", "Squeeze", "Unsqueeze", "Flatten", attributes="allowzero axes axis")
def reshape(b: Builder, node: Node) -> Results:
    """The elements of x in the shape that follows from the kind."""
    x, shape = node.input(0), new_shape(node)
    if product(x.shape) != product(shape):
        raise Error(
            f"{node.kind} of [{', '.join(map(str, x.shape))}] to {list(shape)} does not fit"
        )
    cls = {"Squeeze": ops.Squeeze, "Unsqueeze": ops.Unsqueeze}.get(node.kind)
    axes = written_axes(node) if cls is not None else None
    if cls is not None and axes:
        return b.op(cls, x, dims=tuple(axes))
    return b.op(ops.Reshape, x, shape=shape)


@imports("Expand")
def expand(b: Builder, node: Node) -> Results:
    """x in the shape that it and the given one broadcast to."""
    x, wanted = node.input(0), sizes_of(node, 1)
    old = (1,) * (len(wanted) - x.ndim) + x.shape
    wanted = (1,) * (len(old) - len(wanted)) + wanted
    shape = tuple(n if size == 1 else size for n, size in zip(old, wanted, strict=True))
    return x if shape == x.shape else b.op(ops.Expand, x, shape=shape)


@imports("Transpose", attributes="perm")
def transpose(b: Builder, node: Node) -> Results:
    """x with its dimensions in another order, by default the reverse one."""
    x = node.input(0)
    order = tuple(node.ints("perm") or reversed(range(x.ndim)))
    if sorted(order) != list(range(x.ndim)):
        raise Error(f"Transpose by {list(order)} of {x.ndim} dimensions")
    return b.op(ops.Transpose, x, order=order)


# Where the dimensions of blocks [B, C, H, n, W, n] come from, by the order of channels.
_BLOCKS = {"DCR": (0, 3, 4, 1, 5, 2), "CRD": (0, 1, 4, 2, 5, 3)}
_CHANNELS = {"DCR": (0, 3, 5, 1, 2, 4), "CRD": (0, 1, 3, 5, 2, 4)}


@imports("DepthToSpace", "SpaceToDepth", attributes="blocksize mode")
def blocks(b: Builder, node: Node) -> Results:
    """Channels [B, C * n², H, W] as blocks of positions [B, C, H * n, W * n], and the reverse.

    In the mode DCR the channels of one position of a block are next to each other, in CRD those of
    one channel of the result.
    """
    x, n, mode = node.shaped(0, 4, 4), node.integer("blocksize", 0), node.text("mode", "DCR")
    if n < 1 or mode not in _BLOCKS:
        raise Error(f"{node.kind} has blocksize={n}, mode={mode}; expected 1 or more, DCR or CRD")
    to_space, (batch, *sizes) = node.kind == "DepthToSpace", x.shape
    divisors = (n * n, 1, 1) if to_space else (1, n, n)
    parts = [exact_divide(size, by) for size, by in zip(sizes, divisors, strict=True)]
    channels, rows, columns = (0 if part is None else part for part in parts)
    if None in parts:
        shown = ", ".join(map(str, sizes[:1] if to_space else sizes[1:]))
        raise Error(f"{node.kind} needs sizes that {max(divisors)} divides; found {shown}")
    if to_space:
        apart = (n, n, channels) if mode == "DCR" else (channels, n, n)
        x = b.transposed(b.reshaped(x, (batch, *apart, rows, columns)), _BLOCKS[mode])
        return b.reshaped(x, (batch, channels, rows * n, columns * n))
    x = b.reshaped(x, (batch, channels, rows, n, columns, n))
    return b.reshaped(b.transposed(x, _CHANNELS[mode]), (batch, channels * n * n, rows, columns))


@imports("Slice")
def slice_(b: Builder, node: Node) -> Results:
    """Slices of one dimension after the other."""
    x = node.input(0)
    starts, ends = sizes_of(node, 1, "start"), sizes_of(node, 2, "end")
    axes = whole_numbers(node, 3, "axes") if node.has(3) else list(range(len(starts)))
    steps = whole_numbers(node, 4, "steps") if node.has(4) else [1] * len(starts)
    if not len(starts) == len(ends) == len(axes) == len(steps):
        raise Error("the starts, ends, axes and steps of this Slice are not equally many")
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        x = _sliced(b, x, (start, end), axis, step)
    return x


def _sliced(
    b: Builder, x: ImportedValue, ends: tuple[DimLike, DimLike], axis: int, step: int
) -> ImportedValue:
    """A slice of one dimension."""
    if not -x.ndim <= axis < x.ndim or not step:
        raise Error(f"Slice along axis {axis} by {step} of {b.get(x).type}")
    at = axis % x.ndim
    size = x.shape[at]
    limits = ((0, size), (0, size)) if step > 0 else ((0, size - 1), (-1, size - 1))
    places = zip(ends, limits, strict=True)
    start, stop = (_place(end, size, *between) for end, between in places)
    if step < 0:
        x = b.op(ops.Flip, x, dims=(at,))
        start, stop, step = size - 1 - start, size - 1 - stop, -step
    if below(stop, start):
        stop = start
    if (start, stop, step) == (0, size, 1):
        return x
    span = stop - start
    if isinstance(span, Dim) and exact_divide(span, step) is None:
        raise Error(f"a Slice of {span} elements by {step}, which is not known to divide them")
    return b.op(ops.Slice, x, dim=at, start=start, stop=stop, step=step)


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


@imports("Split", attributes="axis split num_outputs")
def split(b: Builder, node: Node) -> Results:
    """Parts of given sizes, or equal ones of which the last may be smaller."""
    x, count = node.input(0), len(node.outputs)
    axis, written = node.axis(x.ndim, 0), node.ints("split")
    if node.has(1):
        parts = sizes_of(node, 1, "split")
    else:
        parts = _even(x.shape[axis], count) if written is None else tuple(written)
    if len(parts) != count:
        raise Error(f"Split into {len(parts)} parts with {count} results")
    return b.results(ops.Split, x, sizes=parts, **PARTIAL[ops.Split].to_irc(node.attributes))


def _even(size: DimLike, count: int) -> tuple[DimLike, ...]:
    """Equal parts, the last smaller."""
    if isinstance(size, Dim):
        part = exact_divide(size, count)
        if part is None:
            raise Error(f"Split of {size} elements into {count} parts of unknown size")
        return (part,) * count
    part = -(-size // count)
    return tuple(max(0, min(part, size - i * part)) for i in range(count))


@imports("Concat", attributes="axis")
def concat(b: Builder, node: Node) -> Results:
    """The operands that are there, one after the other."""
    return b.op(ops.Concat, node.present(), dim=node.integer("axis", 0))


@imports("Pad", attributes="mode", refuses=only("mode", "constant", "edge", "reflect", "wrap"))
def pad(b: Builder, node: Node) -> Results:
    """More elements at the ends of dimensions, or fewer where the padding is negative."""
    x, ends = node.input(0), sizes_of(node, 1, "padding")
    axes = whole_numbers(node, 3, "axes") if node.has(3) else list(range(x.ndim))
    if len(ends) != 2 * len(axes):
        raise Error("this Pad has not two numbers for each of its axes")
    pads: list[tuple[DimLike, DimLike]] = [(0, 0)] * x.ndim
    for i, axis in enumerate(from_the_front(node, axes, x.ndim)):
        pads[axis] = ends[i], ends[i + len(axes)]
    if node.text("mode", "constant") == "constant":
        return padded(b, x, pads, _fill(node, x.dtype))
    x = padded(b, x, [(_negative(first), _negative(last)) for first, last in pads])
    for i, (first, last) in enumerate(pads):
        if _positive(first) != 0 or _positive(last) != 0:
            x = _copied(b, node, x, i, _positive(first), _positive(last))
    return x


def _negative(size: DimLike) -> int:
    return 0 if isinstance(size, Dim) else min(0, size)


def _positive(size: DimLike) -> DimLike:
    return size if isinstance(size, Dim) else max(0, size)


def padded(
    b: Builder, x: ImportedValue, pads: Sequence[tuple[DimLike, DimLike]], fill: Any = 0.0
) -> ImportedValue:
    """x with so many elements before and after each dimension; negative numbers remove some."""
    for dim, (first, last) in enumerate(pads):
        if _negative(first) or _negative(last):
            stop = x.shape[dim] + _negative(last)
            x = b.op(ops.Slice, x, dim=dim, start=-_negative(first), stop=stop)
    before, after = (tuple(_positive(pad[i]) for pad in pads) for i in (0, 1))
    if all(size == 0 for size in (*before, *after)):
        return x
    return b.op(ops.Pad, x, before=before, after=after, value=fill)


def _fill(node: Node, dtype: str) -> Any:
    fill = scalar(node.optional(2)) if node.has(2) else 0
    if fill is None:
        raise Error("the value of this Pad is computed; irc pads with a number")
    if dtype == "bool":
        return bool(fill)
    return float(fill) if is_float(dtype) and fill != 0 else fill if fill != 0 else 0


def _copied(
    b: Builder, node: Node, x: ImportedValue, dim: int, first: DimLike, last: DimLike
) -> ImportedValue:
    """Padding of one dimension by elements of x: rows of it by number."""
    size, mode = x.shape[dim], node.text("mode")
    if isinstance(size, Dim) or isinstance(first, Dim) or isinstance(last, Dim):
        raise Error(f"Pad in mode {mode} needs sizes that are numbers")
    if not size or (mode == "reflect" and size == 1):
        raise Error(f"Pad in mode {mode} of a dimension of {size}")
    places = np.arange(-first, size + last)
    if mode == "edge":
        places = np.clip(places, 0, size - 1)
    elif mode == "wrap":
        places = places % size
    else:  # back and forth, without the last element twice
        places = np.abs((places + size - 1) % (2 * size - 2) - (size - 1))
    indices = b.constant(places.astype(object), "i64", places.shape)
    return b.op(ops.Gather, x, indices, dim=dim)


@imports("Tile")
def tile(b: Builder, node: Node) -> Results:
    """A new dimension of copies before each dimension, merged with it."""
    x, times = node.input(0), sizes_of(node, 1, "repeats")
    if len(times) != x.ndim:
        raise Error(f"Tile of {x.ndim} dimensions by {len(times)} repeats")
    if all(isinstance(n, int) and n == 1 for n in times):
        return x
    shape = tuple(n * size for n, size in zip(times, x.shape, strict=True))
    if 0 in times:
        return b.op(ops.Full, value=False if x.dtype == "bool" else 0, shape=shape, dtype=x.dtype)
    apart = b.reshaped(x, tuple(size for n in x.shape for size in (1, n)))
    wide = tuple(size for pair in zip(times, x.shape, strict=True) for size in pair)
    return b.reshaped(b.op(ops.Expand, apart, shape=wide), shape)


@imports("Shape", attributes="start end")
def shape_of(b: Builder, node: Node) -> Results:
    """Sizes that are known; symbols are computed where they are used as data."""
    shape = node.input(0).shape
    begin, end = node.integer("start", 0), node.integer("end", len(shape))
    begin, end = (n + len(shape) if n < 0 else n for n in (begin, end))
    part = shape[max(begin, 0) : max(end, 0)]
    return ImportedValue("i64", (len(part),), content=sizes(*part))


@imports("Size")
def size_of(b: Builder, node: Node) -> Results:
    """The number of elements."""
    return ImportedValue("i64", (), content=np.array(product(node.input(0).shape), object))


@imports("ConstantOfShape", attributes="value")
def constant_of_shape(b: Builder, node: Node) -> Results:
    """One number, by default the f32 0, in a shape."""
    shape, value = sizes_of(node, 0), node.attributes.get("value")
    array = None if value is None else value.read()
    if array is not None and array.size != 1:
        raise Error(f"the value of this ConstantOfShape is {array.size} numbers, not one")
    number: Any = 0.0 if array is None else numbers(array).item()
    dtype = "f32" if value is None else value.dtype
    return b.op(ops.Full, value=number, shape=shape, dtype=dtype)


@imports("Constant", attributes="value value_float value_int value_floats value_ints")
def constant(b: Builder, node: Node) -> Results:
    """The tensor or the numbers of its attribute."""
    for name, value in node.attributes.items():
        if isinstance(value, Data):
            return ImportedValue(value.dtype, value.shape, data=value)
        dtype = "f32" if "float" in name else "i64"
        array = np.array(value, numpy_dtype(dtype))
        return ImportedValue(dtype, array.shape, content=numbers(array))
    raise Error("this Constant has no value")


@imports("Range", attributes="stash_type", refuses=only("stash_type", 1))
def range_(b: Builder, node: Node) -> Results:
    """start + step * Iota."""
    contents = [c for i in range(3) if (c := content_of(node.input(i))) is not None]
    if len(contents) != 3:
        raise Error("the size of this Range depends on the data")
    ends: list[Any] = [content.item() for content in contents if content.size == 1]
    if len(ends) != 3:
        raise Error("the start, limit and step of this Range are not one number each")
    start, stop, step = ends
    dtype = node.input(0).dtype
    size: DimLike | None = None
    if not isinstance(step, Dim) and step:
        span = stop - start
        is_symbolic = isinstance(span, Dim)
        size = exact_divide(span, step) if is_symbolic else _count(start, stop, step, dtype)
    if size is None:
        raise Error(f"a Range from {start} to {stop} by {step} has no size that irc can write")
    steps = b.op(ops.Iota, size=size, dtype="f32" if dtype in ("f16", "bf16") else dtype)
    steps = steps * step if step != 1 else steps
    steps = steps + start if start != 0 else steps
    return b.cast(steps, dtype)


def _count(start: Any, stop: Any, step: Any, dtype: str) -> int | None:
    """The number of elements from start up to stop, as the dtype holds these numbers.

    None where that is not finite.
    """
    if not is_float(dtype):
        return max(0, -((start - stop) // step))
    first, last, distance = (float(numpy_dtype(dtype).type(n)) for n in (start, stop, step))
    count = (last - first) / distance if distance else math.inf
    return max(0, math.ceil(count)) if math.isfinite(count) else None


def diagonal(
    b: Builder, rows: DimLike, columns: DimLike, k: ImportedValue | DimLike, order: type[Op]
) -> ImportedValue:
    """How the column of each element compares with its row + k: bool [rows, columns]."""
    row = b.op(ops.Unsqueeze, b.op(ops.Iota, size=rows, dtype="i64"), dims=(1,))
    return b.op(order, b.op(ops.Iota, size=columns, dtype="i64"), row if k == 0 else row + k)


@imports("Trilu", attributes="upper")
def trilu(b: Builder, node: Node) -> Results:
    """The elements on one side of a diagonal, 0 on the other."""
    x = node.shaped(0, 2)
    k: ImportedValue | DimLike = 0
    if node.has(1):
        is_known = content_of(node.input(1)) is not None
        k = single(node, 1, "diagonal") if is_known else b.reshaped(node.input(1), ())
    order: type[Op] = ops.Ge if node.integer("upper", 1) else ops.Le
    kept = diagonal(b, x.shape[-2], x.shape[-1], k, order)
    return b.where(kept, x, False if x.dtype == "bool" else 0)


@imports("EyeLike", attributes="dtype k")
def eye_like(b: Builder, node: Node) -> Results:
    """1 on a diagonal, 0 elsewhere, in the shape of x."""
    x = node.shaped(0, 2, 2)
    dtype = DTYPES.get(node.integer("dtype", 0), x.dtype)
    rows, columns = x.shape
    return b.cast(diagonal(b, rows, columns, node.integer("k", 0), ops.Eq), dtype)


@imports("OneHot", attributes="axis")
def one_hot(b: Builder, node: Node) -> Results:
    """A new dimension with `on` at the index of each element and `off` elsewhere."""
    indices, size, values = node.input(0), scalar(node.input(1)), node.input(2)
    axis = node.axis(indices.ndim + 1, -1)
    if values.shape != (2,):
        raise Error("the values of this OneHot are not two")
    if not isinstance(size, (int, float)):
        raise Error("the depth of this OneHot is not a known number")
    if indices.dtype not in ("i32", "i64"):
        indices = b.cast(indices, "i64")
    # numbers from the end count from size
    indices = b.where(indices < 0, indices + int(size), indices)
    hit = b.op(ops.OneHot, indices, size=int(size), dtype="bool")
    hit = b.transposed(hit, [*range(axis), indices.ndim, *range(axis, indices.ndim)])
    content = content_of(values)
    if content is not None and content.tolist() == [0, 1]:
        return b.cast(hit, values.dtype)
    off, on = b.results(ops.Split, values, dim=0, sizes=(1, 1))
    return b.where(hit, on, off)


@imports(*_REDUCE, "ReduceLogSumExp", attributes="axes keepdims noop_with_empty_axes")
def reduction(b: Builder, node: Node) -> Results:
    """Sums, products, means or ends over axes; over all of them where none is named."""
    x, keep = node.input(0), bool(node.integer("keepdims", 1))
    dims = axes_of(node, x.ndim)
    if not dims and not node.integer("noop_with_empty_axes", 0):
        dims = list(range(x.ndim))
    places = tuple(written_axes(node) or dims or ())  # counted from either end, as the file has it

    def reduced(cls: type[Op], x: ImportedValue) -> ImportedValue:
        return b.op(cls, x, dims=places, keep=keep) if places else x

    match node.kind:
        case "ReduceLogSumExp":
            return _log_sum_exp(b, x, places, keep) if places else x
        case "ReduceMax" | "ReduceMin" if x.dtype == "bool":
            return reduced(_REDUCE[node.kind], b.cast(x, "i32")) > 0  # of nothing: an end of i32
        case "ReduceMean" if not is_float(x.dtype):
            raise Error(f"ReduceMean of {x.dtype} has no operation in irc; cast to f32")
        case _:
            return reduced(_REDUCE[node.kind], x)


def _log_sum_exp(b: Builder, x: ImportedValue, dims: tuple[int, ...], keep: bool) -> ImportedValue:
    """The largest number is taken off first, so that nothing overflows."""
    if not is_float(x.dtype):
        raise Error(f"ReduceLogSumExp of {x.dtype} has no operation in irc; cast to f32")
    top = b.op(ops.ReduceMax, x, dims=dims, keep=True)
    top = b.where(b.op(ops.Eq, abs(top), math.inf), 0, top)
    total = b.op(ops.ReduceSum, b.op(ops.Exp, x - top), dims=dims, keep=keep)
    return b.op(ops.Log, total) + b.reshaped(top, total.shape)


@imports("LpNormalization", attributes="axis p")
def lp_normalization(b: Builder, node: Node) -> Results:
    """x over its norm along an axis; 0 where that is 0."""
    x, p = node.shaped(0, 1), node.integer("p", 2)
    if p not in (1, 2):
        raise Error(f"LpNormalization has p={p}; expected 1 or 2")
    powers = abs(x) if p == 1 else x * x
    norm = b.op(ops.ReduceSum, powers, dims=(node.axis(x.ndim, -1),), keep=True)
    norm = norm if p == 1 else b.op(ops.Sqrt, norm)
    return b.where(b.op(ops.Eq, norm, 0), 0, x / norm)


@imports("GlobalAveragePool", "GlobalMaxPool")
def global_pool(b: Builder, node: Node) -> Results:
    """The mean or the largest element of all positions."""
    x = node.shaped(0, 2)
    cls = ops.ReduceMean if node.kind == "GlobalAveragePool" else ops.ReduceMax
    dims = tuple(range(2, x.ndim))
    return b.op(cls, x, dims=dims, keep=True) if dims else x


@imports("ArgMax", "ArgMin", attributes="axis keepdims select_last_index")
def argmax(b: Builder, node: Node) -> Results:
    """The index i64 of the first or the last of the largest or smallest numbers."""
    x = node.input(0)
    x = x if node.kind == "ArgMax" else _reversed_order(b, x)
    words = PARTIAL[ops.Argmax].to_irc(node.attributes)
    axis = node.axis(x.ndim, 0)
    if not node.integer("select_last_index", 0):
        return b.cast(b.op(ops.Argmax, x, **words), "i64")
    place = b.cast(b.op(ops.Argmax, b.op(ops.Flip, x, dims=(axis,)), **words), "i64")
    return b.number(x.shape[axis] - 1, "i64") - place


def _reversed_order(b: Builder, x: ImportedValue) -> ImportedValue:
    """Numbers in the opposite order; reversed once more they are what they were."""
    kind = dtype_called(x.dtype)
    if kind.is_float:
        return -x
    last = (1 << kind.bits) - 1 if kind.kind == "uint" else -1  # none overflows
    return b.number(last, x.dtype) - x


@imports("Hardmax", attributes="axis")
def hardmax(b: Builder, node: Node) -> Results:
    """1 at the first of the largest elements along an axis, 0 elsewhere."""
    x = node.shaped(0, 1)
    axis = node.axis(x.ndim, -1)
    place = b.op(ops.Argmax, x, dim=axis, keep=True)
    counts = b.op(ops.Iota, size=x.shape[axis], dtype=place.dtype)
    counts = b.reshaped(counts, (x.shape[axis], *(1,) * (x.ndim - axis - 1)))
    return b.cast(b.op(ops.Eq, place, counts), x.dtype)


@imports("TopK", attributes="axis largest sorted")
def topk(b: Builder, node: Node) -> Results:
    """The k largest or smallest numbers, and their indices i64."""
    x, smallest = node.input(0), not node.integer("largest", 1)
    x = _reversed_order(b, x) if smallest else x
    words = PARTIAL[ops.Topk].to_irc(node.attributes)
    values, places = b.results(ops.Topk, x, k=single(node, 1, "k"), **words)
    return [_reversed_order(b, values) if smallest else values, b.cast(places, "i64")]


@imports("CumSum", "CumProd", attributes="exclusive reverse")
def running(b: Builder, node: Node) -> Results:
    """Sums or products of all elements up to each place."""
    x, along = node.shaped(0, 1), _sums if node.kind == "CumSum" else _products
    axis = scalar(node.input(1))
    if axis is not None:
        if not -x.ndim <= int(axis) < x.ndim:
            raise Error(f"{node.kind} along axis {axis} of {x.ndim} dimensions")
        return along(b, node, x, int(axis) % x.ndim)
    # an axis that the data name: the sums along all of them, of which that one is taken
    named = b.reshaped(node.input(1), ()) % x.ndim
    result = along(b, node, x, 0)
    for i in range(1, x.ndim):
        result = b.where(b.op(ops.Eq, named, i), along(b, node, x, i), result)
    return result


def _sums(b: Builder, node: Node, x: ImportedValue, axis: int) -> ImportedValue:
    backwards = bool(node.integer("reverse", 0))
    x = b.op(ops.Flip, x, dims=(axis,)) if backwards else x
    x = b.op(ops.Cumsum, x, dim=axis, **PARTIAL[ops.Cumsum].to_irc(node.attributes))
    return b.op(ops.Flip, x, dims=(axis,)) if backwards else x


def _products(b: Builder, node: Node, x: ImportedValue, axis: int) -> ImportedValue:
    """The product over a new dimension, of x where a place counts, else of 1."""
    orders: list[type[Op]] = [ops.Le, ops.Lt, ops.Ge, ops.Gt]
    order = orders[2 * bool(node.integer("reverse", 0)) + bool(node.integer("exclusive", 0))]
    size = x.shape[axis]
    counts = diagonal(b, size, size, 0, order)
    counts = b.reshaped(counts, (size, size, *(1,) * (x.ndim - axis - 1)))
    factors = b.where(counts, b.op(ops.Unsqueeze, x, dims=(axis,)), 1)
    return b.op(ops.ReduceProd, factors, dims=(axis + 1,))
