"""`QuantizationReport`: an instrument that lists what `quantize` did to every product."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import inf, log10, prod
from typing import Any, TypeAlias

import numpy as np

from ..ir.core import Module, Op, Value, Weight
from ..ir.dtypes import dtype
from ..ir.types import TensorType
from ..ops import Dequantize, DynamicScale, Quantize, Transpose
from ..ops.quant import block_sizes
from ..pipeline import Instrument, Step
from ..weights import QuantizedRef, Ref
from ..weights.checkpoint import Reader
from .sites import find_sites

Array: TypeAlias = np.ndarray[Any, Any]
PASS = "quantize"
COLUMNS = ("layer", "weight", "input", "bytes", "quantized", "SQNR", "largest error")
_BLOCK = 1 << 22  # elements that are compared at a time


@dataclass(frozen=True)
class Row:
    """A product whose weight or input was quantized.

    `weight` and `input` are formats in words, such as "i4 in groups of 128"; "" is not quantized.
    `before` and `after` are bytes of the weight with its scales. `sqnr` is the signal-to-noise
    ratio of the weight in decibels, `largest` its largest error; None where they were not measured.
    """

    site: str
    weight: str
    input: str
    before: int
    after: int
    sqnr: float | None = None
    largest: float | None = None


class QuantizationReport(Instrument):
    """Keeps `rows`, a Row per product that `quantize` changed; with `errors`, reads all weights."""

    def __init__(self, errors: bool = False) -> None:
        self.rows: list[Row] = []
        self._errors = errors
        self._before: list[tuple[str, Op, Value, TensorType, Ref]] = []

    def before(self, step: Step, module: Module) -> None:
        if step.pass_.name == PASS:
            self._before = [
                (site.name, site.op, site.x, site.weight.type, site.weight.ref)
                for site in find_sites(module)
            ]

    def after(self, step: Step, module: Module) -> None:
        if step.pass_.name != PASS:
            return
        reader = Reader(module)
        for name, op, x, type, ref in self._before:
            made = _dequantized(op.operands[1])
            entered = _dequantized(op.operands[0])
            if made is None and (entered is None or op.operands[0] is x):
                continue
            self.rows.append(self._row(name, type, ref, made, entered, reader))

    def as_json(self) -> list[dict[str, Any]]:
        """The rows for JSON."""
        return [asdict(row) for row in self.rows]

    def table(self) -> list[list[str]]:
        """COLUMNS, then the cells of every row."""
        return [list(COLUMNS), *(_cells(row) for row in self.rows)]

    def _row(
        self,
        name: str,
        type: TensorType,
        ref: Ref,
        weight: Dequantize | None,
        input: Dequantize | None,
        reader: Reader,
    ) -> Row:
        before = _nbytes(type)
        row = Row(name, _weight_words(weight), _input_words(input), before, before)
        if weight is None:
            return row
        after = sum(_nbytes(each.type) for each in _weights(weight))
        sqnr, largest = _error(weight, type, ref, reader) if self._errors else (None, None)
        return Row(name, row.weight, row.input, before, after, sqnr, largest)


def _cells(row: Row) -> list[str]:
    measured = ["", ""]
    if row.sqnr is not None and row.largest is not None:
        measured = [f"{row.sqnr:.1f} dB", f"{row.largest:.3g}"]
    return [row.site, row.weight, row.input, f"{row.before:,}", f"{row.after:,}", *measured]


def _dequantized(value: Value) -> Dequantize | None:
    """The operation that dequantizes a value, seen through transposes."""
    op = value.producer
    while isinstance(op, Transpose):
        op = op.x.producer
    return op if isinstance(op, Dequantize) else None


def _nbytes(type: TensorType) -> int:
    return dtype(type.dtype).nbytes(prod(size for size in type.shape if isinstance(size, int)))


def _weights(value: Dequantize) -> Iterator[Weight]:
    """The weights behind a dequantized value."""
    for operand in value.operands:
        if isinstance(operand, Weight):
            yield operand
        elif isinstance(operand.producer, Dequantize):
            yield from _weights(operand.producer)


def _weight_words(op: Dequantize | None) -> str:
    if op is None:
        return ""
    zero = ", zero points" if op.zero is not None else ""
    return f"{op.x.type.dtype} {_blocks(op)}{zero}"


def _blocks(op: Dequantize) -> str:
    """How many elements share a scale, in words."""
    sizes = block_sizes(op.x.type.shape, op.scale.type.shape)
    pairs = list(zip(sizes, op.x.type.shape, strict=True))
    if all(size == whole for size, whole in pairs):
        return "per tensor"
    shared = [(size, whole) for size, whole in pairs if size != 1]
    if len(shared) == 1:
        size, whole = shared[0]
        return "per channel" if size == whole else f"in groups of {size}"
    return f"in blocks of {'x'.join(str(size) for size, _ in pairs)}"


def _input_words(op: Dequantize | None) -> str:
    """How an input is rounded: statically per tensor, or by scales that are computed."""
    if op is None or not isinstance(op.x.producer, Quantize):
        return ""
    scale = op.x.producer.scale.producer
    while isinstance(scale, Dequantize):
        scale = scale.x.producer
    if not isinstance(scale, DynamicScale):
        return f"{op.x.type.dtype} per tensor"
    return f"{op.x.type.dtype} " + (f"in groups of {scale.block}" if scale.block else "per token")


def _error(weight: Dequantize, type: TensorType, ref: Ref, reader: Reader) -> tuple[float, float]:
    """(SQNR in dB, largest error) of a weight, read by rows; a ref of codes knows its source."""
    assert isinstance(weight.x, Weight)
    codes = weight.x.ref
    source = codes.source if isinstance(codes, QuantizedRef) and not codes.steps else ref
    original = Weight(type, "original", source)
    shape = tuple(int(size) for size in weight.x.type.shape if isinstance(size, int))
    rows = max(1, _BLOCK // max(1, prod(shape[1:])))
    unit = max([1, *_row_blocks(weight)])
    rows = -(-rows // unit) * unit
    signal = noise = largest = 0.0
    for begin in range(0, shape[0], rows):
        part = (begin, min(begin + rows, shape[0]))
        inner = [(0, size) for size in shape[1:]]
        wanted = reader.region(original, [part, *inner]).astype(np.float32)
        found = np.asarray(_values(weight, part, reader), np.float32)
        error = found - wanted
        signal += float(np.vdot(wanted, wanted))
        noise += float(np.vdot(error, error))
        largest = max(largest, float(np.abs(error).max(initial=0.0)))
    if not noise:
        return inf, largest
    return (10 * log10(signal / noise) if signal else -inf), largest


def _row_blocks(op: Dequantize) -> Iterator[int]:
    """Rows that share a scale, in every level of scales."""
    size = block_sizes(op.x.type.shape, op.scale.type.shape)[0]
    if op.scale.type.shape[0] != 1 and isinstance(size, int):
        yield size
    if isinstance(op.scale.producer, Dequantize):
        yield from _row_blocks(op.scale.producer)


def _values(value: Value | Dequantize, rows: tuple[int, int], reader: Reader) -> Any:
    """Some rows of a weight, or of one that is dequantized."""
    if isinstance(value, Dequantize):
        parts = [
            None if each is None else _values(each, _scaled(each, value, rows), reader)
            for each in (value.x, value.scale, value.zero)
        ]
        return value.evaluate(*parts)
    if isinstance(value.producer, Dequantize):
        return _values(value.producer, rows, reader)
    assert isinstance(value, Weight)
    inner = [(0, int(size)) for size in value.type.shape[1:] if isinstance(size, int)]
    return reader.region(value, [rows, *inner])


def _scaled(part: Value, op: Dequantize, rows: tuple[int, int]) -> tuple[int, int]:
    """The rows of scales for these rows of codes."""
    count, total = part.type.shape[0], op.x.type.shape[0]
    assert isinstance(count, int) and isinstance(total, int)
    if count == 1 != total:
        return 0, 1
    block = total // count
    return rows[0] // block, -(-rows[1] // block)
