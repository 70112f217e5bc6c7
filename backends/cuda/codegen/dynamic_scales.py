"""Scales of dynamic quantization, and what they quantize in the same launch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from irc.ir.core import Value
from irc.ir.dims import product
from irc.ir.expansion import Expansion, expansion
from irc.ops import Dequantize, DynamicScale, QuantizeRows, RmsNorm
from irc.ops.quant import LARGEST, rounded_down_factor

from ..plan.regime import Regime
from ..plan.template import Template, kernels_of, launches_of
from .body import REGISTERS, Body
from .kernels import elementwise
from .norms import normalized, scale_of, scaled
from .rows import Rows, Source, packed
from .streaming.choices import MOST_ROWS


@kernels_of(DynamicScale)
def dynamic_scale(op: DynamicScale, regime: Regime) -> list[Template]:
    """The largest size of every block, as the scale that maps it to the largest code."""
    return [packed(op, lambda pack: _scales(op, Body(regime.stored), pack)).launch(op)]


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


@launches_of(QuantizeRows)
def quantize_rows(op: QuantizeRows, regime: Regime) -> list[Template]:
    """One launch for what is read of codes, scales and numbers, with rms_norm in front.

    Products of few rows read the numbers, those of more the codes; another launch has the rest.
    """
    first, rest = op.results[:2], op.results[2:]
    if regime.bucket(product(op.x.type.shape[:-1]), (MOST_ROWS,)) is not None:
        first = tuple(value for value in op.results if value.users)
        rest = tuple(value for value in op.results[:2] if value not in first)
        return [_rows_of(op, results, regime) for results in (first, rest) if results]
    return [_rows_of(op, first, regime), *(_numbers(op, value) for value in rest if value.users)]


def _numbers(op: QuantizeRows, numbers: Value) -> Template:
    """The launch for the numbers that codes in memory stand for."""
    codes, scale = (Value(value.type, None, 0) for value in op.results[:2])
    template = elementwise([Dequantize(codes, scale, dtype=op.dtype).result], {codes, scale})
    return replace(template, reads=op.results[:2], writes=(numbers,), operations=(op,))


def _rows_of(op: QuantizeRows, writes: Sequence[Value], regime: Regime) -> Template:
    """The launch for some of the results."""
    parts = expansion(op)
    results = [parts.results[op.results.index(value)] for value in writes]
    operands = dict(zip(parts.operands, op.operands, strict=True))
    constants = [value for value, operand in operands.items() if regime.is_constant(operand)]
    rows = packed(op, lambda pack: _quantized(parts, results, constants, pack))
    template = rows.launch(op, writes=results)
    reads, early = (
        tuple(map(operands.__getitem__, each)) for each in (template.reads, template.early)
    )
    return replace(template, reads=reads, early=early, writes=tuple(writes))


def _quantized(
    parts: Expansion, writes: Sequence[Value], constants: Collection[Value], pack: int
) -> Rows:
    norm = next((part for part in parts.ops if isinstance(part, RmsNorm)), None)
    op = next(part for part in parts.ops if isinstance(part, DynamicScale))
    body = Body(parts.operands)
    rows = Rows(body, op.x.type.shape, (-1,), pack=pack)
    kind, rounding = REGISTERS[op.x.type.dtype]
    before = normalized(norm, rows) if norm else None

    def element(column: str) -> str:
        if norm is None or before is None:
            return body.element(op.x, rows.index(column))
        return body.variable(kind, f"{rounding}({scaled(norm, rows, before, factor, column)})")

    number = rows.kept(kind, element)

    def finish(column: str) -> None:
        index = rows.index(column)
        body.give(op.x, index, number(column))
        body.give(op.result, (*index[:-1], "0"), scale)
        for i, value in enumerate(writes):
            if value is not op.result:
                rows.store(i, value, column, body.element(value, index))

    with rows.each():
        if norm and norm.weight in constants:
            rows.read_early(norm.weight)
        factor = scale_of(norm, rows, before) if norm and before else ""
        scale = _scale(op, rows, number)
        rows.visit(finish)
        if op.result in writes:
            with rows.once():
                body.line(f"store(out{writes.index(op.result)}, row, {scale});")
    return rows
