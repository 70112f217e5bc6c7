"""Elementwise operations as ONNX nodes: those of the shared table, and those that differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, log, nan

import numpy as np

from irc import ops
from irc.backends.onnx.emitter import TABLE, Emitter, Flat, Lowered
from irc.backends.onnx.graph import DTYPES, Attribute
from irc.backends.onnx.kernels import WITHOUT_F64, signed
from irc.ir.core import Op
from irc.ir.dtypes import dtype, integer_range, is_float, largest, lossless
from irc.onnx_format.operators import ELEMENTWISE, Row

# where 8-bit floats overflow
_OVERFLOW = {"f8e4m3": float(np.nextafter(np.float32(464), np.float32(inf))), "f8e5m2": 61440.0}


def needs_f32(op: Op) -> str | None:
    """Refuses f64 where ONNX Runtime computes in f32 only."""
    if any(v.type.dtype == "f64" for v in (*op.operands, *op.results)):
        return "has no f64 kernel in ONNX Runtime; cast to f32"
    return None


def apply(
    e: Emitter, kind: str, dtype: str, inputs: Sequence[str], *rest: str, **attributes: Attribute
) -> str:
    """A node whose result has the dtype of its `inputs`, in a signed type where it has no kernel.

    `rest` are the following inputs, which are not converted, such as axes.
    """
    dtype = e.dtype(dtype)
    if dtype not in e.missing.get(kind, ()):
        return e.add(kind, *inputs, *rest, **attributes)
    wide = [name and e.cast(name, signed(dtype)) for name in inputs]
    return e.cast(e.add(kind, *wide, *rest, **attributes), dtype)


def select(e: Emitter, condition: str, x: str, y: str, dtype: str) -> str:
    """`x` where the condition holds, else `y`; both of an IR dtype."""
    dtype = e.dtype(dtype)
    if dtype not in e.missing.get("Where", ()):
        return e.add("Where", condition, x, y)
    wide = (e.cast(name, signed(dtype)) for name in (x, y))
    return e.cast(e.add("Where", condition, *wide), dtype)


def ordered(e: Emitter, x: str, dtype: str) -> str:
    """Integers in a signed type, in the same order: those of u64 less 2^63."""
    x = e.add("Add", x, e.number(1 << 63, dtype)) if dtype == "u64" else x
    return x if dtype == "i64" else e.cast(x, signed(dtype))


def aligned(e: Emitter, op: Op) -> tuple[list[str], Callable[[str], str | Flat]]:
    """The operands' names, and what makes the result of a name.

    All are matrices where one of them is one already and the others are of the same shape, or
    vectors and scalars, which broadcast either way.
    """
    shape = op.result.type.shape
    fits = all(v.type.shape == shape or v.type.ndim < 2 for v in op.operands)
    if not fits or not any(e.is_flat(v) for v in op.operands):
        return [e.get(v) for v in op.operands], lambda name: name
    return [e.flat(v) if v.type.ndim > 1 else e.get(v) for v in op.operands], Flat


def _row(row: Row) -> Callable[[Emitter, Op], Lowered]:
    """The lowering to one node of the same meaning."""

    def lower(e: Emitter, op: Op) -> Lowered:
        names, result = aligned(e, op)
        kind = op.operands[0].type.dtype
        return result(apply(e, row.kind, kind, names, **row.to_onnx(op)))

    return lower


for _cls, _each in ELEMENTWISE.items():
    TABLE.lower(_cls, unless=needs_f32 if _each.kind in WITHOUT_F64 else None)(_row(_each))


def larger(e: Emitter, x: str, y: str, dtype: str, less: bool = False) -> str:
    """The larger of two numbers, or the smaller.

    For i64 and u64 by comparison: ONNX Runtime 1.31 takes Max, Min and Clip by the low 32 bits
    where the high ones are equal.
    """
    if dtype not in ("i64", "u64"):
        return apply(e, "Min" if less else "Max", dtype, [x, y])
    return select(e, e.add("Less" if less else "Greater", x, y), x, y, dtype)


@TABLE.lower(ops.Maximum, ops.Minimum)
def extreme(e: Emitter, op: ops.Maximum | ops.Minimum) -> Lowered:
    """Max or Min; Where over a comparison for i64 and u64."""
    (x, y), result = aligned(e, op)
    return result(larger(e, x, y, op.x.type.dtype, less=isinstance(op, ops.Minimum)))


@TABLE.lower(ops.Ne)
def not_equal(e: Emitter, op: ops.Ne) -> Lowered:
    """Equal and Not; IsNaN of a float and itself, which TensorRT's fused attention needs."""
    names, result = aligned(e, op)
    if op.x is op.y and dtype(op.x.type.dtype).is_float:
        return result(e.add("IsNaN", names[0]))
    return result(e.add("Not", e.add("Equal", *names)))


@TABLE.lower(ops.Rsqrt)
def rsqrt(e: Emitter, op: ops.Rsqrt) -> Lowered:
    """Sqrt and Reciprocal."""
    names, result = aligned(e, op)
    return result(e.add("Reciprocal", e.add("Sqrt", *names)))


@TABLE.lower(ops.Mod)
def mod(e: Emitter, op: ops.Mod) -> Lowered:
    """Mod, whose sign is corrected for floats."""
    (x, y), result = aligned(e, op)
    if not dtype(op.x.type.dtype).is_float:
        return result(e.add("Mod", x, y))
    rest, opposed = _remainder(e, op, x, y)
    return result(e.add("Where", opposed, e.add("Add", rest, y), rest))


def _remainder(e: Emitter, op: ops.Mod | ops.FloorDiv, x: str, y: str) -> tuple[str, str]:
    """The remainder of floats with the sign of x, and where that is not the sign of y."""
    rest = e.add("Mod", x, y, fmod=1)
    signs = e.add("Mul", e.add("Sign", rest), e.add("Sign", y))
    return rest, e.add("Less", signs, e.number(0, op.x.type.dtype))


@TABLE.lower(ops.FloorDiv)
def floor_div(e: Emitter, op: ops.FloorDiv) -> Lowered:
    """Div of what Mod leaves to be divided, less 1 where the signs of floats differ."""
    (x, y), result = aligned(e, op)
    kind = op.x.type.dtype
    if not dtype(kind).is_float:
        return result(e.add("Div", e.add("Sub", x, e.add("Mod", x, y)), y))
    rest, opposed = _remainder(e, op, x, y)
    towards_zero = e.add("Round", e.add("Div", e.add("Sub", x, rest), y))
    below = e.add("Sub", towards_zero, e.number(1, kind))
    quotient = e.add("Where", opposed, below, towards_zero)
    by_zero = e.add("Equal", y, e.number(0, kind))
    return result(e.add("Where", by_zero, e.add("Div", x, y), quotient))


@TABLE.lower(ops.Silu)
def silu(e: Emitter, op: ops.Silu) -> Lowered:
    """Sigmoid and Mul, which ONNX Runtime fuses; its Swish falls apart into four kernels."""
    (x,), result = aligned(e, op)
    return result(e.add("Mul", x, e.add("Sigmoid", x)))


@TABLE.lower(ops.Clip)
def clip(e: Emitter, op: ops.Clip) -> Lowered:
    """Clip; Where over comparisons for i64 and u64."""
    (x,), result = aligned(e, op)
    kind = op.x.type.dtype
    low, high = (e.number(b, kind) if b is not None else "" for b in (op.low, op.high))
    if kind not in ("i64", "u64") and low and high:
        return result(apply(e, "Clip", kind, [x, low, high]))
    x = larger(e, x, low, kind) if low else x
    return result(larger(e, x, high, kind, less=True) if high else x)


@TABLE.lower(ops.Where)
def where(e: Emitter, op: ops.Where) -> Lowered:
    """Where."""
    (condition, x, y), result = aligned(e, op)
    return result(select(e, condition, x, y, op.x.type.dtype))


@TABLE.lower(ops.Cast)
def cast(e: Emitter, op: ops.Cast) -> Lowered:
    """Cast to the dtype that the result is computed in, and first to a narrower one of its own.

    f64 becomes f16 through f32.
    """
    (x,), result = aligned(e, op)
    computed = e.dtype(op.dtype)
    if not e.rounds_to(op.dtype) or lossless(op.x.type.dtype, op.dtype):
        return result(x if computed == e.dtype(op.x) else e.add("Cast", x, to=DTYPES[computed]))
    if op.dtype in ("f16", "bf16"):
        return result(e.add("Cast", e.add("Cast", x, to=DTYPES[op.dtype]), to=DTYPES[computed]))
    wide = "f32" if is_float(op.dtype) else "i32"
    x = x if e.dtype(op.x) == wide else e.add("Cast", x, to=DTYPES[wide])
    if op.dtype in ("i4", "u4"):
        return result(_low_half(e, x, op.dtype))
    if op.dtype == "f8e8m0":
        return result(_nearest_power(e, x))
    finite = e.expanding > 0  # they clip first
    if op.dtype == "f4e2m1":
        return result(_nearest_f4(e, x, finite))
    return result(_nearest_f8(e, x, op.dtype, finite or _is_clipped(op.x.producer, op.dtype)))


@TABLE.lower(ops.Bitcast)
def bitcast(e: Emitter, op: ops.Bitcast) -> Lowered:
    """BitCast, of opset 26."""
    (x,), result = aligned(e, op)
    return result(e.add("BitCast", x, to=DTYPES[op.dtype]))


def _is_clipped(op: Op | None, dtype: str) -> bool:
    """Whether an operation makes no number that is too large for a dtype."""
    bounds = (op.low, op.high) if isinstance(op, ops.Clip) else (None,)
    return all(bound is not None and abs(bound) <= largest(dtype) for bound in bounds)


def _low_half(e: Emitter, x: str, dtype: str) -> str:
    """i32 modulo 16, as i4 or u4."""
    least = integer_range(dtype)[0]
    x = e.add("Sub", x, e.number(least, "i32")) if least else x
    x = e.add("Mod", x, e.number(16, "i32"))
    x = e.add("Add", x, e.number(least, "i32")) if least else x
    return e.add("Cast", x, to=DTYPES[e.dtype(dtype)])


def _nearest_f8(e: Emitter, x: str, dtype: str, finite: bool) -> str:
    """The nearest number of f8e4m3 or f8e5m2; else infinity, or NaN where there is none.

    ONNX Runtime 1.31 rounds some numbers right above the largest one wrongly.
    """
    if not finite:
        large = e.add("GreaterOrEqual", e.add("Abs", x), e.number(_OVERFLOW[dtype], "f32"))
        x = e.add("Where", large, e.add("Mul", x, e.number(inf, "f32")), x)
    return e.add("Cast", e.add("Cast", x, to=DTYPES[dtype], saturate=0), to=DTYPES["f32"])


def _nearest_f4(e: Emitter, x: str, finite: bool) -> str:
    """The nearest number of f4e2m1, halves to even codes, -0 for NaN; its steps are 0.5, from 2 on
    1, from 4 on 2."""
    size, step = e.add("Abs", x), e.number(2.0, "f32")
    for bound, finer in ((4.0, 1.0), (2.0, 0.5)):
        below = e.add("Less", size, e.number(bound, "f32"))
        step = e.add("Where", below, e.number(finer, "f32"), step)
    rounded = e.add("Mul", e.add("Round", e.add("Div", x, step)), step)
    rounded = e.add("Clip", rounded, e.number(-6.0, "f32"), e.number(6.0, "f32"))
    return rounded if finite else e.add("Where", e.add("IsNaN", x), e.number(-0.0, "f32"), rounded)


def _nearest_power(e: Emitter, x: str) -> str:
    """The nearest power of two, halves up, and NaN where there is none; the rounded logarithm is
    right or one off."""
    above = e.add("Greater", x, e.number(0.0, "f32"))
    below = e.add("Less", x, e.number(1.5 * 2.0**127, "f32"))
    x = e.add("Max", x, e.number(2.0**-127, "f32"))
    near = e.add("Round", e.add("Mul", e.add("Log", x), e.number(1 / log(2), "f32")))
    power = e.add("Pow", e.number(2.0, "f32"), e.add("Min", near, e.number(127.0, "f32")))
    for test, bound, factor in (("Less", 0.75, 0.5), ("GreaterOrEqual", 1.5, 2.0)):
        off = e.add(test, x, e.add("Mul", power, e.number(bound, "f32")))
        power = e.add("Where", off, e.add("Mul", power, e.number(factor, "f32")), power)
    return e.add("Where", e.add("And", above, below), power, e.number(nan, "f32"))


@TABLE.lower(ops.Constant)
def constant(e: Emitter, op: ops.Constant) -> Lowered:
    """An initializer."""
    return e.graph.constant(e.rounded(op.evaluate(), op.dtype))


@TABLE.lower(ops.Full)
def full(e: Emitter, op: ops.Full) -> Lowered:
    """ConstantOfShape, or an initializer for a scalar."""
    if op.shape:
        return e.filled(op.value, op.shape, op.dtype)
    return e.graph.constant(e.rounded(op.value, op.dtype))


@TABLE.lower(ops.Iota)
def iota(e: Emitter, op: ops.Iota) -> Lowered:
    """Range, and Cast unless it is i64."""
    numbers = e.iota(op.size)
    if op.dtype in ("f16", "bf16") and e.rounds_to(op.dtype):
        numbers = e.cast(numbers, op.dtype)
    return e.cast(numbers, e.dtype(op.dtype)) if op.dtype != "i64" else numbers
