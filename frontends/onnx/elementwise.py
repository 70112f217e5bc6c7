"""Arithmetic, comparison, activations, selection and conversion, where ONNX and irc differ."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from irc import ops
from irc.errors import Error
from irc.frontends.onnx.builder import Builder
from irc.frontends.onnx.entry import Entry, Node
from irc.frontends.onnx.fold import content_of
from irc.frontends.onnx.quantized import float_product
from irc.frontends.onnx.rules import MICROSOFT, Made, Rule, made_by, reads
from irc.frontends.onnx.tensors import DTYPES
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


def scalar(entry: Entry | None) -> Any:
    """The number that a value is, or that all its elements are; None for anything else."""
    content = content_of(entry)
    if content is None or not content.size:
        return None
    items = content.reshape(-1).tolist()
    return items[0] if all(item == items[0] for item in items) else None


@reads("Mul")
def multiply(b: Builder, node: Node) -> Made:
    """x * y, and Silu where y is the sigmoid of x."""
    x, y = node.input(0), node.input(1)
    for one, other in ((x, y), (y, x)):
        sigmoid = made_by(other, "Sigmoid")
        if sigmoid is not None and sigmoid.input(0).value is one.value is not None:
            return b.op(ops.Silu, one)
    return b.op(ops.Mul, x, y)


@reads("Div")
def divide(b: Builder, node: Node) -> Made:
    x, y = node.input(0), node.input(1)
    if is_float(x.dtype):
        return b.op(ops.Div, x, y)
    if dtype_called(x.dtype).kind == "uint":
        return b.op(ops.FloorDiv, x, y)
    # ONNX rounds towards zero, floor_div down: a dividend of the other sign is moved towards zero
    less = b.op(ops.Sub, y, b.op(ops.Sign, y))
    return b.op(ops.FloorDiv, b.op(ops.Add, x, b.where(_opposed(b, x, y), less, 0)), y)


def _opposed(b: Builder, x: Entry, y: Entry) -> Entry:
    """Whether two integers differ in sign."""
    return b.op(ops.Ne, b.op(ops.Lt, x, 0), b.op(ops.Lt, y, 0))


@reads("Min", "Max", "Sum", "Mean")
def variadic(b: Builder, node: Node) -> Made:
    """The minimum, maximum, sum or mean of one tensor or several."""
    found, count = node.input(0), len(node.inputs)
    for i in range(1, count):
        found = b.op(_VARIADIC[node.kind], found, node.input(i))
    return b.op(ops.Div, found, count) if node.kind == "Mean" and count > 1 else found


@reads("Xor")
def exclusive(b: Builder, node: Node) -> Made:
    """The elements in which two tensors of bool differ."""
    x, y = node.input(0), node.input(1)
    if {x.dtype, y.dtype} != {"bool"}:
        raise Error(f"Xor takes bool operands, found {x.dtype} and {y.dtype}")
    return b.op(ops.Ne, x, y)


@reads("Pow")
def power(b: Builder, node: Node) -> Made:
    """x ** y, of which squares and square roots are simpler operations."""
    x, y = node.input(0), node.input(1)
    exponent = scalar(y) if y.ndim <= x.ndim else None
    if exponent == 2:
        return b.op(ops.Mul, x, x)
    if is_float(x.dtype):
        return b.op(ops.Sqrt, x) if exponent == 0.5 else b.op(ops.Pow, x, b.cast(y, x.dtype))
    # in f64 the powers of integers are exact up to 2**53, and the result is rounded towards zero
    found = b.op(ops.Pow, b.cast(x, "f64"), b.cast(y, "f64"))
    return b.cast(found, x.dtype)


@reads("Mod", known="fmod")
def mod(b: Builder, node: Node) -> Made:
    x, y = node.input(0), node.input(1)
    if not node.integer("fmod", 0):
        return b.op(ops.Mod, x, y)
    if not is_float(x.dtype):  # whose absolute value may overflow
        rest = b.op(ops.Mod, x, y)
        moves = b.op(ops.And, b.op(ops.Ne, rest, 0), _opposed(b, x, y))
        return b.where(moves, b.op(ops.Sub, rest, y), rest)
    # fmod has the sign of the dividend: sign(x) * (|x| mod |y|)
    size = b.op(ops.Mod, b.op(ops.Abs, x), b.op(ops.Abs, y))
    return b.op(ops.Mul, b.op(ops.Sign, x), size)


@reads("IsInf", known="detect_negative detect_positive")
def is_inf(b: Builder, node: Node) -> Made:
    """x = inf, -inf or both, by the attributes."""
    x, negative, positive = (
        node.input(0),
        node.integer("detect_negative", 1),
        node.integer("detect_positive", 1),
    )
    if negative and positive:
        return b.op(ops.Eq, b.op(ops.Abs, x), math.inf)
    if not negative and not positive:
        return b.entry(b.value(ops.Full(value=False, shape=x.shape, dtype="bool")))
    return b.op(ops.Eq, x, -math.inf if negative else math.inf)


@reads("Dropout", known="seed ratio")
def dropout(b: Builder, node: Node) -> Made:
    """x as it is, and a mask that keeps everything."""
    if node.has(2) and scalar(node.optional(2)) is not False:
        raise Error("Dropout drops at random where training_mode is true; export for inference")
    x = node.input(0)
    kept = b.value(ops.Full(value=True, shape=x.shape, dtype="bool")) if node.wants(1) else None
    return [x, kept][: len(node.outputs)]


@reads("Clip", known="min max")
def clip(b: Builder, node: Node) -> Made:
    """min(max(x, low), high), of which either bound may be absent; the upper one wins."""
    x, bounds = node.input(0), [node.optional(i) for i in (1, 2)]
    known = [scalar(entry) for entry in bounds if entry is not None]
    if all(isinstance(n, (int, float)) for n in known) and known == sorted(known):
        kind = float if is_float(x.dtype) else int
        low, high = (None if entry is None else kind(scalar(entry)) for entry in bounds)
        return b.op(ops.Clip, x, low=low, high=high) if known else x
    for cls, bound in zip((ops.Maximum, ops.Minimum), bounds, strict=True):
        x = x if bound is None else b.op(cls, x, bound)
    return x


@reads("Cast", known="to saturate round_mode")
def cast(b: Builder, node: Node) -> Made:
    return _converted(b, node, _target(node))


def _target(node: Node) -> str:
    target = DTYPES.get(node.integer("to", 1))
    if target is None:
        raise Error(
            f"{node.kind} to the ONNX dtype {node.integer('to', 1)}, which irc does not have"
        )
    return target


@reads("BitCast", known="to")
def bit_cast(b: Builder, node: Node) -> Made:
    """Between integers of one width, and of bool, Cast keeps the bits."""
    x, target = node.input(0), _target(node)
    source, result = dtype_called(x.dtype), dtype_called(target)
    if source.bits == result.bits and result.is_integer and not source.is_float:
        return b.cast(x, target)
    return x if source is result else b.op(ops.Bitcast, x, dtype=target)


def _converted(b: Builder, node: Node, target: str) -> Made:
    x = node.input(0)
    if x.dtype == target:
        return x
    codes = made_by(x, "MatMulInteger") or made_by(x, "ConvInteger")
    if codes is not None and target == "f32":
        return float_product(b, codes)
    if x.data is not None and x.data.inline is None and _keeps_values(x.dtype, target):
        return b.entry(b.tensor(x.data, target))
    if target == "f8e8m0":
        return _power_of_two(b, node, x)
    if target in _SATURATED and node.integer("saturate", 1) and is_float(x.dtype):
        top = largest(target)
        x = b.op(ops.Clip, x, low=-top, high=top)
    return b.cast(x, target)


def _power_of_two(b: Builder, node: Node, x: Entry) -> Made:
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
    return b.cast(x if factor == 1 else b.op(ops.Mul, x, factor), "f8e8m0")


def _keeps_values(source: str, target: str) -> bool:
    """Whether a cast keeps every value."""
    return np.can_cast(numpy_dtype(source), numpy_dtype(target), "safe")


def _swish(b: Builder, x: Entry, alpha: float) -> Entry:
    if alpha == 1:
        return b.op(ops.Silu, x)
    if alpha == 1.702:
        return b.op(ops.QuickGelu, x)
    return b.op(ops.Mul, x, b.op(ops.Sigmoid, b.op(ops.Mul, x, alpha)))


@reads("Celu", known="alpha")
def celu(b: Builder, node: Node) -> Made:
    """max(x, 0) + alpha * (exp(min(x, 0) / alpha) - 1), of a scalar too, unlike ONNX's function."""
    x, alpha = node.input(0), node.real("alpha", 1.0)
    low = b.op(ops.Exp, b.op(ops.Div, b.op(ops.Minimum, x, 0), alpha))
    return b.op(ops.Add, b.op(ops.Maximum, x, 0), b.op(ops.Mul, b.op(ops.Sub, low, 1), alpha))


@reads("FastGelu", domain=MICROSOFT)
def fast_gelu(b: Builder, node: Node) -> Made:
    """Gelu by tanh of the sum of x and an optional bias."""
    x = node.input(0)
    x = b.op(ops.Add, x, node.input(1)) if node.has(1) else x
    return b.op(ops.Gelu, x, approximate="tanh")


@reads("Relu")
def relu(b: Builder, node: Node) -> Made:
    """max(x, 0), also of integers."""
    x = node.input(0)
    return b.op(ops.Relu, x) if is_float(x.dtype) else b.op(ops.Maximum, x, 0)


@reads("Reciprocal")
def reciprocal(b: Builder, node: Node) -> Made:
    """1 / x, and Rsqrt where x is a square root."""
    root = made_by(node.input(0), "Sqrt")
    return b.op(ops.Rsqrt, root.input(0)) if root else b.op(ops.Reciprocal, node.input(0))


_SHORT: dict[tuple[str, str, str], Rule] = {  # by domain, operator, attributes
    ("", "IsNaN", ""): lambda b, node: b.op(ops.Ne, node.input(0), node.input(0)),
    ("", "Identity", ""): lambda b, node: node.input(0),
    ("", "Where", ""): lambda b, node: b.where(*map(node.input, range(3))),
    ("", "CastLike", "saturate round_mode"): lambda b, node: _converted(
        b, node, node.input(1).dtype
    ),
    ("", "Swish", "alpha"): lambda b, node: _swish(b, node.input(0), node.real("alpha", 1.0)),
    (MICROSOFT, "QuickGelu", "alpha"): lambda b, node: _swish(
        b, node.input(0), node.real("alpha", 1.702)
    ),
    (MICROSOFT, "Gelu", ""): lambda b, node: b.op(ops.Gelu, node.input(0)),
    (MICROSOFT, "BiasGelu", ""): lambda b, node: b.op(
        ops.Gelu, b.op(ops.Add, node.input(0), node.input(1))
    ),
}
for (_domain, _kind, _known), _rule in _SHORT.items():
    reads(_kind, domain=_domain, known=_known)(_rule)
