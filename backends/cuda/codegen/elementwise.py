"""Elements of arithmetic, functions, logic, conversion and quantization."""

from __future__ import annotations

from math import isfinite, isnan

import numpy as np

from irc import ops
from irc.ir.attributes import Number
from irc.ir.core import Op, Value
from irc.ir.dtypes import dtype, numpy_dtype, widened
from irc.ops.quant import QuantizedOp, block_sizes, code_range

from .body import REGISTERS, Body, Index, element

# operation -> its text, with an element of each operand
TEXTS: dict[type[Op], str] = {
    ops.Add: "add({0}, {1})",
    ops.Sub: "sub({0}, {1})",
    ops.Mul: "mul({0}, {1})",
    ops.Div: "{0} / {1}",
    ops.FloorDiv: "floor_div({0}, {1})",
    ops.Mod: "mod({0}, {1})",
    ops.Pow: "pow({0}, {1})",
    ops.Minimum: "minimum({0}, {1})",
    ops.Maximum: "maximum({0}, {1})",
    ops.Abs: "absolute({0})",
    ops.Sign: "sign({0})",
    ops.Reciprocal: "1 / {0}",
    ops.Sqrt: "sqrt({0})",
    ops.Rsqrt: "rsqrt({0})",
    ops.Exp: "exp({0})",
    ops.Log: "log({0})",
    ops.Sin: "sin({0})",
    ops.Cos: "cos({0})",
    ops.Erf: "erf({0})",
    ops.Round: "rint({0})",
    ops.Floor: "floor({0})",
    ops.Ceil: "ceil({0})",
    ops.Sigmoid: "sigmoid({0})",
    ops.Tanh: "tanh({0})",
    ops.Relu: "relu({0})",
    ops.Softplus: "softplus({0})",
    ops.Silu: "silu({0})",
    ops.QuickGelu: "quick_gelu({0})",
    ops.SquaredRelu: "squared_relu({0})",
    ops.Eq: "{0} == {1}",
    ops.Ne: "{0} != {1}",
    ops.Lt: "{0} < {1}",
    ops.Le: "{0} <= {1}",
    ops.Gt: "{0} > {1}",
    ops.Ge: "{0} >= {1}",
    ops.And: "{0} && {1}",
    ops.Or: "{0} || {1}",
    ops.Not: "!{0}",
    ops.Where: "{0} ? {1} : {2}",
}


@element(*TEXTS)
def of_text(body: Body, op: Op, result: int, index: Index) -> str:
    """The text of an operation on elements of its operands, which broadcast."""
    return TEXTS[type(op)].format(*[operand(body, value, index) for value in op.operands])


def operand(body: Body, value: Value, index: Index) -> str:
    """The element of an operand that broadcasts to a result with this index."""
    own = index[len(index) - value.type.ndim :]
    sizes = zip(own, value.type.shape, strict=True)
    return body.element(value, ["0" if size == 1 else i for i, size in sizes])


def register(name: str) -> str:
    """The C type in registers of elements of a dtype."""
    return REGISTERS[name][0]


_SUFFIXES = {"int": "", "long long": "ll", "u32": "u", "u64": "ull"}


def literal(value: Number, name: str) -> str:
    """A number in C, rounded to the dtype."""
    with np.errstate(all="ignore"):
        exact = widened(np.asarray(value).astype(numpy_dtype(name))).item()
    kind = register(name)
    if kind == "bool":
        return "true" if exact else "false"
    if kind in _SUFFIXES:
        suffix = _SUFFIXES[kind]
        least = exact in (-(2**31), -(2**63))
        return f"({exact + 1}{suffix} - 1)" if least else f"({exact}{suffix})"
    if isfinite(exact):
        return f"({exact.hex()}{'f' if kind == 'float' else ''})"
    found = "__uint_as_float(0x7fc00000u)" if isnan(exact) else "__uint_as_float(0x7f800000u)"
    return f"({kind})({'-' if exact < 0 else ''}{found})"


@element(ops.Neg)
def _neg(body: Body, op: Op, result: int, index: Index) -> str:
    x = operand(body, op.operands[0], index)
    name = op.result.type.dtype
    return f"-{x}" if dtype(name).is_float else f"sub(({register(name)})0, {x})"


@element(ops.Gelu)
def _gelu(body: Body, op: ops.Gelu, result: int, index: Index) -> str:
    name = "gelu" if op.approximate == "none" else "gelu_tanh"
    return f"{name}({operand(body, op.x, index)})"


@element(ops.Clip)
def _clip(body: Body, op: ops.Clip, result: int, index: Index) -> str:
    # bounds of narrow floats are rounded to the dtype that the reference computes in
    name = op.x.type.dtype
    found = operand(body, op.x, index)
    wide = "f32" if register(name) == "float" else name
    if op.low is not None:
        found = f"maximum({found}, {literal(op.low, wide)})"
    return found if op.high is None else f"minimum({found}, {literal(op.high, wide)})"


@element(ops.Cast)
def _cast(body: Body, op: ops.Cast, result: int, index: Index) -> str:
    x = operand(body, op.x, index)
    if op.dtype == "bool":
        return f"{x} != 0"
    if op.dtype == "f16" and op.x.type.dtype == "f64":
        return x  # rounded once
    return f"({register(op.dtype)}){x}"


@element(ops.Bitcast)
def _bitcast(body: Body, op: ops.Bitcast, result: int, index: Index) -> str:
    return f"bits_as<{register(op.dtype)}>({operand(body, op.x, index)})"


def _scale_index(body: Body, op: QuantizedOp, index: Index) -> Index:
    """The index of the scale that holds for an element of x."""
    blocks = block_sizes(op.x.type.shape, op.scale.type.shape)
    found: list[str] = []
    for i, size, block in zip(index, op.scale.type.shape, blocks, strict=True):
        assert block is not None, "infer has checked that scales divide x"
        if size == 1 or block == 1:
            found.append("0" if size == 1 else i)
            continue
        of_pack = body.packs.block(i, block) if body.packs else None
        found.append(of_pack or f"{i} / {body.size(block)}")
    return tuple(found)


@element(ops.Dequantize)
def _dequantize(body: Body, op: ops.Dequantize, result: int, index: Index) -> str:
    at = _scale_index(body, op, index)
    found = f"(float){body.element(op.x, index)}"
    if op.zero is not None:
        found = f"sub({found}, (float){body.element(op.zero, at)})"
    return f"mul({found}, (float){body.element(op.scale, at)})"


@element(ops.Quantize)
def _quantize(body: Body, op: ops.Quantize, result: int, index: Index) -> str:
    at = _scale_index(body, op, index)
    found = f"{body.element(op.x, index)} / {body.element(op.scale, at)}"
    if not dtype(op.dtype).is_float:
        found = f"rint({found})"
    if op.zero is not None:
        found = f"add({found}, (float){body.element(op.zero, at)})"
    low, high = (literal(bound, "f32") for bound in code_range(op.dtype))
    return f"({register(op.dtype)})minimum(maximum({found}, {low}), {high})"
