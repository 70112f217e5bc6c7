"""Which products cuBLASLt computes.

A call adds a bias and a residual, or applies relu; and it takes the dequantize operations of 8-bit
floats in front of it, so that it multiplies the codes. It rounds its result once, where separate
operations round after each.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from irc import ops
from irc.ir.core import Op, Value, Weight
from irc.ir.dims import DimLike, Shape
from irc.ir.dims import product as count
from irc.ir.dtypes import numpy_dtype
from irc.ir.types import TensorType
from irc.ops.fused_linear import LinearParts
from irc.ops.quantize_rows import Codes, codes_of
from irc.ops.shapes import shape_text
from irc.weights import Cast, RepeatedRef

from ..plan.core import Settings
from ..plan.product import OPTIONAL, SIZES, Product
from ..plan.regime import Regime, Target
from ..plan.template import CallTemplate, Sizes, launches_of
from .kernels import number
from .streaming.choices import MOST_ROWS

_DTYPES = ("f32", "f16", "bf16")
_CODES = "f8e4m3"
_MULTIPLE = 16  # of the sizes of products of codes

Reads: TypeAlias = dict[str, Value]  # by the names of operands of a Product
Fields: TypeAlias = dict[str, Any]  # of a Product: sizes and what is done to the result


@launches_of(ops.Linear, ops.FusedLinear, order=-1)
def product_of_codes(op: ops.Linear | ops.FusedLinear, regime: Regime) -> list[CallTemplate] | None:
    """The call that multiplies the codes of 8-bit floats, in more rows than other kernels take."""
    if regime.bucket(count(op.x.type.shape[:-1]), (MOST_ROWS,)) is not None:
        return None
    call = _linear(op, regime)
    if isinstance(call, str) or call[0]["x"] is op.x:
        return None
    return [_template(op, *call)]


@launches_of(ops.Linear, ops.Matmul, ops.FusedLinear, order=1)
def library_product(
    op: ops.Linear | ops.Matmul | ops.FusedLinear, regime: Regime
) -> list[CallTemplate] | str:
    """The call of cuBLASLt for a product, or why there is none."""
    call = _matmul(op) if isinstance(op, ops.Matmul) else _linear(op, regime)
    if isinstance(call, str):
        return call
    if regime.bucket(call[1]["inner"], (0,)) == 0:
        return "cuBLASLt does not sum over 0 elements"
    return [_template(op, *call)]


def _template(op: Op, reads: Reads, fields: Fields) -> CallTemplate:
    """The call; its reads are in the order of the product's operands."""
    flags: Fields = {name: name in reads for name in OPTIONAL}
    dtypes = reads["x"].type.dtype, op.results[0].type.dtype

    def settings(sizes: Sizes) -> Settings:
        bound: Fields = {name: number(fields[name], sizes) for name in SIZES}
        return Product(*dtypes, **fields | bound | flags).settings()

    names = [name for name in ("x", "weight", *OPTIONAL) if name in reads]
    given = tuple(reads[name] for name in names)
    return CallTemplate("cublaslt", "product", given, op.results, settings, operations=(op,))


def _linear(op: ops.Linear | ops.FusedLinear, regime: Regime) -> tuple[Reads, Fields] | str:
    """What a call reads, and what it computes; or why there is none."""
    parts = LinearParts.of(op)
    if why := _refusal(parts):
        return why
    columns, inner = op.weight.type.shape
    fields: Fields = {"batch": 1, "rows": count(op.x.type.shape[:-1])}
    fields |= {"columns": columns, "inner": inner, "activation": parts.act}
    named = {"x": op.x, "weight": op.weight, "bias": parts.bias, "residual": parts.residual}
    reads = {name: value for name, value in named.items() if value is not None}
    codes = _of_codes(op, regime.target)
    if codes is not None:
        return reads | codes[0], fields | codes[1]
    if op.x.type.dtype not in _DTYPES:
        return f"cuBLASLt is for {', '.join(_DTYPES)}, not {op.x.type.dtype}"
    return reads, fields


def _refusal(parts: LinearParts) -> str:
    """Why no call computes a fused linear, or nothing."""
    if parts.norm is not None or parts.gate is not None or parts.axis:
        return "cuBLASLt has neither a norm in front, nor gates, nor sums over ranks"
    if parts.act not in ("", "relu"):
        return f"cuBLASLt has no {parts.act} as irc defines it"
    if parts.act and parts.residual is not None:
        return f"cuBLASLt applies {parts.act} behind the sum with the residual"
    return ""


def _matmul(op: ops.Matmul) -> tuple[Reads, Fields] | str:
    if op.x.type.dtype not in _DTYPES:
        return f"cuBLASLt is for {', '.join(_DTYPES)}, not {op.x.type.dtype}"
    x, y = op.x.type.shape, op.y.type.shape
    (x_batch, rows, inner), (y_batch, columns) = (x[:-2], *x[-2:]), (y[:-2], y[-1])
    weight, transposed = untransposed(op.y)
    fields: Fields = {"batch": 1, "rows": rows, "columns": columns, "inner": inner}
    fields["transposed"] = transposed
    if count(y_batch) == 1:  # one weight: the batch of x are more rows
        fields["rows"] = rows * count(x_batch)
    elif count(x_batch) == 1:
        fields |= {"batch": count(y_batch), "x_shared": True}
    elif _without_ones(x_batch) == _without_ones(y_batch):
        fields["batch"] = count(y_batch)
    else:
        return f"cuBLASLt does not broadcast {shape_text(x_batch)} against {shape_text(y_batch)}"
    return {"x": op.x, "weight": weight}, fields


def untransposed(y: Value) -> tuple[Value, bool]:
    """(the value whose last two dimensions a transpose exchanges, True), or (y, False)."""
    op = y.producer
    ndim = y.type.ndim
    if isinstance(op, ops.Transpose):
        order = [place % ndim for place in op.order]
        if order == [*range(ndim - 2), ndim - 1, ndim - 2]:
            return op.x, True
    return y, False


def _without_ones(batch: Shape) -> Shape:
    """Leading dimensions without the ones in front, which broadcasting adds."""
    while batch and batch[0] == 1:
        batch = batch[1:]
    return batch


def _of_codes(op: ops.Linear | ops.FusedLinear, target: Target) -> tuple[Reads, Fields] | None:
    """The codes of 8-bit floats that a call multiplies, and their scales; None without such."""
    x, weight = codes_of(op.x), codes_of(op.weight)
    if x is None or weight is None or op.x.type.dtype == "f32":
        return None
    if x.codes.type.dtype != _CODES or weight.codes.type.dtype != _CODES:
        return None
    if any(not isinstance(n, int) or n % _MULTIPLE for n in op.weight.type.shape):
        return None
    scales = _scales(x, weight)
    if scales is None:
        return None
    by_rows, capability = scales[1]["scales"] == "rows", target.capability
    if capability != 90 if by_rows else capability < 89:
        return None  # cuBLASLt has no such products there
    return {"x": x.codes, "weight": weight.codes, **scales[0]}, scales[1]


def _scales(x: Codes, weight: Codes) -> tuple[Reads, Fields] | None:
    """The scales of a product of codes, one for all or one per row of both operands."""
    if count(x.scale.type.shape) == 1 and count(weight.scale.type.shape) == 1:
        factors: dict[str, Value] = {"x_scale": x.scale, "weight_scale": weight.scale}
        alpha = 1.0
        for name, value in list(factors.items()):
            if isinstance(value.producer, ops.Full):
                alpha *= float(numpy_dtype(value.type.dtype).type(value.producer.value))
                del factors[name]
        parts = _in_f32(factors)
        return None if parts is None else (parts, {"scales": "tensor", "alpha": alpha})
    by_rows = x.scale.type.shape == (*x.codes.type.shape[:-1], 1)
    columns = weight.codes.type.shape[0]
    parts = _in_f32({"x_scale": x.scale, "weight_scale": _repeated(weight.scale, columns)})
    by_columns = parts is not None and parts["weight_scale"].type.shape == (columns, 1)
    return (parts, {"scales": "rows"}) if parts and by_rows and by_columns else None


def _repeated(scale: Value, count: DimLike) -> Value:
    """A scale [count, 1] for every row of a weight from one for all, if a weight holds it."""
    if not isinstance(scale, Weight) or scale.type.shape != (1, 1) or not isinstance(count, int):
        return scale
    kind = TensorType(scale.type.dtype, (count, 1))
    return Weight(kind, f"{scale.name}.{count}", RepeatedRef(scale.ref, (count, 1), (count, 1)))


def _in_f32(scales: Reads) -> Reads | None:
    """Scales as cuBLASLt reads them: weights are converted at load, other values not at all."""
    found: dict[str, Value] = {}
    for name, value in scales.items():
        if isinstance(value, Weight) and value.type.dtype != "f32":
            kind = TensorType("f32", value.type.shape, value.type.axes)
            value = Weight(kind, f"{value.name}.f32", value.ref.then(Cast("f32")))
        if value.type.dtype != "f32":
            return None
        found[name] = value
    return found
