"""Convolutions and resizing of images [B, C, positions...]."""

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
from irc.frontends.onnx.reshaping import from_the_front, sizes_of
from irc.frontends.onnx.rules import Made, only, reads
from irc.ir.core import Value
from irc.ir.dims import Dim, DimLike, exact_divide

MOVES = "auto_pad dilations kernel_shape pads strides"
known_padding = only("auto_pad", "NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER")


class Windows(NamedTuple):
    """How a weight or window moves: a number per dimension of positions."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]


def windows_of(node: Node, sizes: Sequence[DimLike], positions: Sequence[DimLike]) -> Windows:
    """The attributes of a node whose windows have these sizes, and move over these positions."""
    count = len(sizes)
    known = tuple(size for size in sizes if isinstance(size, int))
    pads = node.ints("pads") or [0] * (2 * count)
    strides, dilations = (tuple(node.ints(n) or [1] * count) for n in ("strides", "dilations"))
    written = node.ints("kernel_shape")
    lengths = {len(known), len(strides), len(dilations), len(pads) // 2, len(positions)}
    if lengths != {count} or (written is not None and tuple(written) != known):
        raise Error(f"{node.kind} needs {count} known sizes, strides, dilations and pairs of pads")
    if min((*known, *strides, *dilations), default=1) < 1:
        raise Error(f"{node.kind} has a size, stride or dilation below 1")
    if min(pads, default=0) < 0 and node.kind != "ConvTranspose":
        raise Error(f"{node.kind} has negative pads")
    before, after = pads[:count], pads[count:]
    way = node.text("auto_pad", "NOTSET")
    if way != "NOTSET":
        before, after = [0] * count, [0] * count
    if way.startswith("SAME"):  # one window for every stride
        if max(dilations) > 1:  # by which ONNX Runtime does not pad more
            raise Error(f"{node.kind} has auto_pad={way} and dilations; expected pads")
        for i, (n, stride) in enumerate(zip(positions, strides, strict=True)):
            total = max(0, remainder(-n, stride) - stride + known[i])
            before[i] = total // 2 if way == "SAME_UPPER" else total - total // 2
            after[i] = total - before[i]
    return Windows(known, strides, dilations, tuple(before), tuple(after))


def remainder(size: DimLike, by: int) -> int:
    """size modulo `by`, known where all terms with symbols are multiples."""
    rest = size if isinstance(size, int) else dict(size.terms).get((), 0)
    if exact_divide(size - rest, by) is None:
        raise Error(f"{size} elements cannot be shown to be a multiple of the stride {by}")
    return rest % by


@reads("Conv", known=f"{MOVES} group", refuses=known_padding)
def conv(b: Builder, node: Node) -> Made:
    x, weight = node.shaped(0, 3), node.shaped(1, 3)
    windows = windows_of(node, weight.shape[2:], x.shape[2:])
    return convolved(b, x, weight, node.optional(2), windows, node.integer("group", 1))


def convolved(
    b: Builder, x: Entry, weight: Entry, bias: Entry | None, moves: Windows, groups: int = 1
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


_TRANSPOSED = f"{MOVES} group output_padding output_shape"


@reads("ConvTranspose", known=_TRANSPOSED, refuses=known_padding)
def conv_transpose(b: Builder, node: Node) -> Made:
    """The gradient of Conv: x with zeros between its elements, by the weight turned around."""
    x, weight, groups = node.shaped(0, 3), node.shaped(1, 3), node.integer("group", 1)
    moves, count = windows_of(node, weight.shape[2:], x.shape[2:]), weight.ndim - 2
    more = node.ints("output_padding") or [0] * count
    channels, out = weight.shape[:2]
    if isinstance(channels, Dim) or isinstance(out, Dim) or channels % groups or len(more) != count:
        raise Error("ConvTranspose needs channels that its groups divide, and known sizes")
    reach = [(size - 1) * gap for size, gap in zip(moves.sizes, moves.dilations, strict=True)]
    before, after = list(moves.before), list(moves.after)
    way, wanted = node.text("auto_pad", "NOTSET"), node.ints("output_shape")
    sizes: Sequence[DimLike] = wanted[-count:] if wanted else ()
    if not wanted and way.startswith("SAME"):
        sizes = [n * step for n, step in zip(x.shape[2:], moves.strides, strict=True)]
        if any(step > n + m for step, n, m in zip(moves.strides, moves.sizes, more, strict=True)):
            raise Error(f"ConvTranspose has auto_pad={way} and strides beyond its weight")
    for i, size in enumerate(sizes):
        # the padding that gives this size, half of it behind; what is missing is added behind
        old: Any = x.shape[2 + i]
        total: Any = moves.strides[i] * (old - 1) + more[i] + reach[i] + 1 - size
        if isinstance(total, Dim):
            raise Error("the output_shape of this ConvTranspose needs a known size of x")
        after[i] = total // 2 if way != "SAME_UPPER" else total - total // 2
        after[i] = after[i] if total > 0 else total
        before[i] = total - after[i]
    value = b.get(x)
    for i, step in enumerate(moves.strides):
        value = _spread(b, value, 2 + i, step)
    ends = [(r - p, r - q + m) for r, p, q, m in zip(reach, before, after, more, strict=True)]
    value = padded(b, value, [(0, 0), (0, 0), *ends])
    kernel = _turned(b, b.get(weight), channels, out, groups, moves.sizes)
    still = Windows(moves.sizes, (1,) * count, moves.dilations, (0,) * count, (0,) * count)
    return convolved(b, b.entry(value), b.entry(kernel), node.optional(2), still, groups)


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
    wide = b.reshaped(padded(b, apart, ends), (*shape[:dim], shape[dim] * step, *shape[dim + 1 :]))
    stop = (shape[dim] - 1) * step + 1
    return b.value(ops.Slice(wide, dim=dim, start=0, stop=stop, step=1))


def padded(b: Builder, x: Value, ends: Sequence[tuple[int, int]], fill: float = 0.0) -> Value:
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


_RESIZE = """antialias axes coordinate_transformation_mode cubic_coeff_a exclude_outside
extrapolation_value keep_aspect_ratio_policy mode nearest_mode"""
_COORDINATES = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric")
_ROUNDED = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")


def _resize_refusal(node: Node) -> str | None:
    mode, excludes = node.text("mode", "nearest"), node.integer("exclude_outside", 0)
    for name, allowed in {
        "antialias": (0, 1) if mode != "nearest" and excludes else (0,),  # as PyTorch exports it
        "coordinate_transformation_mode": _COORDINATES,
        "exclude_outside": (0, 1) if mode == "cubic" or node.integer("antialias", 0) else (0,),
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
    x = node.shaped(0, 1)
    axes = from_the_front(node, node.ints("axes") or range(x.ndim), x.ndim)
    scales = content_of(node.optional(2)) if node.has(2) else None
    if scales is not None and scales.size:
        if not all(2.0**-20 <= n < math.inf for n in scales.flat):
            raise Error(f"Resize has the scales {scales.tolist()}; expected positive numbers")
        factors = [Fraction(float(n)).limit_denominator(1 << 20) for n in scales.flat]
        sizes = [_scaled(x.shape[a], n) for a, n in zip(axes, factors, strict=False)]
    elif node.has(3):
        sizes, factors = list(sizes_of(node, 3, "sizes")), [None] * len(axes)
    else:
        raise Error("the scales of this Resize depend on the data")
    if not len(axes) == len(sizes) == len(factors):
        raise Error(f"Resize has {len(factors)} scales or {len(sizes)} sizes of {len(axes)} axes")
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
    if node.integer("antialias", 0) or (mode == "cubic" and node.integer("exclude_outside", 0)):
        place = b.op(ops.Div, b.cast(top, "f32"), b.cast(bottom, "f32"))
        return _weighted(b, node, x, axis, place, factor)
    first = b.op(ops.FloorDiv, top, bottom)
    rest = b.op(ops.Div, b.cast(b.op(ops.Mod, top, bottom), "f32"), b.cast(bottom, "f32"))
    total: Entry | None = None
    wide = mode == "cubic"
    for shift in range(-1, 3) if wide else range(2):
        distance = b.op(ops.Abs, b.op(ops.Sub, rest, shift))
        weight = cubic(b, node, distance, shift) if wide else linear(b, distance)
        column = b.reshaped(b.get(b.cast(weight, x.dtype)), (new, *(1,) * (x.ndim - axis - 1)))
        term = b.op(ops.Mul, _taken(b, x, axis, b.op(ops.Add, first, shift)), column)
        total = term if total is None else b.op(ops.Add, total, term)
    assert total is not None
    return total


def _weighted(
    b: Builder, node: Node, x: Entry, axis: int, place: Entry, factor: Fraction | None
) -> Entry:
    """The product with a matrix [old, new] of weights whose columns add up to 1.

    Where a dimension shrinks, the weights of antialias are as many times wider.
    """
    old, new = x.shape[axis], place.shape[0]
    elements = b.op(ops.Unsqueeze, b.value(ops.Iota(size=old, dtype="f32")), dims=(1,))
    distance = b.op(ops.Abs, b.op(ops.Sub, elements, place))
    if node.integer("antialias", 0):
        sizes = (b.number(size, "f32") for size in (new, old))
        ratio = b.op(ops.Div, *sizes) if factor is None else float(factor)
        distance = b.op(ops.Mul, distance, b.op(ops.Minimum, b.number(1, "f32"), ratio))
    if node.text("mode", "") == "cubic":
        far = b.where(b.op(ops.Lt, distance, 2), cubic(b, node, distance, -1), 0)
        weight = b.where(b.op(ops.Lt, distance, 1), cubic(b, node, distance, 0), far)
    else:
        weight = b.op(ops.Relu, linear(b, distance))
    weight = b.op(ops.Div, weight, b.op(ops.ReduceSum, weight, dims=(0,), keep=True))
    order = [i for i in range(x.ndim) if i != axis] + [axis]
    resized = b.op(ops.Matmul, b.transposed(b.get(x), order), b.cast(weight, x.dtype))
    return b.entry(b.transposed(b.get(resized), [order.index(i) for i in range(x.ndim)]))


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


def linear(b: Builder, distance: Entry) -> Entry:
    """The weight of an element by its distance."""
    return b.op(ops.Add, b.op(ops.Neg, distance), 1.0)


def cubic(b: Builder, node: Node, distance: Entry, shift: int) -> Entry:
    """The weight of an element by its distance: a polynomial below 1, and one from 1 to 2."""
    a = node.real("cubic_coeff_a", -0.75)
    near = (a + 2, -(a + 3), 0.0, 1.0)
    far = (a, -5 * a, 8 * a, -4 * a)
    first, *rest = near if shift in (0, 1) else far
    total = b.op(ops.Mul, distance, first)
    for factor in rest[:-1]:
        total = b.op(ops.Mul, b.op(ops.Add, total, factor), distance)
    return b.op(ops.Add, total, rest[-1])
