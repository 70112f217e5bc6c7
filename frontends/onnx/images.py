"""Convolutions, average pooling and resizing of images [B, C, positions...]."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from irc import ops
from irc.errors import Error
from irc.frontends.onnx.builder import Builder
from irc.frontends.onnx.entry import Entry, Node
from irc.frontends.onnx.fold import content_of
from irc.frontends.onnx.reshaping import sizes_of
from irc.frontends.onnx.rules import Made, only, reads
from irc.ir.core import Value
from irc.ir.dims import Dim, DimLike, product


class _Windows(NamedTuple):
    """How a weight or window moves: a number per dimension of positions."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]


def _windows(node: Node, sizes: Sequence[DimLike]) -> _Windows:
    """The attributes of a node whose windows have these sizes."""
    count = len(sizes)
    known = tuple(size for size in sizes if isinstance(size, int))
    pads = node.ints("pads") or [0] * (2 * count)
    strides, dilations = (tuple(node.ints(n) or [1] * count) for n in ("strides", "dilations"))
    written = node.ints("kernel_shape")
    lengths = {len(known), len(strides), len(dilations), len(pads) // 2, count}
    if len(lengths) > 1 or (written is not None and tuple(written) != known):
        raise Error(f"{node.kind} needs {count} known sizes, strides, dilations and pairs of pads")
    if min((*known, *strides, *dilations), default=1) < 1:
        raise Error(f"{node.kind} has a size, stride or dilation below 1")
    if min(pads, default=0) < 0 and node.kind != "ConvTranspose":
        raise Error(f"{node.kind} has negative pads")
    return _Windows(known, strides, dilations, tuple(pads[:count]), tuple(pads[count:]))


_MOVES = "auto_pad dilations kernel_shape pads strides"
_no_same = only("auto_pad", "NOTSET", "VALID")  # padding that depends on the size of x is refused


@reads("Conv", known=f"{_MOVES} group", refuses=_no_same)
def conv(b: Builder, node: Node) -> Made:
    weight = node.shaped(1, 3)
    windows = _windows(node, weight.shape[2:])
    bias = node.optional(2)
    return _conv(b, node.shaped(0, 3), weight, bias, windows, node.integer("group", 1))


def _conv(
    b: Builder, x: Entry, weight: Entry, bias: Entry | None, moves: _Windows, groups: int = 1
) -> Entry:
    return b.entry(
        b.value(
            ops.Conv(
                b.get(x),
                b.get(weight),
                bias=None if bias is None else b.get(bias),
                strides=moves.strides,
                before=moves.before,
                after=moves.after,
                dilations=moves.dilations,
                groups=groups,
            )
        )
    )


@reads("ConvTranspose", known=f"{_MOVES} group output_padding output_shape", refuses=_no_same)
def conv_transpose(b: Builder, node: Node) -> Made:
    """The gradient of Conv: x with zeros between its elements, by the weight turned around."""
    x, weight, groups = node.shaped(0, 3), node.shaped(1, 3), node.integer("group", 1)
    moves, count = _windows(node, weight.shape[2:]), weight.ndim - 2
    more = node.ints("output_padding") or [0] * count
    channels, out = weight.shape[:2]
    if isinstance(channels, Dim) or isinstance(out, Dim) or channels % groups or len(more) != count:
        raise Error("ConvTranspose needs channels that its groups divide, and known sizes")
    reach = [(size - 1) * gap for size, gap in zip(moves.sizes, moves.dilations, strict=True)]
    before, after = list(moves.before), list(moves.after)
    wanted = node.ints("output_shape")
    for i, size in enumerate(wanted[-count:] if wanted else ()):
        # the padding that gives this size, half of it behind; what is missing is added behind
        old: Any = x.shape[2 + i]
        total = moves.strides[i] * (old - 1) + more[i] + reach[i] + 1 - size
        if isinstance(total, Dim):
            raise Error("the output_shape of this ConvTranspose needs a known size of x")
        after[i] = total // 2 if total > 0 else total
        before[i] = total - after[i]
    value = b.get(x)
    for i, step in enumerate(moves.strides):
        value = _spread(b, value, 2 + i, step)
    ends = [(r - p, r - q + m) for r, p, q, m in zip(reach, before, after, more, strict=True)]
    value = _padded(b, value, [(0, 0), (0, 0), *ends])
    kernel = _turned(b, b.get(weight), channels, out, groups, moves.sizes)
    still = _Windows(moves.sizes, (1,) * count, moves.dilations, (0,) * count, (0,) * count)
    return _conv(b, b.entry(value), b.entry(kernel), node.optional(2), still, groups)


def _turned(
    b: Builder, weight: Value, channels: int, out: int, groups: int, sizes: Sequence[int]
) -> Value:
    """A weight [C, O/groups, ...] as [O, C/groups, ...], its positions in reverse order."""
    apart = b.reshaped(weight, (groups, channels // groups, out, *sizes))
    order = (0, 2, 1, *range(3, 3 + len(sizes)))
    joined = b.reshaped(b.transposed(apart, order), (groups * out, channels // groups, *sizes))
    return b.value(ops.Flip(joined, dims=tuple(range(2, joined.type.ndim))))


def _spread(b: Builder, x: Value, dim: int, step: int) -> Value:
    """x with step - 1 zeros between two elements of a dimension."""
    if step == 1:
        return x
    shape = x.type.shape
    apart = b.value(ops.Unsqueeze(x, dims=(dim + 1,)))
    ends = [(0, step - 1 if i == dim + 1 else 0) for i in range(apart.type.ndim)]
    wide = b.reshaped(_padded(b, apart, ends), (*shape[:dim], shape[dim] * step, *shape[dim + 1 :]))
    stop = (shape[dim] - 1) * step + 1
    return b.value(ops.Slice(wide, dim=dim, start=0, stop=stop, step=1))


def _padded(b: Builder, x: Value, ends: Sequence[tuple[int, int]], fill: float = 0.0) -> Value:
    """x with so many elements before and after each dimension; negative numbers remove some."""
    for dim, (first, last) in enumerate(ends):
        if min(first, last) < 0:
            size = x.type.shape[dim]
            start, stop = max(0, -first), size + min(0, last)
            x = b.value(ops.Slice(x, dim=dim, start=start, stop=stop, step=1))
    before, after = (tuple(max(0, pair[i]) for pair in ends) for i in (0, 1))
    if not any((*before, *after)):
        return x
    return b.value(ops.Pad(x, before=before, after=after, value=fill))


@reads("AveragePool", known=f"{_MOVES} ceil_mode count_include_pad", refuses=_no_same)
def average_pool(b: Builder, node: Node) -> Made:
    """Sums of windows, as a convolution by ones, over the number of elements that count."""
    x = node.shaped(0, 3)
    outer, positions = x.shape[:2], x.shape[2:]
    moves = _windows(node, node.ints("kernel_shape") or ())
    count = len(positions)
    if len(moves.sizes) != count:
        raise Error(f"AveragePool of {count} dimensions by windows of {list(moves.sizes)}")
    extra = [0] * count
    if node.integer("ceil_mode", 0):
        extra = [_missing(size, *each) for size, *each in zip(positions, *moves, strict=True)]
    after = tuple(n + more for n, more in zip(moves.after, extra, strict=True))
    ones = b.entry(b.value(ops.Full(value=1.0, shape=(1, 1, *moves.sizes), dtype=x.dtype)))
    alone = b.entry(b.reshaped(b.get(x), (product(outer), 1, *positions)))
    total = _conv(b, alone, ones, None, moves._replace(after=after))
    included = bool(node.integer("count_include_pad", 0))
    if not any(extra) and (included or not any((*moves.before, *moves.after))):
        mean = b.op(ops.Div, total, float(math.prod(moves.sizes)))
    else:
        counted = b.value(ops.Full(value=1.0, shape=(1, 1, *positions), dtype=x.dtype))
        ends = [(0, 0), (0, 0), *zip(moves.before, moves.after, strict=True)]
        counted = b.entry(_padded(b, counted, ends, float(included)))
        rest = moves._replace(before=(0,) * count, after=tuple(extra))
        mean = b.op(ops.Div, total, _conv(b, counted, ones, None, rest))
    return b.reshaped(b.get(mean), (*outer, *mean.shape[2:]))


def _missing(size: DimLike, window: int, stride: int, gap: int, before: int, after: int) -> int:
    """How many elements the last window lacks where sizes are rounded up; the window begins within
    the image or its first padding."""
    if isinstance(size, Dim):
        raise Error("AveragePool with ceil_mode needs known sizes")
    reach = (window - 1) * gap + 1
    steps = -(-(size + before + after - reach) // stride)
    if steps * stride >= size + before:
        steps -= 1
    return max(0, steps * stride + reach - size - before - after)


_RESIZE = """antialias axes coordinate_transformation_mode cubic_coeff_a exclude_outside
extrapolation_value keep_aspect_ratio_policy mode nearest_mode"""
_COORDINATES = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric")
_ROUNDED = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")


def _resize_refusal(node: Node) -> str | None:
    for name, allowed in {
        "antialias": (0,),
        "coordinate_transformation_mode": _COORDINATES,
        "exclude_outside": (0,),
        "keep_aspect_ratio_policy": ("stretch",),
        "mode": ("nearest", "linear", "cubic"),
        "nearest_mode": _ROUNDED,
    }.items():
        reason = only(name, *allowed)(node)
        if reason is not None:
            return reason
    return None


@reads("Resize", known=_RESIZE, refuses=_resize_refusal)
def resize(b: Builder, node: Node) -> Made:
    """One dimension after the other, by places in x that are exact fractions."""
    x = node.input(0)
    axes = [axis % x.ndim for axis in node.ints("axes") or range(x.ndim)]
    scales = content_of(node.optional(2)) if node.has(2) else None
    if scales is not None and scales.size:
        factors = [Fraction(float(n)).limit_denominator(1 << 20) for n in scales.flat]
        sizes = [_scaled(x.shape[a], n) for a, n in zip(axes, factors, strict=True)]
    elif node.has(3):
        sizes, factors = list(sizes_of(node, 3, "sizes")), [None] * len(axes)
    else:
        raise Error("the scales of this Resize depend on the data")
    for axis, size, factor in zip(axes, sizes, factors, strict=True):
        if size != x.shape[axis] or (factor or 1) != 1:
            x = _resized(b, node, x, axis, size, factor)
    return x


def _scaled(size: DimLike, factor: Fraction) -> DimLike:
    if isinstance(size, int):
        return math.floor(size * factor)
    if factor.denominator == 1:
        return size * factor.numerator
    raise Error(f"Resize of {size} elements by {float(factor)}, which is no whole number")


def _resized(
    b: Builder, node: Node, x: Entry, axis: int, new: DimLike, factor: Fraction | None
) -> Entry:
    """One dimension of `new` elements, which are `1 / factor` apart in x."""
    old = x.shape[axis]
    top, bottom = _places(b, node, old, new, factor)
    mode = node.text("mode", "nearest")
    if mode == "nearest":
        return _taken(b, x, axis, _rounded(b, node, top, bottom))
    first = b.op(ops.FloorDiv, top, bottom)
    rest = b.op(ops.Div, *(b.cast(each, "f32") for each in (b.op(ops.Mod, top, bottom), bottom)))
    total: Entry | None = None
    cubic = mode == "cubic"
    for shift in range(-1, 3) if cubic else range(2):
        distance = b.op(ops.Abs, b.op(ops.Sub, rest, shift))
        weight = _cubic(b, node, distance, shift) if cubic else _linear(b, distance)
        column = b.reshaped(b.get(b.cast(weight, x.dtype)), (new, *(1,) * (x.ndim - axis - 1)))
        each = b.op(ops.Mul, _taken(b, x, axis, b.op(ops.Add, first, shift)), column)
        total = each if total is None else b.op(ops.Add, total, each)
    assert total is not None
    return total


def _places(
    b: Builder, node: Node, old: DimLike, new: DimLike, factor: Fraction | None
) -> tuple[Entry, Entry]:
    """The places of the new elements in x, as i64[new] over a scalar."""
    mode = node.text("coordinate_transformation_mode", "half_pixel")
    if mode == "align_corners":
        up, down = _between_corners(old, new, factor)
    elif mode == "pytorch_half_pixel" and new == 1:
        up, down, mode = 0, 1, "asymmetric"
    else:
        up, down = (old, new) if factor is None else (factor.denominator, factor.numerator)
    number = b.entry(b.value(ops.Iota(size=new, dtype="i64")))
    if "half_pixel" in mode:  # (2 * i + 1) * up / (2 * down) - 1 / 2
        odd = b.op(ops.Add, b.op(ops.Mul, number, 2), 1)
        top = b.op(ops.Sub, b.op(ops.Mul, odd, b.number(up, "i64")), b.number(down, "i64"))
        return top, b.entry(b.number(2 * down, "i64"))
    return b.op(ops.Mul, number, b.number(up, "i64")), b.entry(b.number(down, "i64"))


def _between_corners(
    old: DimLike, new: DimLike, factor: Fraction | None
) -> tuple[DimLike, DimLike]:
    """The distance of two new elements in x, where the first and the last are those of x."""
    if factor is None or isinstance(old, Dim):
        return (0, 1) if new == 1 else (old - 1, new - 1)
    last = old * factor - 1
    return ((old - 1) * last.denominator, last.numerator) if last > 0 else (0, 1)


def _rounded(b: Builder, node: Node, top: Entry, bottom: Entry) -> Entry:
    """Fractions as whole numbers."""
    how = node.text("nearest_mode", "round_prefer_floor")
    if how.startswith("round"):
        top = b.op(ops.Mul, top, 2)
        top = b.op(ops.Sub if how.endswith("floor") else ops.Add, top, bottom)
        bottom = b.op(ops.Mul, bottom, 2)
    if how in ("floor", "round_prefer_ceil"):
        return b.op(ops.FloorDiv, top, bottom)
    return b.op(ops.Neg, b.op(ops.FloorDiv, b.op(ops.Neg, top), bottom))


def _taken(b: Builder, x: Entry, axis: int, places: Entry) -> Entry:
    """Elements of a dimension; those before and behind are its ends."""
    last = b.number(x.shape[axis] - 1, "i64")
    inside = b.op(ops.Minimum, b.op(ops.Maximum, places, 0), last)
    return b.op(ops.Gather, x, inside, dim=axis)


def _linear(b: Builder, distance: Entry) -> Entry:
    """The weight of an element by its distance."""
    return b.op(ops.Add, b.op(ops.Neg, distance), 1.0)


def _cubic(b: Builder, node: Node, distance: Entry, shift: int) -> Entry:
    """The weight of an element by its distance: a polynomial below 1, and one from 1 to 2."""
    a = node.real("cubic_coeff_a", -0.75)
    near = (a + 2, -(a + 3), 0.0, 1.0)
    far = (a, -5 * a, 8 * a, -4 * a)
    first, *rest = near if shift in (0, 1) else far
    total = b.op(ops.Mul, distance, first)
    for factor in rest[:-1]:
        total = b.op(ops.Mul, b.op(ops.Add, total, factor), distance)
    return b.op(ops.Add, total, rest[-1])
