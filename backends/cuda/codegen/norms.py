"""Kernels of normalizations."""

from __future__ import annotations

from typing import TypeAlias

from irc.ir.core import Op
from irc.ir.dims import DimLike, exact_divide
from irc.ops import AddLayerNorm, AddRmsNorm, GroupNorm, LayerNorm, RmsNorm

from ..plan.regime import Regime
from ..plan.template import Template, kernels_of
from .body import REGISTERS, Body
from .rows import Rows, Source, packed

AnyNorm: TypeAlias = RmsNorm | AddRmsNorm | LayerNorm | AddLayerNorm | GroupNorm


def normalized(op: Op, rows: Rows) -> Source:
    """What is normalized: x, or the sum of the first two operands, the second result."""
    body, x = rows.body, op.operands[0]
    residual = op.operands[1] if len(op.results) > 1 else None
    kind, rounding = REGISTERS[x.type.dtype]

    def number(column: str) -> str:
        index = rows.index(column)
        found = body.element(x, index)
        if residual is None:
            return found
        return body.variable(kind, f"{rounding}(add({found}, {body.element(residual, index)}))")

    return rows.kept(kind, number)


def _stored(op: Op, rows: Rows, number: Source) -> Source:
    """The numbers to normalize at the first visit, which stores them where they are a result."""

    def stored(column: str) -> str:
        found = number(column)
        if len(op.results) > 1:
            rows.store(1, op.results[1], column, found)
        return found

    return stored


def _scale(op: AnyNorm, rows: Rows, squares: str) -> str:
    """1 / the root of the mean of squares and eps, from their sum."""
    kind = REGISTERS[op.x.type.dtype][0]
    root = f"sqrt(add({squares} / ({kind}){rows.length}, ({kind}){op.eps!r}))"
    return rows.body.variable(kind, f"({kind})1.0 / {root}")


@kernels_of(RmsNorm, AddRmsNorm)
def rms_norm(op: RmsNorm | AddRmsNorm, regime: Regime) -> list[Template]:
    """A row divided by the root of its mean square."""

    def make(pack: int) -> Rows:
        rows = Rows(Body(regime.stored), op.x.type.shape, (-1,), pack=pack)
        number = normalized(op, rows)
        with rows.each():
            if regime.is_constant(op.weight):
                rows.read_early(op.weight)
            scale = scale_of(op, rows, number)
            rows.visit(
                lambda c: rows.store(0, op.results[0], c, scaled(op, rows, number, scale, c))
            )
        return rows

    return [packed(op, make).launch(op)]


def scale_of(op: RmsNorm | AddRmsNorm, rows: Rows, number: Source) -> str:
    """1 / the root of the mean square of a row."""
    kind, first = REGISTERS[op.x.type.dtype][0], _stored(op, rows, number)

    def square(column: str) -> str:
        x = first(column)
        return f"mul({x}, {x})"

    return _scale(op, rows, rows.total(kind, f"({kind})0", "Add", square))


def scaled(op: RmsNorm | AddRmsNorm, rows: Rows, number: Source, scale: str, column: str) -> str:
    """An element of the normalized row, before it is rounded."""
    kind, x = REGISTERS[op.x.type.dtype][0], number(column)
    weight = rows.body.element(op.weight, rows.index(column)[-1:])
    offset = f"({REGISTERS[op.weight.type.dtype][0]}){op.offset!r}"
    return f"mul(mul({x}, {scale}), ({kind})add({weight}, {offset}))"


@kernels_of(LayerNorm, AddLayerNorm)
def layer_norm(op: LayerNorm | AddLayerNorm, regime: Regime) -> list[Template]:
    """A row with mean 0 and variance 1, times the weight, plus the bias."""

    def make(pack: int) -> Rows:
        rows = Rows(Body(regime.stored), op.x.type.shape, (-1,), pack=pack)
        return _standardized(op, rows, -1)

    return [packed(op, make).launch(op)]


@kernels_of(GroupNorm)
def group_norm(op: GroupNorm, regime: Regime) -> list[Template]:
    """layer_norm of each group of channels, which lies in one piece in memory."""
    batch, channels, *positions = shape = op.x.type.shape
    size: DimLike = exact_divide(channels, op.groups) or 0
    for each in positions:
        size = size * each
    rows = Rows(Body(regime.stored), (batch, op.groups, size), (2,), real=shape)
    return [_standardized(op, rows, 1).launch(op)]


def _standardized(op: LayerNorm | AddLayerNorm | GroupNorm, rows: Rows, features: int) -> Rows:
    """The kernel, with a weight and a bias along dimension `features`."""
    body, kind, number = rows.body, REGISTERS[op.x.type.dtype][0], normalized(op, rows)

    def square(column: str) -> str:
        away = body.variable(kind, f"{number(column)} - {mean}")
        return f"mul({away}, {away})"

    def finish(column: str) -> None:
        done = f"mul({number(column)} - {mean}, {scale})"
        at = (rows.index(column)[features],)
        if op.weight is not None:
            done = f"mul({done}, ({kind}){body.element(op.weight, at)})"
        if op.bias is not None:
            done = f"add({done}, ({kind}){body.element(op.bias, at)})"
        rows.store(0, op.results[0], column, done)

    with rows.each():
        total = rows.total(kind, f"({kind})0", "Add", _stored(op, rows, number))
        mean = body.variable(kind, f"{total} / ({kind}){rows.length}")
        scale = _scale(op, rows, rows.total(kind, f"({kind})0", "Add", square))
        rows.visit(finish)
    return rows
