"""Images [B, C, positions...]: convolutions, pools, resizing, and elements at computed places."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import reduce
from itertools import product as combinations
from operator import add
from typing import Any, NamedTuple

from irc import ops
from irc.errors import Error
from irc.frontends.onnx.builder import Builder, ImportedValue, Node
from irc.frontends.onnx.elementwise import polynomial
from irc.frontends.onnx.fold import below, content_of
from irc.frontends.onnx.rules import Results, imports, only
from irc.frontends.onnx.shapes import from_the_front, padded, sizes_of
from irc.ir.dims import Dim, DimLike, exact_divide, product
from irc.ir.dtypes import integer_range, is_float

_MOVES = "auto_pad dilations kernel_shape pads strides"
_known_padding = only("auto_pad", "NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER")


class _Windows(NamedTuple):
    """How a weight or window moves: a number per dimension of positions."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]

    def extended(self, extra: Sequence[int]) -> _Windows:
        """The windows with more padding behind."""
        after = zip(self.after, extra, strict=True)
        return self._replace(after=tuple(last + more for last, more in after))


def _windows_of(node: Node, sizes: Sequence[DimLike], positions: Sequence[DimLike]) -> _Windows:
    """The attributes of a node whose windows have these sizes, and move over these positions."""
    count = len(sizes)
    whole = tuple(size for size in sizes if isinstance(size, int))
    pads = node.ints("pads") or [0] * (2 * count)
    strides, dilations = (tuple(node.ints(n) or [1] * count) for n in ("strides", "dilations"))
    written = node.ints("kernel_shape")
    lengths = {len(whole), len(strides), len(dilations), len(pads) // 2, len(positions)}
    if lengths != {count} or tuple(written or whole) != whole:
        raise Error(f"{node.kind} needs {count} known sizes, strides, dilations and pairs of pads")
    if min((*whole, *strides, *dilations), default=1) < 1:
        raise Error(f"{node.kind} has a size, stride or dilation below 1")
    if min(pads, default=0) < 0 and node.kind != "ConvTranspose":
        raise Error(f"{node.kind} has negative pads")
    way = node.text("auto_pad", "NOTSET")
    before, after = (pads[:count], pads[count:]) if way == "NOTSET" else ([0] * count, [0] * count)
    if way.startswith("SAME"):  # one window for every stride
        if max(dilations) > 1:  # by which ONNX Runtime does not pad more
            raise Error(f"{node.kind} has auto_pad={way} and dilations; expected pads")
        for i, (n, stride) in enumerate(zip(positions, strides, strict=True)):
            total = max(0, _remainder(-n, stride) - stride + whole[i])
            before[i] = total // 2 if way == "SAME_UPPER" else total - total // 2
            after[i] = total - before[i]
    return _Windows(whole, strides, dilations, tuple(before), tuple(after))


def _remainder(size: DimLike, by: int) -> int:
    """size modulo `by`, known where all terms with symbols are multiples."""
    rest = size if isinstance(size, int) else dict(size.terms).get((), 0)
    if exact_divide(size - rest, by) is None:
        raise Error(f"{size} elements cannot be shown to be a multiple of the stride {by}")
    return rest % by


@imports("Conv", attributes=f"{_MOVES} group", refuses=_known_padding)
def conv(b: Builder, node: Node) -> Results:
    """A convolution of groups of channels."""
    x, weight = node.shaped(0, 3), node.shaped(1, 3)
    windows = _windows_of(node, weight.shape[2:], x.shape[2:])
    return _convolved(b, x, weight, windows, node)


def _convolved(
    b: Builder, x: ImportedValue, weight: ImportedValue, windows: _Windows, node: Node | None = None
) -> ImportedValue:
    """A convolution, with the bias and the groups of a node."""
    _, strides, dilations, before, after = windows
    words = {"strides": strides, "before": before, "after": after, "dilations": dilations}
    bias, groups = (node.optional(2), node.integer("group", 1)) if node is not None else (None, 1)
    return b.op(ops.Conv, x, weight, bias=bias, groups=groups, **words)


_TRANSPOSED = f"{_MOVES} group output_padding output_shape"


@imports("ConvTranspose", attributes=_TRANSPOSED, refuses=_known_padding)
def conv_transpose(b: Builder, node: Node) -> Results:
    """The gradient of Conv: x with zeros between its elements, by the weight turned around."""
    x, weight, groups = node.shaped(0, 3), node.shaped(1, 3), node.integer("group", 1)
    windows, count = _windows_of(node, weight.shape[2:], x.shape[2:]), weight.ndim - 2
    more = node.ints("output_padding") or [0] * count
    channels, out = weight.shape[:2]
    is_known = not isinstance(channels, Dim) and not isinstance(out, Dim)
    if not is_known or groups < 1 or channels % groups or len(more) != count:
        raise Error("ConvTranspose needs channels that its groups divide, and known sizes")
    reach = [(size - 1) * gap for size, gap in zip(windows[0], windows.dilations, strict=True)]
    before, after = list(windows.before), list(windows.after)
    way, wanted = node.text("auto_pad", "NOTSET"), node.ints("output_shape")
    sizes: Sequence[DimLike] = wanted[-count:] if wanted else ()
    if not wanted and way.startswith("SAME"):
        sizes = [n * step for n, step in zip(x.shape[2:], windows.strides, strict=True)]
        steps = zip(windows.strides, windows.sizes, more, strict=True)
        if any(step > size + extra for step, size, extra in steps):
            raise Error(f"ConvTranspose has auto_pad={way} and strides beyond its weight")
    for i, size in enumerate(sizes):
        # the padding that gives this size, half of it behind; what is missing is added behind
        old: Any = x.shape[2 + i]
        total: Any = windows.strides[i] * (old - 1) + more[i] + reach[i] + 1 - size
        if isinstance(total, Dim):
            raise Error("the output_shape of this ConvTranspose needs a known size of x")
        after[i] = total // 2 if way != "SAME_UPPER" else total - total // 2
        after[i] = after[i] if total > 0 else total
        before[i] = total - after[i]
    for i, step in enumerate(windows.strides):
        x = _spread(b, x, 2 + i, step)
    ends = [(r - p, r - q + m) for r, p, q, m in zip(reach, before, after, more, strict=True)]
    x = padded(b, x, [(0, 0), (0, 0), *ends])
    # the weight [C, O/groups, ...] as [O, C/groups, ...], its positions in reverse order
    apart = b.reshaped(weight, (groups, channels // groups, out, *windows.sizes))
    apart = b.transposed(apart, (0, 2, 1, *range(3, 3 + count)))
    joined = b.reshaped(apart, (groups * out, channels // groups, *windows.sizes))
    kernel = b.op(ops.Flip, joined, dims=tuple(range(2, joined.ndim)))
    still = _Windows(windows.sizes, (1,) * count, windows.dilations, (0,) * count, (0,) * count)
    return _convolved(b, x, kernel, still, node)


def _spread(b: Builder, x: ImportedValue, dim: int, step: int) -> ImportedValue:
    """x with step - 1 zeros between two elements of a dimension."""
    if step == 1:
        return x
    shape = x.shape
    apart = b.op(ops.Unsqueeze, x, dims=(dim + 1,))
    apart = padded(b, apart, [(0, (step - 1) * (i == dim + 1)) for i in range(apart.ndim)])
    wide = b.reshaped(apart, (*shape[:dim], shape[dim] * step, *shape[dim + 1 :]))
    return b.op(ops.Slice, wide, dim=dim, start=0, stop=(shape[dim] - 1) * step + 1)


def _pool_windows(node: Node, x: ImportedValue) -> tuple[_Windows, tuple[int, ...]]:
    """The windows of a pool, and what the last ones lack where sizes are rounded up.

    A window begins within the image or its first padding.
    """
    positions = x.shape[2:]
    windows = _windows_of(node, node.ints("kernel_shape") or (), positions)
    extra = [0] * len(positions)
    for i, (window, stride, gap, before, after) in enumerate(zip(*windows, strict=True)):
        reach = (window - 1) * gap + 1
        if below(positions[i] + before + after, reach):
            raise Error(f"{node.kind} moves a window of {reach} over {positions[i]} elements")
        if node.integer("ceil_mode", 0):
            lacks = _remainder(reach - positions[i] - before - after, stride)
            extra[i] = max(0, lacks - stride if after + lacks >= reach else lacks)
    return windows, tuple(extra)


def _shifted(
    b: Builder, x: ImportedValue, dim: int, moves: Sequence[int], fill: float
) -> list[ImportedValue]:
    """A dimension as its windows see it: their first elements, their second ones, ..."""
    window, stride, gap, before, after = moves
    room = x.shape[dim] + (before + after - (window - 1) * gap - 1)
    span = room - _remainder(room, stride) + stride
    end = (window - 1) * gap + span - x.shape[dim] - before
    assert isinstance(end, int)
    x = padded(b, x, [(before, end) if i == dim else (0, 0) for i in range(x.ndim)], fill)
    starts = [i * gap for i in range(window)]
    return [
        b.op(ops.Slice, x, dim=dim, start=start, stop=start + span, step=stride) for start in starts
    ]


@imports("MaxPool", attributes=f"{_MOVES} ceil_mode storage_order", refuses=_known_padding)
def max_pool(b: Builder, node: Node) -> Results:
    """The largest elements, one dimension after the other, and their places in x if wanted."""
    x = node.shaped(0, 3)
    windows, extra = _pool_windows(node, x)
    moves = list(zip(*windows.extended(extra), strict=True))
    lowest = -math.inf if is_float(x.dtype) else integer_range(x.dtype)[0]
    places = _numbered(b, node, x) if node.wants(1) else None
    for dim in reversed(range(2, x.ndim)):  # so that the first of equals wins
        x, *others = _shifted(b, x, dim, moves[dim - 2], lowest)
        spots = _shifted(b, places, dim, moves[dim - 2], 0) if places is not None else []
        places = spots[0] if spots else None
        for i, other in enumerate(others, 1):
            if places is not None:
                places = b.where(other > x, spots[i], places)
            x = b.op(ops.Maximum, x, other)
    return [x, places]


def _numbered(b: Builder, node: Node, x: ImportedValue) -> ImportedValue:
    """The number of each element: of a position in row-major or column-major order."""
    outer, positions = x.shape[:2], x.shape[2:]
    inner = b.op(ops.Iota, size=product(positions), dtype="i64")
    if node.integer("storage_order", 0):
        inner = b.reshaped(inner, positions[::-1])
        inner = b.transposed(inner, range(len(positions))[::-1])
    inner = b.reshaped(inner, positions)
    image = b.op(ops.Iota, size=product(outer), dtype="i64")
    image = b.reshaped(image, (*outer, *(1,) * len(positions)))
    return image * product(positions) + inner


def _sums(b: Builder, x: ImportedValue, windows: _Windows) -> ImportedValue:
    """Sums of windows, as a convolution of every channel by ones."""
    ones = b.op(ops.Full, value=1.0, shape=(1, 1, *windows.sizes), dtype=x.dtype)
    alone = b.reshaped(x, (product(x.shape[:2]), 1, *x.shape[2:]))
    total = _convolved(b, alone, ones, windows)
    return b.reshaped(total, (*x.shape[:2], *total.shape[2:]))


@imports("AveragePool", attributes=f"{_MOVES} ceil_mode count_include_pad", refuses=_known_padding)
def average_pool(b: Builder, node: Node) -> Results:
    """Sums of windows over the number of elements that count."""
    x = node.shaped(0, 3)
    windows, extra = _pool_windows(node, x)
    total = _sums(b, x, windows.extended(extra))
    included = bool(node.integer("count_include_pad", 0))
    if not any(extra) and (included or not any((*windows.before, *windows.after))):
        return total / float(math.prod(windows.sizes))
    counted = b.op(ops.Full, value=1.0, shape=(1, 1, *x.shape[2:]), dtype=x.dtype)
    ends = [(0, 0), (0, 0), *zip(windows.before, windows.after, strict=True)]
    counted = padded(b, counted, ends, float(included))
    rest = windows._replace(before=(0,) * len(extra), after=extra)
    return total / _sums(b, counted, rest)


@imports("LpPool", attributes=f"{_MOVES} ceil_mode p", refuses=_known_padding)
@imports("GlobalLpPool", attributes="p")
def lp_pool(b: Builder, node: Node) -> Results:
    """Norms of windows, or of all positions."""
    x, p = node.shaped(0, 3), node.real("p", 2)
    if p <= 0:
        raise Error(f"{node.kind} has p={p}; expected a positive number")
    powers = b.op(ops.Pow, abs(x), p)
    if node.kind == "LpPool":
        windows, extra = _pool_windows(node, x)
        total = _sums(b, powers, windows.extended(extra))
    else:
        total = b.op(ops.ReduceSum, powers, dims=tuple(range(2, x.ndim)), keep=True)
    return b.op(ops.Pow, total, 1 / p)


@imports("LRN", attributes="alpha beta bias size")
def local_response(b: Builder, node: Node) -> Results:
    """x / (bias + alpha * the mean square of channels around each) ** beta."""
    x, size = node.shaped(0, 2), node.integer("size", 1)
    if size < 1:
        raise Error(f"LRN over {size} channels; expected 1 or more")
    moves = (size, 1, 1, (size - 1) // 2, size // 2)
    mean = reduce(add, _shifted(b, x * x, 1, moves, 0)) * (node.real("alpha", 1e-4) / size)
    return x / b.op(ops.Pow, mean + node.real("bias", 1.0), node.real("beta", 0.75))


_RESIZE = """antialias axes coordinate_transformation_mode cubic_coeff_a exclude_outside
extrapolation_value keep_aspect_ratio_policy mode nearest_mode"""
_COORDINATES = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric")
_ROUNDED = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")


def _resize_refusal(node: Node) -> str | None:
    mode, excludes = node.text("mode", "nearest"), node.integer("exclude_outside", 0)
    allowed = {
        "antialias": (0, 1) if mode != "nearest" and excludes else (0,),  # as PyTorch exports it
        "coordinate_transformation_mode": _COORDINATES,
        "exclude_outside": (0, 1) if mode == "cubic" or node.integer("antialias", 0) else (0,),
        "keep_aspect_ratio_policy": ("stretch",),
        "mode": ("nearest", "linear", "cubic"),
        "nearest_mode": _ROUNDED,
    }
    reasons = (only(name, *values)(node) for name, values in allowed.items())
    return next((reason for reason in reasons if reason is not None), None)


@imports("Resize", attributes=_RESIZE, refuses=_resize_refusal)
def resize(b: Builder, node: Node) -> Results:
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
    raise Error(f"Resize of {size} elements by {float(factor)}, which is not a whole number")


def _resized(
    b: Builder, node: Node, x: ImportedValue, axis: int, new: DimLike, factor: Fraction | None
) -> ImportedValue:
    """One dimension of `new` elements, which are `1 / factor` apart in x."""
    top, bottom = _places(b, node, x.shape[axis], new, factor)
    mode = node.text("mode", "nearest")
    if mode == "nearest":
        return _taken(b, x, axis, _rounded(b, node, top, bottom))
    if node.integer("antialias", 0) or (mode == "cubic" and node.integer("exclude_outside", 0)):
        place = b.cast(top, "f32") / b.cast(bottom, "f32")
        return _weighted(b, node, x, axis, place, factor)
    first = top // bottom
    rest = b.cast(top % bottom, "f32") / b.cast(bottom, "f32")
    terms: list[ImportedValue] = []
    for shift in _SHIFTS[mode]:
        weight = b.cast(_weight(b, node, rest, shift, mode), x.dtype)
        column = b.reshaped(weight, (new, *(1,) * (x.ndim - axis - 1)))
        terms.append(_taken(b, x, axis, first + shift) * column)
    return reduce(add, terms)


def _weighted(
    b: Builder,
    node: Node,
    x: ImportedValue,
    axis: int,
    place: ImportedValue,
    factor: Fraction | None,
) -> ImportedValue:
    """The product with a matrix [old, new] of weights whose columns add up to 1.

    Where a dimension shrinks, the weights of antialias are as many times wider.
    """
    old, new = x.shape[axis], place.shape[0]
    elements = b.op(ops.Unsqueeze, b.op(ops.Iota, size=old, dtype="f32"), dims=(1,))
    distance = abs(elements - place)
    if node.integer("antialias", 0):
        sizes = (b.number(size, "f32") for size in (new, old))
        ratio = b.op(ops.Div, *sizes) if factor is None else float(factor)
        distance = distance * b.op(ops.Minimum, b.number(1, "f32"), ratio)
    if node.text("mode") == "cubic":
        far = b.where(distance < 2, _cubic(b, node, distance, -1), 0)
        weight = b.where(distance < 1, _cubic(b, node, distance, 0), far)
    else:
        weight = b.op(ops.Relu, _linear(b, distance))
    weight = weight / b.op(ops.ReduceSum, weight, dims=(0,), keep=True)
    order = [i for i in range(x.ndim) if i != axis] + [axis]
    result = b.op(ops.Matmul, b.transposed(x, order), b.cast(weight, x.dtype))
    return b.transposed(result, [order.index(i) for i in range(x.ndim)])


def _places(
    b: Builder, node: Node, old: DimLike, new: DimLike, factor: Fraction | None
) -> tuple[ImportedValue, ImportedValue]:
    """The places of the new elements in x, as i64[new] over a scalar."""
    mode = node.text("coordinate_transformation_mode", "half_pixel")
    if mode == "align_corners":
        up, down = _between_corners(old, new, factor)
    elif mode == "pytorch_half_pixel" and new == 1:
        up, down, mode = 0, 1, "asymmetric"
    else:
        up, down = (old, new) if factor is None else (factor.denominator, factor.numerator)
    count = b.op(ops.Iota, size=new, dtype="i64")
    if "half_pixel" in mode:  # (2 * i + 1) * up / (2 * down) - 1 / 2
        return (count * 2 + 1) * up - down, b.imported(b.number(2 * down, "i64"))
    return count * up, b.imported(b.number(down, "i64"))


def _between_corners(
    old: DimLike, new: DimLike, factor: Fraction | None
) -> tuple[DimLike, DimLike]:
    """The distance of two new elements in x, where the first and the last are those of x."""
    if factor is None or isinstance(old, Dim):
        return (0, 1) if new == 1 else (old - 1, new - 1)
    last = old * factor - 1
    return ((old - 1) * last.denominator, last.numerator) if last > 0 else (0, 1)


def _rounded(b: Builder, node: Node, top: ImportedValue, bottom: ImportedValue) -> ImportedValue:
    """Fractions as whole numbers."""
    how = node.text("nearest_mode", "round_prefer_floor")
    if how.startswith("round"):
        top = top * 2 - bottom if how.endswith("floor") else top * 2 + bottom
        bottom = bottom * 2
    return top // bottom if how in ("floor", "round_prefer_ceil") else -(-top // bottom)


def _taken(b: Builder, x: ImportedValue, axis: int, places: ImportedValue) -> ImportedValue:
    """Elements of a dimension; those before and behind are its ends."""
    inside = b.op(ops.Minimum, b.op(ops.Maximum, places, 0), x.shape[axis] - 1)
    return b.op(ops.Gather, x, inside, dim=axis)


# The elements around a place that count, by their distance from the last one before it.
_SHIFTS = {"nearest": (0,), "linear": (0, 1), "cubic": (-1, 0, 1, 2)}


def _weight(b: Builder, node: Node, rest: ImportedValue, shift: int, mode: str) -> ImportedValue:
    """The weight of one of the elements around a place, `rest` behind the last one before it."""
    distance = abs(rest - shift)
    return _cubic(b, node, distance, shift) if mode == "cubic" else _linear(b, distance)


def _linear(b: Builder, distance: ImportedValue) -> ImportedValue:
    """The weight of an element by its distance."""
    return 1.0 - distance


def _cubic(b: Builder, node: Node, distance: ImportedValue, shift: int) -> ImportedValue:
    """The weight of an element by its distance: a polynomial below 1, and one from 1 to 2."""
    a = node.real("cubic_coeff_a", -0.75)
    near, far = (a + 2, -(a + 3), 0.0, 1.0), (a, -5 * a, 8 * a, -4 * a)
    return polynomial(b, distance, *(near if shift in (0, 1) else far))


_MODES = {"bilinear": "linear", "bicubic": "cubic"}  # of opset 16
_FAR = 2.0**20  # beyond any image, where places are still numbers


def _sample_mode(node: Node) -> str:
    mode = node.text("mode", "linear")
    return _MODES.get(mode, mode)


def _sample_refusal(node: Node) -> str | None:
    # at the border, cubic weights of PyTorch, ONNX and its runtime differ
    border = () if _sample_mode(node) == "cubic" else ("border",)
    mode = only("mode", "linear", "bilinear", "nearest", "cubic", "bicubic")(node)
    return mode or only("padding_mode", "zeros", "reflection", *border)(node)


@imports("GridSample", attributes="align_corners mode padding_mode", refuses=_sample_refusal)
def grid_sample(b: Builder, node: Node) -> Results:
    """Elements around the places of a grid, each times the product of its weights by dimension."""
    x, grid = node.shaped(0, 3), node.shaped(1, 3)
    outer, positions, count = x.shape[:2], x.shape[2:], x.ndim - 2
    if grid.shape[-1] != count or grid.ndim != x.ndim or grid.shape[0] != outer[0]:
        raise Error(f"GridSample of {list(x.shape)} at the places {list(grid.shape)}")
    inner = grid.shape[1:-1]
    grid = b.cast(grid, "f32")
    grid = b.where(b.op(ops.Eq, grid, grid), grid, -1)  # NaN, as in PyTorch
    grid = b.op(ops.Clip, grid, low=-_FAR, high=_FAR)
    flat = b.reshaped(grid, (outer[0], product(inner), count))
    places = b.results(ops.Split, flat, dim=2, sizes=(1,) * count)[::-1]
    taps = [
        _taps(b, node, b.reshaped(place, (outer[0], 1, product(inner))), size)
        for place, size in zip(places, positions, strict=True)
    ]
    elements = b.reshaped(x, (*outer, product(positions)))
    terms: list[ImportedValue] = []
    for chosen in combinations(*taps):
        index, weight = chosen[0]
        for size, (place, factor) in zip(positions[1:], chosen[1:], strict=True):
            index = index * size + place
            weight = weight * factor
        index = b.op(ops.Expand, index, shape=(*outer, product(inner)))
        element = b.op(ops.GatherElements, elements, index, dim=2)
        terms.append(element * b.cast(weight, x.dtype))
    total = reduce(add, terms)
    return b.reshaped(total, (*outer, *inner))


def _taps(
    b: Builder, node: Node, place: ImportedValue, size: DimLike
) -> list[tuple[ImportedValue, ImportedValue]]:
    """The elements of one dimension around each place in -1 .. 1, with their weights."""
    aligned = bool(node.integer("align_corners", 0))
    mode, padding = _sample_mode(node), node.text("padding_mode", "zeros")
    number = b.imported(b.number(size, "f32"))
    room, first = (number - 1, 0.0) if aligned else (number, -0.5)

    def inside(x: ImportedValue) -> ImportedValue:
        """Places within the image: the nearest ones, or those reflected at its borders."""
        if padding != "reflection":
            return b.op(ops.Minimum, b.op(ops.Maximum, x, 0), number - 1)
        around = room * 2
        rest = (x - first) % b.op(ops.Maximum, around, 1)
        return b.op(ops.Minimum, rest, around - rest) + first

    place = (place + 1) * 0.5 * room
    place = place if aligned else place - 0.5
    if mode == "nearest":
        place = b.op(ops.Round, place)
    if padding != "zeros":
        place = b.where((place < first) | (place > room + first), inside(place), place)
    start = b.op(ops.Floor, place)
    rest = place - start
    taps: list[tuple[ImportedValue, ImportedValue]] = []
    for shift in _SHIFTS[mode]:
        index = start + shift
        weight = _weight(b, node, rest, shift, mode)
        if padding == "zeros":
            weight = b.where((index >= 0) & (index < number), weight, 0)
        taps.append((b.cast(inside(index), "i64"), weight))
    return taps
