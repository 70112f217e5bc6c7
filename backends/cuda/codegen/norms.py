"""Kernels of normalizations."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from irc.ir.core import Op, Value
from irc.ir.dims import DimLike, exact_divide
from irc.ops import AddLayerNorm, AddRmsNorm, GroupNorm, LayerNorm, RmsNorm

from ..plan.template import Template, kernels_of
from .body import REGISTERS, Body, Index
from .rows import Rows, packed


class Normalized:
    """The kernel of one normalization: statistics of every row, then its results.

    The first result is the norm; the second one, if any, is the sum that is normalized.
    """

    def __init__(self, op: Op, rows: Rows) -> None:
        self.op, self.body, self.rows = op, rows.body, rows
        self.x: Value = op.operands[0]
        self.kind, self.rounding = REGISTERS[self.x.type.dtype]
        rows.keep(self.kind)

    def first(self, column: str) -> str:
        """The number to normalize, at the first visit."""
        index = self.rows.index(column)
        found = self._computed(index)
        if len(self.op.results) > 1:
            self.rows.store(1, self.op.results[1], column, found)
        return self.rows.remembered(column, found)

    def again(self, column: str) -> str:
        """The number to normalize, at later visits."""
        return self.rows.recall(self.kind, column) or self._computed(self.rows.index(column))

    def _computed(self, index: Index) -> str:
        found = self.body.element(self.x, index)
        if len(self.op.results) == 1:
            return found
        residual = self.body.element(self.op.operands[1], index)
        return self.body.variable(self.kind, f"{self.rounding}(add({found}, {residual}))")

    def mean(self, total: str) -> str:
        """A sum over the row divided by its length."""
        return f"({total} / ({self.kind}){self.rows.length})"

    def number(self, value: float) -> str:
        """A number in C, in the type of registers."""
        return f"({self.kind}){value!r}"


@kernels_of(RmsNorm, AddRmsNorm)
def rms_norm(op: RmsNorm | AddRmsNorm, stored: Collection[Value]) -> list[Template]:
    """A row divided by the root of its mean square."""

    def make(pack: int) -> Rows:
        rows = Rows(Body(stored), op.x.type.shape, (-1,), pack=pack)
        norm = Normalized(op, rows)
        with rows.each():
            scale = scale_of(op, norm)
            rows.visit(lambda c: rows.store(0, op.results[0], c, scaled(op, norm, scale, c)))
        return rows

    return [packed(op, make).launch(op)]


def scale_of(op: RmsNorm | AddRmsNorm, norm: Normalized) -> str:
    """1 / the root of the mean square of a row."""

    def square(column: str) -> str:
        x = norm.first(column)
        return f"mul({x}, {x})"

    total = norm.rows.total(norm.kind, f"({norm.kind})0", "Add", square)
    root = f"sqrt(add({norm.mean(total)}, {norm.number(op.eps)}))"
    return norm.body.variable(norm.kind, f"{norm.number(1.0)} / {root}")


def scaled(op: RmsNorm | AddRmsNorm, norm: Normalized, scale: str, column: str) -> str:
    """An element of the normalized row, before it is rounded."""
    x, index = norm.again(column), norm.rows.index(column)
    weight = norm.body.element(op.weight, index[-1:])
    offset = f"({REGISTERS[op.weight.type.dtype][0]}){op.offset!r}"
    return f"mul(mul({x}, {scale}), ({norm.kind})add({weight}, {offset}))"


def norm_of_sum(op: AddRmsNorm) -> Template:
    """The launch of the norm alone, where another one computes the sum."""
    total, weight = (Value(v.type, None, 0) for v in (op.results[1], op.weight))
    norm = RmsNorm(total, weight, eps=op.eps, offset=op.offset)
    (found,) = rms_norm(norm, {total, weight, norm.result})
    assert isinstance(found, Template)
    real = {total: op.results[1], weight: op.weight}
    reads = tuple(real[value] for value in found.reads)
    return replace(found, reads=reads, writes=(op.results[0],), operations=(op,))


@kernels_of(LayerNorm, AddLayerNorm)
def layer_norm(op: LayerNorm | AddLayerNorm, stored: Collection[Value]) -> list[Template]:
    """A row with mean 0 and variance 1, times the weight, plus the bias."""

    def make(pack: int) -> Rows:
        rows = Rows(Body(stored), op.x.type.shape, (-1,), pack=pack)
        return _standardized(op, Normalized(op, rows), -1)

    return [packed(op, make).launch(op)]


@kernels_of(GroupNorm)
def group_norm(op: GroupNorm, stored: Collection[Value]) -> list[Template]:
    """layer_norm of each group of channels, which lies in one piece in memory."""
    batch, channels, *positions = shape = op.x.type.shape
    size: DimLike = exact_divide(channels, op.groups) or 0
    for each in positions:
        size = size * each
    rows = Rows(Body(stored), (batch, op.groups, size), (2,), real=shape)
    return [_standardized(op, Normalized(op, rows), 1).launch(op)]


def _standardized(
    op: LayerNorm | AddLayerNorm | GroupNorm, norm: Normalized, features: int
) -> Rows:
    """The kernel, with a weight and a bias along dimension `features`."""
    body, rows, kind = norm.body, norm.rows, norm.kind

    def square(column: str) -> str:
        away = body.variable(kind, f"{norm.again(column)} - {mean}")
        return f"mul({away}, {away})"

    def finish(column: str) -> None:
        done = f"mul({norm.again(column)} - {mean}, {scale})"
        at = (rows.index(column)[features],)
        if op.weight is not None:
            done = f"mul({done}, ({kind}){body.element(op.weight, at)})"
        if op.bias is not None:
            done = f"add({done}, ({kind}){body.element(op.bias, at)})"
        rows.store(0, op.results[0], column, done)

    with rows.each():
        total = rows.total(kind, f"({kind})0", "Add", norm.first)
        mean = body.variable(kind, norm.mean(total))
        variance = norm.mean(rows.total(kind, f"({kind})0", "Add", square))
        root = f"sqrt(add({variance}, {norm.number(op.eps)}))"
        scale = body.variable(kind, f"{norm.number(1.0)} / {root}")
        rows.visit(finish)
    return rows
