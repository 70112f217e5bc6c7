"""`QuantizationReport`: an instrument that lists what `quantize` did to every product."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from math import inf, log10, prod
from typing import Any, TypeAlias

import numpy as np

from ..ir.core import Module, Value, Weight
from ..ir.dtypes import dtype
from ..ir.types import TensorType
from ..ops import Dequantize, DynamicScale, Quantize, Transpose
from ..ops.quant import block_sizes
from ..pipeline import Instrument, Step
from ..weights import ProductRef, QuantizedRef, Ref
from ..weights.checkpoint import Reader
from .sites import Site, find_sites
from .statistics import Statistics

Array: TypeAlias = np.ndarray[Any, Any]
PASS = "quantize"
COLUMNS = ("layer", "weight", "input", "bytes", "quantized", "SQNR", "largest error", "outputs")
_BLOCK = 1 << 22  # elements that are compared at a time


@dataclass(frozen=True)
class Row:
    """A product whose weight or input was quantized.

    `weight` and `input` are formats in words, such as "i4 in groups of 128"; "" is not quantized.
    `before` and `after` are bytes of the weight with its scales. `sqnr` is the signal-to-noise
    ratio of the weight in decibels, `largest` its largest error, without the factors of AWQ and
    SmoothQuant. `outputs` is the ratio of the product's outputs for inputs that are not rounded, by
    the gram matrix of a calibration. None where they were not measured.
    """

    site: str
    weight: str
    input: str
    before: int
    after: int
    sqnr: float | None = None
    largest: float | None = None
    outputs: float | None = None


class QuantizationReport(Instrument):
    """Keeps `rows`, a Row per product that `quantize` changed; with `errors`, reads all weights."""

    def __init__(self, errors: bool = False) -> None:
        self.rows: list[Row] = []
        self._errors = errors
        self._before: list[tuple[Site, Ref]] = []

    def before(self, step: Step, module: Module) -> None:
        if step.pass_.name == PASS:
            self._before = [(site, site.weight.ref) for site in find_sites(module)]

    def after(self, step: Step, module: Module) -> None:
        if step.pass_.name != PASS:
            return
        reader, folder = Reader(module), getattr(step.pass_, "calibration", "")
        statistics = Statistics(folder) if folder and self._errors else None
        for site, ref in self._before:
            weight = _dequantized(site.op.operands[1])
            input = _dequantized(site.op.operands[0])
            if weight is None and (input is None or site.op.operands[0] is site.x):
                continue
            self.rows.append(self._row(site, ref, weight, input, reader, statistics))

    def as_json(self) -> list[dict[str, Any]]:
        """The rows for JSON."""
        return [asdict(row) for row in self.rows]

    def table(self) -> list[list[str]]:
        """COLUMNS, then the cells of every row."""
        return [list(COLUMNS), *(_cells(row) for row in self.rows)]

    def _row(
        self,
        site: Site,
        ref: Ref,
        weight: Dequantize | None,
        input: Dequantize | None,
        reader: Reader,
        statistics: Statistics | None,
    ) -> Row:
        before = _nbytes(site.weight.type)
        row = Row(site.name, _weight_words(weight), _input_words(input), before, before)
        if weight is None:
            return row
        row = replace(row, after=sum(_nbytes(part.type) for part in _weights(weight)))
        if not self._errors:
            return row
        gram = None
        if statistics is not None and {*site.keys} <= {*statistics.sites()}:
            gram = statistics.gram(*site.keys) if statistics.has_gram(*site.keys) else None
        sqnr, largest, outputs = _error(weight, site, ref, gram, reader)
        return replace(row, sqnr=sqnr, largest=largest, outputs=outputs)


def _cells(row: Row) -> list[str]:
    largest = "" if row.largest is None else f"{row.largest:.3g}"
    measured = [_decibels(row.sqnr), largest, _decibels(row.outputs)]
    return [row.site, row.weight, row.input, f"{row.before:,}", f"{row.after:,}", *measured]


def _decibels(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.1f} dB"


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


def _error(
    weight: Dequantize, site: Site, ref: Ref, gram: Array | None, reader: Reader
) -> tuple[float, float, float | None]:
    """(SQNR in dB, largest error, SQNR of the outputs) of a weight that was `ref`, read by rows."""
    original = Weight(site.weight.type, "original", ref)
    factors = [(reader.read(factor), dim) for factor, dim in _factors(weight, site, ref)]
    shape = site.shape
    rows = max(1, _BLOCK // max(1, prod(shape[1:])))
    unit = max([1, *_row_blocks(weight)])
    rows = shape[0] if gram is not None and site.inputs == 0 else -(-rows // unit) * unit
    signal = noise = largest = 0.0
    outputs = np.zeros(2)  # the powers of the outputs, and of their error
    for begin in range(0, shape[0], rows):
        part = (begin, min(begin + rows, shape[0]))
        inner = [(0, size) for size in shape[1:]]
        wanted = reader.region(original, [part, *inner]).astype(np.float32)
        rounded = np.asarray(_values(weight, part, reader), np.float32)
        for values, dim in factors:
            values = values[slice(*part)] if dim == 0 else values
            rounded = rounded / values.reshape([-1 if i == dim else 1 for i in range(len(shape))])
        error = rounded - wanted
        signal += float(np.vdot(wanted, wanted))
        noise += float(np.vdot(error, error))
        largest = max(largest, float(np.abs(error).max(initial=0.0)))
        if gram is not None:
            for i, array in enumerate((wanted, error)):
                flat = np.moveaxis(array, site.inputs, -1).reshape(-1, len(gram))
                outputs[i] += np.vdot(flat @ gram, flat)
    return _ratio(signal, noise), largest, None if gram is None else _ratio(*outputs.tolist())


def _ratio(signal: float, noise: float) -> float:
    """A signal-to-noise ratio in decibels."""
    if noise <= 0:
        return inf
    return 10 * log10(signal / noise) if signal > 0 else -inf


def _factors(weight: Dequantize, site: Site, ref: Ref) -> list[tuple[Ref, int]]:
    """By dimension, the vectors that a weight which was `ref` was multiplied by before rounding."""
    assert isinstance(weight.x, Weight)
    codes, factors = weight.x.ref, list[tuple[Ref, int]]()
    source = codes.source if isinstance(codes, QuantizedRef) else site.weight.ref
    while isinstance(source, ProductRef) and source != ref and not source.steps:
        factors.append((source.factor, source.dim))
        source = source.source
    return factors


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
            None if part is None else _values(part, _scaled(part, value, rows), reader)
            for part in (value.x, value.scale, value.zero)
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
