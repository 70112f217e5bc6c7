"""Elements of images at places that are computed: GridSample."""

from __future__ import annotations

from functools import reduce
from itertools import product as combinations

from irc import ops
from irc.errors import Error
from irc.frontends.onnx.builder import Builder
from irc.frontends.onnx.entry import Entry, Node
from irc.frontends.onnx.images import cubic, linear
from irc.frontends.onnx.rules import Made, only, reads
from irc.ir.dims import DimLike, product

_MODES = {"bilinear": "linear", "bicubic": "cubic"}  # of opset 16
_FAR = 2.0**20  # beyond any image, where places are still numbers
_SHIFTS = {"nearest": (0,), "linear": (0, 1), "cubic": (-1, 0, 1, 2)}


def _refuses(node: Node) -> str | None:
    is_cubic = _MODES.get(node.text("mode", ""), node.text("mode", "")) == "cubic"
    border = () if is_cubic else ("border",)  # where PyTorch, ONNX and its runtime differ
    mode = only("mode", "linear", "bilinear", "nearest", "cubic", "bicubic")(node)
    return mode or only("padding_mode", "zeros", "reflection", *border)(node)


@reads("GridSample", known="align_corners mode padding_mode", refuses=_refuses)
def grid_sample(b: Builder, node: Node) -> Made:
    """Elements around the places of a grid, each times the product of its weights by dimension."""
    x, grid = node.shaped(0, 3), node.shaped(1, 3)
    outer, positions, count = x.shape[:2], x.shape[2:], x.ndim - 2
    if grid.shape[-1] != count or grid.ndim != x.ndim or grid.shape[0] != outer[0]:
        raise Error(f"GridSample of {list(x.shape)} at the places {list(grid.shape)}")
    many = product(grid.shape[1:-1])
    grid = b.cast(grid, "f32")
    grid = b.where(b.op(ops.Eq, grid, grid), grid, -1)  # NaN, as in PyTorch
    grid = b.op(ops.Clip, grid, low=-_FAR, high=_FAR)
    flat = b.reshaped(b.get(grid), (outer[0], many, count))
    places = b.add(ops.Split(flat, dim=2, sizes=(1,) * count)).results[::-1]
    taps = [_taps(b, node, b.entry(b.reshaped(place, (outer[0], 1, many))), size)
            for place, size in zip(places, positions, strict=True)]  # fmt: skip
    elements = b.reshaped(b.get(x), (*outer, product(positions)))
    terms: list[Entry] = []
    for chosen in combinations(*taps):
        index, weight = chosen[0]
        for size, (place, factor) in zip(positions[1:], chosen[1:], strict=True):
            index = b.op(ops.Add, b.op(ops.Mul, index, b.number(size, "i64")), place)
            weight = b.op(ops.Mul, weight, factor)
        index = b.op(ops.Expand, index, shape=(*outer, many))
        element = b.op(ops.GatherElements, elements, index, dim=2)
        terms.append(b.op(ops.Mul, element, b.cast(weight, x.dtype)))
    total = reduce(lambda one, other: b.op(ops.Add, one, other), terms)
    return b.reshaped(b.get(total), (*outer, *grid.shape[1:-1]))


def _taps(b: Builder, node: Node, place: Entry, size: DimLike) -> list[tuple[Entry, Entry]]:
    """The elements of one dimension around each place in -1 .. 1, with their weights."""
    aligned = bool(node.integer("align_corners", 0))
    mode, padding = node.text("mode", "linear"), node.text("padding_mode", "zeros")
    mode = _MODES.get(mode, mode)
    number = b.entry(b.number(size, "f32"))
    room = b.op(ops.Sub, number, 1) if aligned else number
    place = b.op(ops.Mul, b.op(ops.Mul, b.op(ops.Add, place, 1), 0.5), room)
    place = place if aligned else b.op(ops.Sub, place, 0.5)
    if mode == "nearest":
        place = b.op(ops.Round, place)
    first = 0.0 if aligned else -0.5
    outside = b.op(
        ops.Or, b.op(ops.Lt, place, first), b.op(ops.Gt, place, b.op(ops.Add, room, first))
    )
    place = b.where(outside, _inside(b, place, room, number, first, padding), place)
    start = b.op(ops.Floor, place)
    rest = b.op(ops.Sub, place, start)
    taps: list[tuple[Entry, Entry]] = []
    for shift in _SHIFTS[mode]:
        index = b.op(ops.Add, start, shift)
        distance = b.op(ops.Abs, b.op(ops.Sub, rest, shift))
        weight = cubic(b, node, distance, shift) if mode == "cubic" else linear(b, distance)
        if padding == "zeros":
            held = b.op(ops.And, b.op(ops.Ge, index, 0), b.op(ops.Lt, index, number))
            weight = b.where(held, weight, 0)
        index = _inside(b, index, room, number, first, "border" if padding == "zeros" else padding)
        taps.append((b.cast(index, "i64"), weight))
    return taps


def _inside(b: Builder, x: Entry, room: Entry, size: Entry, first: float, padding: str) -> Entry:
    """Places within the image: the nearest ones, or those reflected at its borders."""
    last = b.op(ops.Sub, size, 1)
    if padding == "zeros":
        return x
    if padding == "reflection":
        around = b.op(ops.Mul, room, 2)
        rest = b.op(ops.Mod, b.op(ops.Sub, x, first), b.op(ops.Maximum, around, 1))
        return b.op(ops.Add, b.op(ops.Minimum, rest, b.op(ops.Sub, around, rest)), first)
    return b.op(ops.Minimum, b.op(ops.Maximum, x, 0), last)
