"""Arithmetic, comparison, activations, selection, conversion: what differs between ONNX and irc.

Inverse and hyperbolic functions and bits of integers are made of a few operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, reduce

import numpy as np

from irc import ops
from irc.errors import Error
from irc.frontends.onnx.builder import Builder, ImportedValue, Node, Operand, sizes
from irc.frontends.onnx.files import DTYPES
from irc.frontends.onnx.fold import scalar
from irc.frontends.onnx.quantized import float_product
from irc.frontends.onnx.rules import MICROSOFT, Results, Rule, imports, only, produced_by
from irc.ir.core import Op
from irc.ir.dtypes import dtype as dtype_called
from irc.ir.dtypes import is_float, largest, numpy_dtype

_SATURATED = ("f8e4m3", "f8e5m2", "f4e2m1")
_ROUND_MODES = {"up": 1.5 - 2.0**-23, "down": 0.75, "nearest": 1.0}
_VARIADIC: dict[str, type[Op]] = {
    "Min": ops.Minimum,
    "Max": ops.Maximum,
    "Sum": ops.Add,
    "Mean": ops.Add,
}
_LARGE = 2.0**30  # from here on, 1 more or less makes no difference to a logarithm
# the arc tangent of x in -tan(pi/8) .. tan(pi/8) is x + x * z * polynomial(z), z = x * x (Cephes)
_ARC_TANGENT = (8.05374449538e-2, -1.38776856032e-1, 1.99777106478e-1, -3.33329491539e-1)


def polynomial(b: Builder, x: ImportedValue, *factors: float) -> ImportedValue:
    """The sum of powers of x times factors, that of the highest power first."""
    total = x * factors[0]
    for factor in factors[1:-1]:
        total = (total + factor) * x
    return total + factors[-1]


@imports("Mul")
def multiply(b: Builder, node: Node) -> Results:
    """x * y, and Silu where y is the sigmoid of x."""
    x, y = node.input(0), node.input(1)
    for one, other in ((x, y), (y, x)):
        sigmoid = produced_by(other, "Sigmoid")
        if sigmoid is not None and sigmoid.input(0).value is one.value is not None:
            return b.op(ops.Silu, one)
    return x * y


@imports("Div")
def divide(b: Builder, node: Node) -> Results:
    """x / y, of integers rounded towards zero."""
    x, y = node.input(0), node.input(1)
    if is_float(x.dtype):
        return x / y
    if dtype_called(x.dtype).kind == "uint":
        return x // y
    # floor_div rounds down: a dividend of the other sign is moved towards zero
    return (x + b.where(_opposed(b, x, y), y - b.op(ops.Sign, y), 0)) // y


def _opposed(b: Builder, x: ImportedValue, y: ImportedValue) -> ImportedValue:
    """Whether two integers differ in sign."""
    return b.op(ops.Ne, x < 0, y < 0)


@imports("Min", "Max", "Sum", "Mean")
def variadic(b: Builder, node: Node) -> Results:
    """The minimum, maximum, sum or mean of one tensor or several."""
    count = len(node.inputs)
    total = reduce(partial(b.op, _VARIADIC[node.kind]), map(node.input, range(count)))
    return total / count if node.kind == "Mean" and count > 1 else total


@imports("Xor")
def exclusive(b: Builder, node: Node) -> Results:
    """The elements in which two tensors of bool differ."""
    x, y = node.input(0), node.input(1)
    if {x.dtype, y.dtype} != {"bool"}:
        raise Error(f"Xor takes bool operands, found {x.dtype} and {y.dtype}")
    return b.op(ops.Ne, x, y)


@imports("Pow")
def power(b: Builder, node: Node) -> Results:
    """x ** y, of which squares and square roots are simpler operations."""
    x, y = node.input(0), node.input(1)
    exponent = scalar(y) if y.ndim <= x.ndim else None
    if exponent == 2:
        return x * x
    if is_float(x.dtype):
        return b.op(ops.Sqrt, x) if exponent == 0.5 else b.op(ops.Pow, x, b.cast(y, x.dtype))
    # in f64 the powers of integers are exact up to 2**53, and the result is rounded towards zero
    return b.cast(b.op(ops.Pow, b.cast(x, "f64"), b.cast(y, "f64")), x.dtype)


@imports("Mod", attributes="fmod")
def mod(b: Builder, node: Node) -> Results:
    """The rest of a division: of the sign of y, and with `fmod` of the sign of x."""
    x, y = node.input(0), node.input(1)
    if not node.integer("fmod", 0):
        return x % y
    if not is_float(x.dtype):  # whose absolute value may overflow
        rest = x % y
        moves = b.op(ops.Ne, rest, 0) & _opposed(b, x, y)
        return b.where(moves, rest - y, rest)
    return b.op(ops.Sign, x) * (abs(x) % abs(y))


@imports("IsInf", attributes="detect_negative detect_positive")
def is_inf(b: Builder, node: Node) -> Results:
    """x = inf, -inf or both, by the attributes."""
    x = node.input(0)
    negative, positive = (node.integer(f"detect_{n}", 1) for n in ("negative", "positive"))
    if negative and positive:
        return b.op(ops.Eq, abs(x), math.inf)
    if not negative and not positive:
        return b.op(ops.Full, value=False, shape=x.shape, dtype="bool")
    return b.op(ops.Eq, x, -math.inf if negative else math.inf)


@imports("Dropout", attributes="seed ratio")
def dropout(b: Builder, node: Node) -> Results:
    """x as it is, and a mask that keeps everything."""
    if node.has(2) and scalar(node.optional(2)) is not False:
        raise Error("Dropout drops at random where training_mode is true; export for inference")
    x = node.input(0)
    return [x, b.op(ops.Full, value=True, shape=x.shape, dtype="bool")][: len(node.outputs)]


@imports("Clip", attributes="min max")
def clip(b: Builder, node: Node) -> Results:
    """min(max(x, low), high), of which either bound may be absent; the upper one wins."""
    x, bounds = node.input(0), [node.optional(i) for i in (1, 2)]
    limits = [scalar(bound) for bound in bounds if bound is not None]
    if all(isinstance(n, (int, float)) for n in limits) and limits == sorted(limits):
        kind = float if is_float(x.dtype) else int
        low, high = (None if bound is None else kind(scalar(bound)) for bound in bounds)
        return b.op(ops.Clip, x, low=low, high=high) if limits else x
    for cls, bound in zip((ops.Maximum, ops.Minimum), bounds, strict=True):
        x = x if bound is None else b.op(cls, x, bound)
    return x


def _target(node: Node) -> str:
    target = DTYPES.get(node.integer("to", 1))
    if target is None:
        raise Error(
            f"{node.kind} to the ONNX dtype {node.integer('to', 1)}, which irc does not have"
        )
    return target


@imports("BitCast", attributes="to")
def bit_cast(b: Builder, node: Node) -> Results:
    """Between integers of one width, and of bool, Cast keeps the bits."""
    x, target = node.input(0), _target(node)
    source, result = dtype_called(x.dtype), dtype_called(target)
    if source.bits == result.bits and result.is_integer and not source.is_float:
        return b.cast(x, target)
    return x if source is result else b.op(ops.Bitcast, x, dtype=target)


def _converted(b: Builder, node: Node, target: str) -> Results:
    x = node.input(0)
    if x.dtype == target:
        return x
    codes = produced_by(x, "MatMulInteger") or produced_by(x, "ConvInteger")
    if codes is not None and target == "f32":
        return float_product(b, codes)
    keeps_values = np.can_cast(numpy_dtype(x.dtype), numpy_dtype(target), "safe")
    if x.data is not None and x.data.inline is None and keeps_values:
        return b.tensor(x.data, target)
    if target == "f8e8m0":
        return _power_of_two(b, node, x)
    if target in _SATURATED and node.integer("saturate", 1) and is_float(x.dtype):
        top = largest(target)
        x = b.op(ops.Clip, x, low=-top, high=top)
    return b.cast(x, target)


def _power_of_two(b: Builder, node: Node, x: ImportedValue) -> Results:
    """A cast to f8e8m0 as `round_mode` says: a factor moves what irc rounds to the nearest power.

    irc rounds numbers from 1.5 on up to 2, so what becomes 2 starts at 2 with the factor 0.75, and
    right above 1 with the number of f32 before 1.5.
    """
    mode = node.text("round_mode", "up")
    if mode not in _ROUND_MODES:
        raise Error(f"round_mode is one of {', '.join(_ROUND_MODES)}, found {mode}")
    x = b.cast(x, "f32")
    if node.integer("saturate", 1):
        x = b.op(ops.Clip, x, low=2.0**-128, high=2.0**127)
    factor = _ROUND_MODES[mode]
    return b.cast(x if factor == 1 else x * factor, "f8e8m0")


def _swish(b: Builder, x: ImportedValue, alpha: float) -> ImportedValue:
    if alpha == 1:
        return b.op(ops.Silu, x)
    if alpha == 1.702:
        return b.op(ops.QuickGelu, x)
    return x * b.op(ops.Sigmoid, x * alpha)


@imports("Celu", attributes="alpha")
def celu(b: Builder, node: Node) -> Results:
    """max(x, 0) + alpha * (exp(min(x, 0) / alpha) - 1), of a scalar too, unlike ONNX's function."""
    x, alpha = node.input(0), node.real("alpha", 1.0)
    low = b.op(ops.Exp, b.op(ops.Minimum, x, 0) / alpha)
    return b.op(ops.Maximum, x, 0) + (low - 1) * alpha


@imports("Gelu", "BiasGelu", "FastGelu", domain=MICROSOFT)
def gelu(b: Builder, node: Node) -> Results:
    """Gelu of the sum of x and an optional bias, by tanh for FastGelu."""
    x = node.input(0)
    x = x + node.input(1) if node.has(1) else x
    return b.op(ops.Gelu, x, approximate="tanh" if node.kind == "FastGelu" else "none")


def _relu(b: Builder, x: ImportedValue) -> ImportedValue:
    return b.op(ops.Relu, x) if is_float(x.dtype) else b.op(ops.Maximum, x, 0)


def _reciprocal(b: Builder, x: ImportedValue) -> ImportedValue:
    root = produced_by(x, "Sqrt")
    return b.op(ops.Rsqrt, root.input(0)) if root else b.op(ops.Reciprocal, x)


_SHORT: dict[tuple[str, str, str], Rule] = {  # by domain, operator, attributes
    ("", "IsNaN", ""): lambda b, node: b.op(ops.Ne, node.input(0), node.input(0)),
    ("", "Identity", ""): lambda b, node: node.input(0),
    ("", "Relu", ""): lambda b, node: _relu(b, node.input(0)),
    ("", "Reciprocal", ""): lambda b, node: _reciprocal(b, node.input(0)),
    ("", "Where", ""): lambda b, node: b.where(*map(node.input, range(3))),
    ("", "Cast", "to saturate round_mode"): lambda b, node: _converted(b, node, _target(node)),
    ("", "CastLike", "saturate round_mode"): lambda b, node: _converted(
        b, node, node.input(1).dtype
    ),
    ("", "Swish", "alpha"): lambda b, node: _swish(b, node.input(0), node.real("alpha", 1.0)),
    (MICROSOFT, "QuickGelu", "alpha"): lambda b, node: _swish(
        b, node.input(0), node.real("alpha", 1.702)
    ),
}
for (_domain, _kind, _attributes), _rule in _SHORT.items():
    imports(_kind, domain=_domain, attributes=_attributes)(_rule)


def _odd(
    b: Builder, x: ImportedValue, rule: Callable[[Builder, ImportedValue], ImportedValue]
) -> ImportedValue:
    """A function of |x|, with the sign of x."""
    positive = rule(b, abs(x))
    return b.where(x < 0, -positive, positive)


def _log1p(b: Builder, x: ImportedValue) -> ImportedValue:
    """log(1 + x), of small x too: the error of u = 1 + x is that of u - 1 (Kahan)."""
    u = x + 1
    usable = b.op(ops.Ne, u, 1) & (u < math.inf)
    return b.where(usable, b.op(ops.Log, u) * (x / (u - 1)), x)


def _far(b: Builder, x: ImportedValue, near: ImportedValue) -> ImportedValue:
    """log(2 * x) where x is so large that `near` may have overflowed."""
    return b.where(x < _LARGE, near, b.op(ops.Log, x) + math.log(2))


def _asinh(b: Builder, x: ImportedValue) -> ImportedValue:
    """log1p(x + x² / (1 + sqrt(1 + x²))) of positive x."""
    square = x * x
    return _far(b, x, _log1p(b, x + square / (b.op(ops.Sqrt, square + 1) + 1)))


def _acosh(b: Builder, x: ImportedValue) -> ImportedValue:
    """log1p(t + sqrt(t) * sqrt(t + 2)) with t = x - 1; NaN below 1."""
    t = x - 1
    near = _log1p(b, t + b.op(ops.Sqrt, t) * b.op(ops.Sqrt, t + 2))
    return b.where(x < 1, math.nan, _far(b, x, near))


def _cosh(b: Builder, x: ImportedValue) -> ImportedValue:
    """exp(|x|) / 2 + exp(-|x|) / 2, by the root of exp(|x|), which overflows later."""
    root = b.op(ops.Exp, abs(x) * 0.5)
    return root * (root * 0.5) + b.op(ops.Reciprocal, root) / root * 0.5


def _atan(b: Builder, x: ImportedValue) -> ImportedValue:
    """The arc tangent of positive x, by that of x, (x - 1) / (x + 1) or -1 / x."""
    middle, far = (x > math.tan(n * math.pi / 8) for n in (1, 3))
    t = b.where(far, -b.op(ops.Reciprocal, x), b.where(middle, (x - 1) / (x + 1), x))
    z = t * t
    eighths = b.cast(middle, x.dtype) + b.cast(far, x.dtype)
    return eighths * (math.pi / 4) + (t + t * (polynomial(b, z, *_ARC_TANGENT) * z))


def _asin(b: Builder, x: ImportedValue) -> ImportedValue:
    return _odd(b, x / b.op(ops.Sqrt, (1 - x) * (x + 1)), _atan)


def _acos(b: Builder, x: ImportedValue) -> ImportedValue:
    return _atan(b, b.op(ops.Sqrt, (1 - x) / (x + 1))) * 2


_FUNCTIONS: dict[str, Callable[[Builder, ImportedValue], ImportedValue]] = {
    "Tan": lambda b, x: b.op(ops.Sin, x) / b.op(ops.Cos, x),
    "Sinh": lambda b, x: b.op(ops.Tanh, x) * _cosh(b, x),
    "Cosh": _cosh,
    "Asin": _asin,
    "Acos": _acos,
    "Atan": lambda b, x: _odd(b, x, _atan),
    "Asinh": lambda b, x: _odd(b, x, _asinh),
    "Acosh": _acosh,
    "Atanh": lambda b, x: _odd(b, x, lambda b, x: _log1p(b, (x + x) / (1 - x)) * 0.5),
}


@imports(*_FUNCTIONS)
def function(b: Builder, node: Node) -> Results:
    """A function of one number, computed in f32 or wider."""
    x = node.input(0)
    if not is_float(x.dtype) or (x.dtype == "f64" and node.kind in ("Asin", "Acos", "Atan")):
        raise Error(f"{node.kind} of {x.dtype} has no operation in irc; cast to f32")
    wide = x if x.dtype == "f64" else b.cast(x, "f32")
    return b.cast(_FUNCTIONS[node.kind](b, wide), x.dtype)


_LOGIC: dict[str, type[Op]] = {"And": ops.And, "Or": ops.Or, "Xor": ops.Ne}


def _integer(node: Node) -> tuple[ImportedValue, int, bool]:
    """The first operand, how many bits it has, and whether one is the sign."""
    x = node.input(0)
    kind = dtype_called(x.dtype)
    if not kind.is_integer:
        raise Error(f"{node.kind} takes integers, found {x.dtype}")
    return x, kind.bits, kind.kind == "int"


@imports(*(f"Bitwise{kind}" for kind in _LOGIC))
def bitwise(b: Builder, node: Node) -> Results:
    """Bits along a new dimension, and the sum of those that the result has."""
    x, count, signed = _integer(node)
    last = count - signed  # floor_div by 2 ** last would be by a negative number
    powers = [2**i for i in range(last)]
    rows = (
        powers + powers[-1:] * signed,
        [1] * last + [2] * signed,
        powers + [-(2**last)] * signed,
    )
    first, second, worth = (b.constant(sizes(*row), x.dtype, (count,)) for row in rows)
    operands: list[Operand] = []
    for operand in (x, node.input(1)):
        apart = b.op(ops.Unsqueeze, operand, dims=(operand.ndim,))
        digits = apart // first // second
        operands.append(b.op(ops.Ne, digits % 2, 0))
    bits = b.op(_LOGIC[node.kind.removeprefix("Bitwise")], *operands)
    kept = b.where(bits, b.imported(worth), 0)
    return b.op(ops.ReduceSum, kept, dims=(kept.ndim - 1,))


@imports("BitwiseNot")
def bitwise_not(b: Builder, node: Node) -> Results:
    """-1 - x, and the largest number less x of unsigned integers."""
    x, count, signed = _integer(node)
    return b.number(-1 if signed else 2**count - 1, x.dtype) - x


@imports("BitShift", attributes="direction", refuses=only("direction", "LEFT", "RIGHT"))
def bit_shift(b: Builder, node: Node) -> Results:
    """x times or over a power of two; by a negative number or all bits, 0 or the sign."""
    x, count, signed = _integer(node)
    by = b.cast(node.input(1), "i64")
    by = b.where(by < 0, count, by) if signed or count == 64 else by
    top = count - 1 - signed  # the largest power that the dtype holds
    powers = b.constant(sizes(*(2**i for i in range(top + 1))), x.dtype, (top + 1,))
    power = b.op(ops.Gather, powers, b.op(ops.Minimum, by, top), dim=0)
    within = by <= top
    if node.text("direction") == "LEFT":
        moved = x * power
        if not signed:
            return b.where(within, moved, 0)
        lowest = x * 2**top * 2
        return b.where(within, moved, b.where(b.op(ops.Eq, by, top + 1), lowest, 0))
    sign = -b.cast(x < 0, x.dtype) if signed else 0
    return b.where(within, x // power, sign)
