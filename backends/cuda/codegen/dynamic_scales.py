"""Scales of dynamic quantization, and what they quantize in the same launch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from irc.ir.core import Op, Value
from irc.ir.dims import product
from irc.ops import Dequantize, DynamicScale, Quantize, RmsNorm
from irc.ops.quant import LARGEST, rounded_down_factor

from ..plan.template import Fused, Sizes, Template, fusion, kernels_of
from .body import FOUR_BITS, REGISTERS, Body
from .kernels import number
from .norms import Normalized, scale_of, scaled
from .rows import Rows, Source, packed
from .streaming.choices import MOST_ROWS


@kernels_of(DynamicScale)
def dynamic_scale(op: DynamicScale, stored: Collection[Value]) -> list[Template]:
    """The largest size of every block, as the scale that maps it to the largest code."""
    return [packed(op, lambda pack: _scales(op, Body(stored), pack)).launch(op)]


def _scales(op: DynamicScale, body: Body, pack: int) -> Rows:
    x = op.x
    *front, blocks = op.results[0].type.shape
    rows = Rows(body, x.type.shape, (-1,), pack=pack)
    if blocks != 1:
        size = op.block or x.type.shape[-1]
        rows = Rows(body, (*front, blocks, size), (-1,), real=x.type.shape)
    with rows.each():
        found = _scale(op, rows, lambda column: body.element(x, rows.index(column)))
        with rows.once():
            body.line(f"store(out0, row, {found});")
    return rows


def _scale(op: DynamicScale, rows: Rows, x: Source) -> str:
    """The scale of a row or block with these elements."""
    body, factor = rows.body, f"{LARGEST[op.dtype]!r}f"
    most = rows.total("float", "0.0f", "Max", lambda column: f"fabsf({x(column)})")
    scale = f"{most} / {factor}"
    if op.scale == "f8e8m0":
        scale = f"{most} == 0.0f ? 1.0f : {most} * {rounded_down_factor(op.dtype)!r}f"
    if op.tensor_scale is not None:
        whole = body.element(op.tensor_scale, ("0",) * op.x.type.ndim)
        scale = f"minimum({scale} / {whole}, {LARGEST['f8e4m3']!r}f)"
    found = body.variable("float", f"{REGISTERS[op.scale][1]}({scale})")
    return body.variable("const float", f"{found} == 0.0f ? 1.0f : {found}")


@fusion(DynamicScale)
def quantized_rows(op: Op, sizes: Sizes) -> Fused | str | None:
    """One launch for a scale per row and what it quantizes, with rms_norm in front.

    It writes the numbers that the codes stand for, which streaming products read, or the codes.
    """
    assert isinstance(op, DynamicScale)
    if op.block not in (0, op.x.type.shape[-1]):
        return "quantization of rows: a row has several scales"
    users = op.result.users
    done = [user for user in users if isinstance(user, Quantize) and user.x is op.x]
    if not done:
        return None
    covers: list[Op] = [op, *done]
    if number(product(op.x.type.shape[:-1]), sizes) <= MOST_ROWS:
        covers += [u for u in users if isinstance(u, Dequantize) and u.x.producer in done]
    norm = op.x.producer
    if not isinstance(norm, RmsNorm) or not set(covers).issuperset(op.x.users):
        norm = None
    values = [value for each in covers for value in each.results]
    writes = [value for value in values if not set(covers).issuperset(value.users)]
    if any(value.type.dtype in FOUR_BITS for value in writes):
        return "quantization of rows: it writes no codes of 4 bits"
    covers += [norm] if norm else []
    return Fused((_template(op, norm, writes, covers),), tuple(covers))


def _template(
    op: DynamicScale, norm: RmsNorm | None, writes: Sequence[Value], covers: Sequence[Op]
) -> Template:
    inside = {value for each in covers for value in each.results}
    read = {value for each in covers for value in each.operands if value not in inside}
    found = packed(op, lambda pack: _quantized(op, norm, writes, Body(read), pack))
    return replace(found.launch(op, writes=writes), operations=tuple(covers))


def _quantized(
    op: DynamicScale, norm: RmsNorm | None, writes: Sequence[Value], body: Body, pack: int
) -> Rows:
    rows = Rows(body, op.x.type.shape, (-1,), pack=pack)
    kind, rounding = REGISTERS[op.x.type.dtype]
    normalized = Normalized(norm, rows) if norm else rows.keep(kind)

    def first(column: str) -> str:
        found = body.element(op.x, rows.index(column)) if not norm else ""
        if norm and normalized:
            found = body.variable(kind, f"{rounding}({scaled(norm, normalized, factor, column)})")
        return rows.remembered(column, found)

    def finish(column: str) -> None:
        x, index = rows.recall(kind, column) or first(column), rows.index(column)
        body.give(op.x, index, x)
        body.give(op.result, (*index[:-1], "0"), scale)
        for i, value in enumerate(writes):
            if value is not op.result:
                rows.store(i, value, column, body.element(value, index))

    with rows.each():
        factor = scale_of(norm, normalized) if norm and normalized else ""
        scale = _scale(op, rows, first)
        rows.visit(finish)
        if op.result in writes:
            with rows.once():
                body.line(f"store(out{writes.index(op.result)}, row, {scale});")
    return rows
