"""Which products cuBLASLt computes, and which operations around them are part of its call.

A call takes in a bias or a residual that is added to the product, then relu; and the dequantize
operations of 8-bit floats in front of it, so that it multiplies the codes. It rounds its result
once, where separate operations round after each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from irc import ops
from irc.ir.core import Op, Value, Weight
from irc.ir.dims import Dim, DimLike, Shape, bind
from irc.ir.dims import product as count
from irc.ir.dtypes import numpy_dtype
from irc.ir.types import TensorType
from irc.ops.shapes import shape_text
from irc.weights import Cast, RepeatedRef

from ..plan.product import Product, Settings
from ..plan.template import CallTemplate, Fused, Sizes, fusion
from .norms import norm_of_sum
from .streaming.choices import target

_DTYPES = ("f32", "f16", "bf16")
_CODES = "f8e4m3"
_MULTIPLE = 16  # of the sizes of products of codes
_FLAGS = ("bias", "residual", "x_scale", "weight_scale")
_ORDER = ("x", "weight", *_FLAGS)

Parts: TypeAlias = Mapping[str, Value]
Words: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """A product with what it reads by name, its sizes, and other fields of `Product`.

    The last of `operations` makes `writes`; the others have no other users.
    """

    reads: Parts
    writes: Value
    operations: tuple[Op, ...]
    sizes: Mapping[str, DimLike]  # batch, rows, columns, inner
    words: Words = field(default_factory=dict[str, Any])

    def product(self, sizes: Sizes) -> Product:
        """The product at given sizes of the symbols."""
        fields: dict[str, Any] = {name: _number(size, sizes) for name, size in self.sizes.items()}
        fields |= {name: name in self.reads for name in _FLAGS} | self.words
        return Product(self.reads["x"].type.dtype, self.writes.type.dtype, **fields)

    def template(self) -> CallTemplate:
        """The call of the library; its reads are in the order of the product's operands."""

        def settings(sizes: Sizes) -> Settings:
            return self.product(sizes).settings()

        reads = tuple(self.reads[name] for name in _ORDER if name in self.reads)
        return CallTemplate(
            "cublaslt", "product", reads, (self.writes,), settings, operations=self.operations
        )


@fusion(ops.Linear, ops.Matmul, order=1)
def library_product(op: Op, sizes: Sizes) -> Fused | str | None:
    """The call of cuBLASLt for a product with what follows it, or why there is none."""
    return _fused(library_call(op, sizes), sizes)


@fusion(ops.AddRmsNorm, order=1)
def library_product_with_norm(op: Op, sizes: Sizes) -> Fused | str | None:
    """The call for a product and the sum, then a launch of the norm alone."""
    assert isinstance(op, ops.AddRmsNorm)
    for value, residual in ((op.x, op.residual), (op.residual, op.x)):
        made = value.producer
        if not isinstance(made, ops.Linear | ops.Matmul) or _only_user(value) is not op:
            continue
        call = library_call(made, sizes)
        if isinstance(call, Call):
            reads = {**call.reads, "residual": residual}
            call = replace(_followed(call, op), reads=reads, writes=op.results[1])
        found = _fused(call, sizes)
        if not isinstance(found, Fused):
            return found
        return Fused((*found.templates, norm_of_sum(op)), found.covers)
    return None


def _fused(call: Call | str, sizes: Sizes) -> Fused | str | None:
    if isinstance(call, str):
        return call
    product = call.product(sizes)
    if product.is_empty:
        return None
    if not product.inner:
        return "cuBLASLt does not sum over 0 elements"
    return Fused((call.template(),), call.operations)


def library_call(op: Op, sizes: Sizes) -> Call | str:
    """The call for a linear or matmul and the operations around it, or why there is none."""
    call = _of_codes(op) if isinstance(op, ops.Linear) else None
    if call is not None and _divides(call.product(sizes)):
        return _with_epilogue(call)
    if op.operands[0].type.dtype not in _DTYPES:
        return f"cuBLASLt is for {', '.join(_DTYPES)}, not {op.operands[0].type.dtype}"
    plain = _linear(op) if isinstance(op, ops.Linear) else _matmul(op)
    return plain if isinstance(plain, str) else _with_epilogue(plain)


def _divides(product: Product) -> bool:
    """Whether the sizes are those that products of codes may have."""
    return product.columns % _MULTIPLE == 0 and product.inner % _MULTIPLE == 0


def _linear(op: ops.Linear) -> Call:
    reads: dict[str, Value] = {"x": op.x, "weight": op.weight}
    if op.bias is not None:
        reads["bias"] = op.bias
    columns, inner = op.weight.type.shape
    rows = count(op.x.type.shape[:-1])
    sizes = {"batch": 1, "rows": rows, "columns": columns, "inner": inner}
    return Call(reads, op.result, (op,), sizes)


def _matmul(op: Op) -> Call | str:
    assert isinstance(op, ops.Matmul)
    x, y = op.x.type.shape, op.y.type.shape
    (x_batch, rows, inner), (y_batch, columns) = (x[:-2], *x[-2:]), (y[:-2], y[-1])
    sizes: dict[str, DimLike] = {"batch": 1, "rows": rows, "columns": columns, "inner": inner}
    weight, transposed = untransposed(op.y)
    words: Words = {"transposed": transposed}
    if count(y_batch) == 1:  # one weight: the batch of x are more rows
        sizes["rows"] = rows * count(x_batch)
    elif count(x_batch) == 1:
        sizes["batch"], words["x_shared"] = count(y_batch), True
    elif _without_ones(x_batch) == _without_ones(y_batch):
        sizes["batch"] = count(y_batch)
    else:
        return f"cuBLASLt does not broadcast {shape_text(x_batch)} against {shape_text(y_batch)}"
    return Call({"x": op.x, "weight": weight}, op.result, (op,), sizes, words)


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


def _of_codes(op: ops.Linear) -> Call | None:
    """The call that multiplies the codes of 8-bit floats; None where there are none such."""
    x, weight = op.x.producer, op.weight.producer
    if not isinstance(x, ops.Dequantize) or not isinstance(weight, ops.Dequantize):
        return None
    if x.x.type.dtype != _CODES or weight.x.type.dtype != _CODES or op.x.type.dtype == "f32":
        return None
    found = _scales(x, weight)
    if found is None:
        return None
    scales, words = found
    capability = target().capability
    if capability != 90 if words["scales"] == "rows" else capability < 89:
        return None  # cuBLASLt has no such products there
    plain = _linear(op)
    return replace(
        plain, reads={**plain.reads, "x": x.x, "weight": weight.x, **scales}, words=words
    )


def _scales(x: ops.Dequantize, weight: ops.Dequantize) -> tuple[Parts, Words] | None:
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
    by_rows = x.scale.type.shape == (*x.x.type.shape[:-1], 1)
    columns = weight.x.type.shape[0]
    parts = _in_f32({"x_scale": x.scale, "weight_scale": _repeated(weight.scale, columns)})
    by_columns = parts is not None and parts["weight_scale"].type.shape == (columns, 1)
    return (parts, {"scales": "rows"}) if parts and by_rows and by_columns else None


def _repeated(scale: Value, count: DimLike) -> Value:
    """A scale [count, 1] for every row of a weight from one for all, if a weight holds it."""
    if not isinstance(scale, Weight) or scale.type.shape != (1, 1) or not isinstance(count, int):
        return scale
    kind = TensorType(scale.type.dtype, (count, 1))
    return Weight(kind, f"{scale.name}.{count}", RepeatedRef(scale.ref, (count, 1), (count, 1)))


def _in_f32(scales: Parts) -> Parts | None:
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


def _with_epilogue(call: Call) -> Call:
    """The call with the operations behind it that it can do, too."""
    add = _only_user(call.writes)
    if isinstance(add, ops.Add):
        call = _with_addend(call, add)
    relu = _only_user(call.writes)
    if isinstance(relu, ops.Relu):
        call = _followed(call, relu)
        call = replace(call, words={**call.words, "activation": "relu"})
    return call


def _with_addend(call: Call, add: ops.Add) -> Call:
    addend = add.y if add.x is call.writes else add.x
    kind = call.writes.type
    if addend.type.shape == kind.shape[-1:] and "bias" not in call.reads and kind.ndim > 1:
        return replace(_followed(call, add), reads={**call.reads, "bias": addend})
    if addend.type.shape == kind.shape and not _takes_in(addend, add, call.operations[-1]):
        return replace(_followed(call, add), reads={**call.reads, "residual": addend})
    return call


def _takes_in(value: Value, add: ops.Add, op: Op) -> bool:
    """Whether the addition is part of the call that makes `value`: the later of both products."""
    other = value.producer
    if not isinstance(other, ops.Linear | ops.Matmul) or _only_user(value) is not add:
        return False
    if other.operands[0].type.dtype not in _DTYPES:
        return False
    later: Op | None = op
    while later is not None and later is not other:
        later = later.next
    return later is other


def _followed(call: Call, op: Op) -> Call:
    return replace(call, writes=op.results[0], operations=(*call.operations, op))


def _only_user(value: Value) -> Op | None:
    """The operation that uses a value, if there is one, which uses it once."""
    ((user, uses),) = value.users.items() if len(value.users) == 1 else ((None, 0),)
    return user if uses == 1 else None


def _number(size: DimLike, sizes: Sizes) -> int:
    found = bind(size, sizes)
    assert not isinstance(found, Dim), f"{found} has no size"
    return found
