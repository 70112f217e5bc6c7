"""Inverse and hyperbolic functions, bits of integers, and what else is made of a few operations."""

from __future__ import annotations

import math
from collections.abc import Callable

from irc import ops
from irc.errors import Error
from irc.frontends.onnx.builder import Builder
from irc.frontends.onnx.entry import Entry, Node, sizes
from irc.frontends.onnx.rules import Made, only, reads
from irc.ir.core import Op
from irc.ir.dims import DimLike, exact_divide
from irc.ir.dtypes import dtype as dtype_called
from irc.ir.dtypes import is_float

_LARGE = 2.0**30  # from here on, 1 more or less makes no difference to a logarithm
# the arc tangent of x in -tan(pi/8) .. tan(pi/8) is x + x * z * polynomial(z), z = x * x (Cephes)
_ARC_TANGENT = (8.05374449538e-2, -1.38776856032e-1, 1.99777106478e-1, -3.33329491539e-1)


def _odd(b: Builder, x: Entry, rule: Callable[[Builder, Entry], Entry]) -> Entry:
    """A function of |x|, with the sign of x."""
    positive = rule(b, b.op(ops.Abs, x))
    return b.where(b.op(ops.Lt, x, 0), b.op(ops.Neg, positive), positive)


def _log1p(b: Builder, x: Entry) -> Entry:
    """log(1 + x), of small x too: the error of u = 1 + x is that of u - 1 (Kahan)."""
    u = b.op(ops.Add, x, 1)
    logarithm = b.op(ops.Mul, b.op(ops.Log, u), b.op(ops.Div, x, b.op(ops.Sub, u, 1)))
    usable = b.op(ops.And, b.op(ops.Ne, u, 1), b.op(ops.Lt, u, math.inf))
    return b.where(usable, logarithm, x)


def _far(b: Builder, x: Entry, near: Entry) -> Entry:
    """log(2 * x) where x is so large that `near` may have overflowed."""
    far = b.op(ops.Add, b.op(ops.Log, x), math.log(2))
    return b.where(b.op(ops.Lt, x, _LARGE), near, far)


def _asinh(b: Builder, x: Entry) -> Entry:
    """log1p(x + x² / (1 + sqrt(1 + x²))) of positive x."""
    square = b.op(ops.Mul, x, x)
    root = b.op(ops.Add, b.op(ops.Sqrt, b.op(ops.Add, square, 1)), 1)
    return _far(b, x, _log1p(b, b.op(ops.Add, x, b.op(ops.Div, square, root))))


def _acosh(b: Builder, x: Entry) -> Entry:
    """log1p(t + sqrt(t) * sqrt(t + 2)) with t = x - 1; NaN below 1."""
    t = b.op(ops.Sub, x, 1)
    root = b.op(ops.Mul, b.op(ops.Sqrt, t), b.op(ops.Sqrt, b.op(ops.Add, t, 2)))
    near = _log1p(b, b.op(ops.Add, t, root))
    return b.where(b.op(ops.Lt, x, 1), math.nan, _far(b, x, near))


def _atanh(b: Builder, x: Entry) -> Entry:
    """log1p(2 * x / (1 - x)) / 2 of positive x."""
    ratio = b.op(ops.Div, b.op(ops.Add, x, x), b.op(ops.Add, b.op(ops.Neg, x), 1))
    return b.op(ops.Mul, _log1p(b, ratio), 0.5)


def _cosh(b: Builder, x: Entry) -> Entry:
    """exp(|x|) / 2 + exp(-|x|) / 2, by the root of exp(|x|), which overflows later."""
    root = b.op(ops.Exp, b.op(ops.Mul, b.op(ops.Abs, x), 0.5))
    small = b.op(ops.Div, b.op(ops.Reciprocal, root), root)
    large = b.op(ops.Mul, root, b.op(ops.Mul, root, 0.5))
    return b.op(ops.Add, large, b.op(ops.Mul, small, 0.5))


def _atan(b: Builder, x: Entry) -> Entry:
    """The arc tangent of positive x, by that of x, (x - 1) / (x + 1) or -1 / x."""
    middle, far = (b.op(ops.Gt, x, math.tan(n * math.pi / 8)) for n in (1, 3))
    turned = b.op(ops.Div, b.op(ops.Sub, x, 1), b.op(ops.Add, x, 1))
    t = b.where(far, b.op(ops.Neg, b.op(ops.Reciprocal, x)), b.where(middle, turned, x))
    z = b.op(ops.Mul, t, t)
    total = b.op(ops.Mul, z, _ARC_TANGENT[0])
    for factor in _ARC_TANGENT[1:]:
        total = b.op(ops.Mul, b.op(ops.Add, total, factor), z)
    eighths = b.op(ops.Add, b.cast(middle, x.dtype), b.cast(far, x.dtype))
    near = b.op(ops.Add, t, b.op(ops.Mul, t, total))
    return b.op(ops.Add, b.op(ops.Mul, eighths, math.pi / 4), near)


def _from_ends(b: Builder, x: Entry) -> tuple[Entry, Entry]:
    """1 - x and 1 + x."""
    return b.op(ops.Add, b.op(ops.Neg, x), 1), b.op(ops.Add, x, 1)


def _asin(b: Builder, x: Entry) -> Entry:
    below, above = _from_ends(b, x)
    return _odd(b, b.op(ops.Div, x, b.op(ops.Sqrt, b.op(ops.Mul, below, above))), _atan)


def _acos(b: Builder, x: Entry) -> Entry:
    below, above = _from_ends(b, x)
    return b.op(ops.Mul, _atan(b, b.op(ops.Sqrt, b.op(ops.Div, below, above))), 2)


_FUNCTIONS: dict[str, Callable[[Builder, Entry], Entry]] = {
    "Tan": lambda b, x: b.op(ops.Div, b.op(ops.Sin, x), b.op(ops.Cos, x)),
    "Sinh": lambda b, x: b.op(ops.Mul, b.op(ops.Tanh, x), _cosh(b, x)),
    "Cosh": _cosh,
    "Asin": _asin,
    "Acos": _acos,
    "Atan": lambda b, x: _odd(b, x, _atan),
    "Asinh": lambda b, x: _odd(b, x, _asinh),
    "Acosh": _acosh,
    "Atanh": lambda b, x: _odd(b, x, _atanh),
}


@reads(*_FUNCTIONS)
def function(b: Builder, node: Node) -> Made:
    """A function of one number, computed in f32 or wider."""
    x = node.input(0)
    if not is_float(x.dtype) or (x.dtype == "f64" and node.kind in ("Asin", "Acos", "Atan")):
        raise Error(f"{node.kind} of {x.dtype} has no operation in irc; cast to f32")
    wide = x if x.dtype == "f64" else b.cast(x, "f32")
    return b.cast(_FUNCTIONS[node.kind](b, wide), x.dtype)


_LOGIC: dict[str, type[Op]] = {"And": ops.And, "Or": ops.Or, "Xor": ops.Ne}


def _integer(node: Node) -> tuple[Entry, int, bool]:
    """The first operand, how many bits it has, and whether one is the sign."""
    x = node.input(0)
    kind = dtype_called(x.dtype)
    if not kind.is_integer:
        raise Error(f"{node.kind} takes integers, found {x.dtype}")
    return x, kind.bits, kind.kind == "int"


@reads(*(f"Bitwise{kind}" for kind in _LOGIC))
def bitwise(b: Builder, node: Node) -> Made:
    """Bits along a new dimension, and the sum of those that the result has."""
    x, count, signed = _integer(node)
    last = count - signed  # floor_div by 2 ** last would be by a negative number
    powers = [2**i for i in range(last)]
    rows = (powers + powers[-1:] * signed, [1] * last + [2] * signed,
            powers + [-(2**last)] * signed)  # fmt: skip
    first, second, worth = (b.entry(b.constant(sizes(*row), x.dtype, (count,))) for row in rows)
    operands: list[Entry] = []
    for entry in (x, node.input(1)):
        apart = b.op(ops.Unsqueeze, entry, dims=(entry.ndim,))
        digits = b.op(ops.FloorDiv, b.op(ops.FloorDiv, apart, first), second)
        operands.append(b.op(ops.Ne, b.op(ops.Mod, digits, 2), 0))
    kept = b.where(b.op(_LOGIC[node.kind.removeprefix("Bitwise")], *operands), worth, 0)
    return b.op(ops.ReduceSum, kept, dims=(kept.ndim - 1,))


@reads("BitwiseNot")
def bitwise_not(b: Builder, node: Node) -> Made:
    x, count, signed = _integer(node)
    return b.op(ops.Sub, b.number(-1 if signed else 2**count - 1, x.dtype), x)


@reads("BitShift", known="direction", refuses=only("direction", "LEFT", "RIGHT"))
def bit_shift(b: Builder, node: Node) -> Made:
    """x times or over a power of two; by a negative number or all bits, 0 or the sign."""
    x, count, signed = _integer(node)
    by = b.cast(node.input(1), "i64")
    by = b.where(b.op(ops.Lt, by, 0), count, by) if signed or count == 64 else by
    top = count - 1 - signed  # the largest power that the dtype holds
    powers = b.constant(sizes(*(2**i for i in range(top + 1))), x.dtype, (top + 1,))
    power = b.op(ops.Gather, powers, b.op(ops.Minimum, by, top), dim=0)
    within = b.op(ops.Le, by, top)
    if node.text("direction", "") == "LEFT":
        moved = b.op(ops.Mul, x, power)
        if not signed:
            return b.where(within, moved, 0)
        lowest = b.op(ops.Mul, b.op(ops.Mul, x, 2**top), 2)
        return b.where(within, moved, b.where(b.op(ops.Eq, by, top + 1), lowest, 0))
    sign = b.op(ops.Neg, b.cast(b.op(ops.Lt, x, 0), x.dtype)) if signed else 0
    return b.where(within, b.op(ops.FloorDiv, x, power), sign)


@reads("Hardmax", known="axis")
def hardmax(b: Builder, node: Node) -> Made:
    """1 at the first of the largest elements along an axis, 0 elsewhere."""
    x = node.shaped(0, 1)
    axis = node.axis(x.ndim, -1)
    place = b.op(ops.Argmax, x, dim=axis, keep=True)
    numbers = b.value(ops.Iota(size=x.shape[axis], dtype=place.dtype))
    numbers = b.reshaped(numbers, (x.shape[axis], *(1,) * (x.ndim - axis - 1)))
    return b.cast(b.op(ops.Eq, place, numbers), x.dtype)


@reads("LpNormalization", known="axis p")
def lp_normalization(b: Builder, node: Node) -> Made:
    """x over its norm along an axis; 0 where that is 0."""
    x, p = node.shaped(0, 1), node.integer("p", 2)
    if p not in (1, 2):
        raise Error(f"LpNormalization has p={p}; expected 1 or 2")
    powers = b.op(ops.Abs, x) if p == 1 else b.op(ops.Mul, x, x)
    norm = b.op(ops.ReduceSum, powers, dims=(node.axis(x.ndim, -1),), keep=True)
    norm = norm if p == 1 else b.op(ops.Sqrt, norm)
    return b.where(b.op(ops.Eq, norm, 0), 0, b.op(ops.Div, x, norm))


@reads("DepthToSpace", "SpaceToDepth", known="blocksize mode")
def blocks(b: Builder, node: Node) -> Made:
    """Channels [B, C * n², H, W] as blocks of positions [B, C, H * n, W * n], and the reverse.

    In the mode DCR the channels of one position of a block are next to each other, in CRD those of
    one channel of the result.
    """
    x, n, mode = node.shaped(0, 4, 4), node.integer("blocksize", 0), node.text("mode", "DCR")
    batch, channels, rows, columns = x.shape
    if n < 1 or mode not in ("DCR", "CRD"):
        raise Error(f"{node.kind} has blocksize={n}, mode={mode}; expected 1 or more, DCR or CRD")
    value, first = b.get(x), mode == "DCR"
    if node.kind == "DepthToSpace":
        (left,) = _divided(node, [channels], n * n)
        apart = (n, n, left) if first else (left, n, n)
        value = b.reshaped(value, (batch, *apart, rows, columns))
        value = b.transposed(value, (0, 3, 4, 1, 5, 2) if first else (0, 1, 4, 2, 5, 3))
        return b.reshaped(value, (batch, left, rows * n, columns * n))
    height, width = _divided(node, [rows, columns], n)
    value = b.reshaped(value, (batch, channels, height, n, width, n))
    value = b.transposed(value, (0, 3, 5, 1, 2, 4) if first else (0, 1, 3, 5, 2, 4))
    return b.reshaped(value, (batch, channels * n * n, height, width))


def _divided(node: Node, sizes: list[DimLike], by: int) -> list[DimLike]:
    parts = [exact_divide(size, by) for size in sizes]
    if None in parts:
        shown = ", ".join(map(str, sizes))
        raise Error(f"{node.kind} needs sizes that {by} divides; found {shown}")
    return [part for part in parts if part is not None]
