"""Windows of images [B, C, positions...]: their largest elements, means and norms; LRN."""

from __future__ import annotations

import math
from collections.abc import Sequence

from irc import ops
from irc.errors import Error
from irc.frontends.onnx.builder import Builder
from irc.frontends.onnx.entry import Entry, Node
from irc.frontends.onnx.fold import below
from irc.frontends.onnx.images import (
    MOVES,
    Windows,
    convolved,
    known_padding,
    padded,
    remainder,
    windows_of,
)
from irc.frontends.onnx.rules import Made, reads
from irc.ir.core import Value
from irc.ir.dims import product
from irc.ir.dtypes import dtype as dtype_called


def _windows(node: Node, x: Entry) -> tuple[Windows, tuple[int, ...]]:
    """The windows of a pool, and what the last ones lack where sizes are rounded up.

    A window begins within the image or its first padding.
    """
    positions = x.shape[2:]
    moves = windows_of(node, node.ints("kernel_shape") or (), positions)
    extra = [0] * len(positions)
    for i, (window, stride, gap, before, after) in enumerate(zip(*moves, strict=True)):
        reach = (window - 1) * gap + 1
        if below(positions[i] + before + after, reach):
            raise Error(f"{node.kind} moves a window of {reach} over {positions[i]} elements")
        if node.integer("ceil_mode", 0):
            lacks = remainder(reach - positions[i] - before - after, stride)
            extra[i] = max(0, lacks - stride if after + lacks >= reach else lacks)
    return moves, tuple(extra)


def _shifted(b: Builder, x: Value, dim: int, moves: Sequence[int], fill: float) -> list[Entry]:
    """A dimension as its windows see it: their first elements, their second ones, ..."""
    window, stride, gap, before, after = moves
    room = x.type.shape[dim] + (before + after - (window - 1) * gap - 1)
    span = room - remainder(room, stride) + stride
    end = (window - 1) * gap + span - x.type.shape[dim] - before
    assert isinstance(end, int)
    ends = [(before, end) if i == dim else (0, 0) for i in range(x.type.ndim)]
    x = padded(b, x, ends, fill)
    starts = [i * gap for i in range(window)]
    return [
        b.op(ops.Slice, x, dim=dim, start=start, stop=start + span, step=stride) for start in starts
    ]


@reads("MaxPool", known=f"{MOVES} ceil_mode storage_order", refuses=known_padding)
def max_pool(b: Builder, node: Node) -> Made:
    """The largest elements, one dimension after the other, and their places in x if wanted."""
    x = node.shaped(0, 3)
    moves, extra = _windows(node, x)
    moves = moves._replace(after=tuple(map(sum, zip(moves.after, extra, strict=True))))
    lowest = _lowest(x.dtype)
    places = _places(b, node, x) if node.wants(1) else None
    for dim in reversed(range(2, x.ndim)):  # so that the first of equals wins
        window = [numbers[dim - 2] for numbers in moves]
        x, *others = _shifted(b, b.get(x), dim, window, lowest)
        spots = _shifted(b, b.get(places), dim, window, 0) if places is not None else []
        places = spots[0] if spots else None
        for i, other in enumerate(others, 1):
            if places is not None:
                places = b.where(b.op(ops.Gt, other, x), spots[i], places)
            x = b.op(ops.Maximum, x, other)
    return x if places is None else [x, places]


def _lowest(name: str) -> float:
    kind = dtype_called(name)
    return -math.inf if kind.is_float else 0 if kind.kind == "uint" else -1 << (kind.bits - 1)


def _places(b: Builder, node: Node, x: Entry) -> Entry:
    """The number of each element: of a position in row-major or column-major order."""
    outer, positions = x.shape[:2], x.shape[2:]
    inner = b.value(ops.Iota(size=product(positions), dtype="i64"))
    if node.integer("storage_order", 0):
        inner = b.reshaped(inner, positions[::-1])
        inner = b.transposed(inner, range(len(positions))[::-1])
    inner = b.reshaped(inner, positions)
    image = b.value(ops.Iota(size=product(outer), dtype="i64"))
    image = b.reshaped(image, (*outer, *(1,) * len(positions)))
    return b.op(ops.Add, b.op(ops.Mul, image, b.number(product(positions), "i64")), inner)


def _sums(b: Builder, x: Entry, moves: Windows) -> Entry:
    """Sums of windows, as a convolution of every channel by ones."""
    ones = b.entry(b.value(ops.Full(value=1.0, shape=(1, 1, *moves.sizes), dtype=x.dtype)))
    alone = b.entry(b.reshaped(b.get(x), (product(x.shape[:2]), 1, *x.shape[2:])))
    total = convolved(b, alone, ones, None, moves)
    return b.entry(b.reshaped(b.get(total), (*x.shape[:2], *total.shape[2:])))


@reads("AveragePool", known=f"{MOVES} ceil_mode count_include_pad", refuses=known_padding)
def average_pool(b: Builder, node: Node) -> Made:
    """Sums of windows over the number of elements that count."""
    x = node.shaped(0, 3)
    moves, extra = _windows(node, x)
    after = tuple(map(sum, zip(moves.after, extra, strict=True)))
    total = _sums(b, x, moves._replace(after=after))
    included = bool(node.integer("count_include_pad", 0))
    if not any(extra) and (included or not any((*moves.before, *moves.after))):
        return b.op(ops.Div, total, float(math.prod(moves.sizes)))
    counted = b.value(ops.Full(value=1.0, shape=(1, 1, *x.shape[2:]), dtype=x.dtype))
    ends = [(0, 0), (0, 0), *zip(moves.before, moves.after, strict=True)]
    counted = b.entry(padded(b, counted, ends, float(included)))
    rest = moves._replace(before=(0,) * len(extra), after=extra)
    return b.op(ops.Div, total, _sums(b, counted, rest))


def _power(node: Node) -> float:
    p = node.real("p", 2)
    if p <= 0:
        raise Error(f"{node.kind} has p={p}; expected a positive number")
    return p


@reads("LpPool", known=f"{MOVES} ceil_mode p", refuses=known_padding)
def lp_pool(b: Builder, node: Node) -> Made:
    """Norms of windows."""
    x, p = node.shaped(0, 3), _power(node)
    moves, extra = _windows(node, x)
    moves = moves._replace(after=tuple(map(sum, zip(moves.after, extra, strict=True))))
    return b.op(ops.Pow, _sums(b, b.op(ops.Pow, b.op(ops.Abs, x), p), moves), 1 / p)


@reads("GlobalLpPool", known="p")
def global_lp_pool(b: Builder, node: Node) -> Made:
    """The norm of all positions."""
    x, p = node.shaped(0, 3), _power(node)
    powers = b.op(ops.Pow, b.op(ops.Abs, x), p)
    total = b.op(ops.ReduceSum, powers, dims=tuple(range(2, x.ndim)), keep=True)
    return b.op(ops.Pow, total, 1 / p)


@reads("LRN", known="alpha beta bias size")
def local_response(b: Builder, node: Node) -> Made:
    """x / (bias + alpha * the mean square of channels around each) ** beta."""
    x, size = node.shaped(0, 2), node.integer("size", 1)
    if size < 1:
        raise Error(f"LRN over {size} channels; expected 1 or more")
    moves = (size, 1, 1, (size - 1) // 2, size // 2)
    total, *others = _shifted(b, b.get(b.op(ops.Mul, x, x)), 1, moves, 0)
    for other in others:
        total = b.op(ops.Add, total, other)
    total = b.op(ops.Mul, total, node.real("alpha", 1e-4) / size)
    total = b.op(ops.Add, total, node.real("bias", 1.0))
    return b.op(ops.Div, x, b.op(ops.Pow, total, node.real("beta", 0.75)))
